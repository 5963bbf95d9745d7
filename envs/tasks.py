"""The task set: holes in functions of installed packages, judged by the functions' own doctests.

An index (`tasksets/doctests.json.zst`, made by `build`) names packages, functions and positions; it holds no
source. Source is read where pip put it, and must be the very bytes that the index was made from. Runs no
code, gives no rewards. Read by the harness, the prompt feed and the commands.
"""

import ast
import hashlib
import importlib.metadata
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

import msgspec
import zstandard

from headrace.envs.checks import Check, checks_of
from headrace.errors import ConfigError
from headrace.policy.source import HoleKind, canonical, restore

Split = Literal["train", "heldout"]
SIGNAL_KINDS: tuple[HoleKind, ...] = (
    "operator",
    "constant",
    "name",
)  # docs/tasks.md: what a small model can learn
FORMAT = 1
INDEX = "doctests.json.zst"
_INDEX_BYTES_MAX = 16 << 20


class HoleEntry(msgspec.Struct, frozen=True, array_like=True):
    kind: HoleKind
    start: int
    end: int
    """Offsets in the function's canonical text."""


class FunctionEntry(msgspec.Struct, frozen=True, array_like=True):
    split: Split
    distribution: str
    file: str
    """Relative to where the distribution is installed."""
    module: str
    name: str
    line: int
    line_last: int
    """1-based, decorators included."""
    canonical_sha256: str
    visible: tuple[int, ...]
    hidden: tuple[int, ...]
    """Positions in `checks_of(docstring)`."""
    holes: tuple[HoleEntry, ...]


class Index(msgspec.Struct, frozen=True):
    format: int
    versions: dict[str, str]
    """Distribution -> the one version that the positions belong to."""
    sources: dict[str, str]
    """`distribution:file` -> SHA-256."""
    functions: tuple[FunctionEntry, ...]


class Task(msgspec.Struct, frozen=True):
    """One hole. `prefix`, `suffix` and `fill` (the original) are canonical text; `checks` run in the given
    order, hidden ones marked."""

    task_id: str
    split: Split
    kind: HoleKind
    distribution: str
    module: str
    function: str
    prefix: str
    suffix: str
    fill: str
    checks: tuple[Check, ...]

    def program(self, fill: str) -> str:
        """Runnable source of the whole function with `fill` in the hole."""
        return restore(f"{self.prefix} {fill.strip()}{self.suffix}")


class TaskSet:
    """Tasks of one split, by id, in the order of the index."""

    def __init__(self, split: Split, functions: Iterable[FunctionEntry], kinds: Iterable[HoleKind]) -> None:
        """Use `load`."""
        self.split = split
        self._places: dict[str, tuple[FunctionEntry, HoleEntry]] = {}
        for function in functions:
            for hole in function.holes:
                if hole.kind in kinds:
                    self._places[task_id(function, hole)] = (function, hole)

    @classmethod
    def load(
        cls, split: Split, kinds: Iterable[HoleKind] = SIGNAL_KINDS, index: Path | None = None
    ) -> "TaskSet":
        """The tasks of `split` whose hole is one of `kinds`.

        Raises ConfigError when the split or a kind is unknown, or an installed package is missing, has
        another version, or other bytes than the index was made from.
        """
        kinds = tuple(kinds)
        _known("split", (split,), get_args(Split))
        _known("kind", kinds, get_args(HoleKind))
        found = read_index(index)
        functions = [function for function in found.functions if function.split == split]
        for distribution in sorted({function.distribution for function in functions}):
            check_version(distribution, found.versions[distribution])
        for name in sorted({f"{function.distribution}:{function.file}" for function in functions}):
            distribution, _, file = name.partition(":")
            _check_source(distribution, file, found.sources[name])
        return cls(split, functions, kinds)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Task]:
        """Every task, its source read on the way; `task_ids` costs nothing."""
        return map(self.task, self._places)

    @cached_property
    def task_ids(self) -> tuple[str, ...]:
        return tuple(self._places)

    @cached_property
    def distributions(self) -> tuple[str, ...]:
        """What a sandbox for these tasks must be able to import."""
        return tuple(sorted({function.distribution for function, _ in self._places.values()}))

    def kind(self, task_id: str) -> HoleKind:
        """The kind of hole, without reading any source."""
        return self._place(task_id)[1].kind

    def task(self, task_id: str) -> Task:
        """Raises ConfigError for an id not in this set, or a source that this Python writes differently."""
        function, hole = self._place(task_id)
        text, checks = _function(function)
        return Task(
            task_id=task_id,
            split=self.split,
            kind=hole.kind,
            distribution=function.distribution,
            module=function.module,
            function=function.name,
            prefix=text[: hole.start],
            suffix=text[hole.end :],
            fill=text[hole.start : hole.end],
            checks=checks,
        )

    def _place(self, task_id: str) -> tuple[FunctionEntry, HoleEntry]:
        if task_id not in self._places:
            raise ConfigError(f"task set {self.split}: no task {task_id!r}")
        return self._places[task_id]


def distributions(index: Path | None = None) -> tuple[str, ...]:
    """All distributions of the index, for a sandbox that serves both splits."""
    return tuple(sorted(read_index(index).versions))


def task_id(function: FunctionEntry, hole: HoleEntry) -> str:
    return f"{function.module}.{function.name}:{hole.kind}:{hole.start}-{hole.end}"


def read_index(path: Path | None = None) -> Index:
    """The index at `path`, or the shipped one. Raises ConfigError when it is missing or damaged."""
    place = str(path or INDEX)
    try:
        packed = path.read_bytes() if path else (files("headrace.envs") / "tasksets" / INDEX).read_bytes()
        plain = zstandard.ZstdDecompressor().decompress(packed, max_output_size=_INDEX_BYTES_MAX)
        index = msgspec.json.decode(plain, type=Index)
    except (OSError, zstandard.ZstdError, msgspec.DecodeError) as error:
        raise ConfigError(f"task index {place}: {error}") from error
    if index.format != FORMAT:
        raise ConfigError(f"task index {place}: expected format {FORMAT}, got {index.format}")
    return index


def write_index(index: Index, path: Path) -> int:
    """Bytes written. Equal indexes give equal files."""
    packed = zstandard.ZstdCompressor(level=19).compress(msgspec.json.encode(index))
    path.write_bytes(packed)
    return len(packed)


def check_version(distribution: str, expected: str) -> None:
    """Raises ConfigError unless `distribution` is installed in exactly this version."""
    try:
        got = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        got = "nothing installed"
    if got != expected:
        raise ConfigError(f"task index: {distribution}: expected version {expected}, got {got}")


def source_path(distribution: str, file: str) -> Path:
    return Path(str(importlib.metadata.distribution(distribution).locate_file(file)))


def source_lines(source: str) -> list[str]:
    """Lines as `ast` counts them (str.splitlines knows more line ends)."""
    return [f"{line}\n" for line in source.split("\n")]


def source_sha256(distribution: str, file: str) -> str:
    return hashlib.sha256(source_path(distribution, file).read_bytes()).hexdigest()


def text_sha256(text: str) -> str:
    """Short on purpose: it guards against drift, not against people."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_source(distribution: str, file: str, expected: str) -> None:
    try:
        got = source_sha256(distribution, file)
    except OSError as error:
        raise ConfigError(f"task index: {distribution}: {file}: {error.strerror}") from error
    if got != expected:
        raise ConfigError(
            f"task index: {distribution}: {file}: expected SHA-256 {expected[:16]}…, got {got[:16]}…: "
            "the installed source was changed"
        )


@cache
def _lines(distribution: str, file: str) -> list[str]:
    return source_lines(source_path(distribution, file).read_text(encoding="utf-8"))


@cache
def _function(entry: FunctionEntry) -> tuple[str, tuple[Check, ...]]:
    """Canonical text and checks, the visible ones first."""
    source = "".join(_lines(entry.distribution, entry.file)[entry.line - 1 : entry.line_last])
    text = canonical(source)
    if text_sha256(text) != entry.canonical_sha256:
        raise ConfigError(
            f"task index: {entry.module}.{entry.name}: this Python writes its source differently"
        )
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    checks = checks_of(ast.get_docstring(definition, clean=False) or "")
    shown = [checks[position] for position in entry.visible]
    kept = [msgspec.structs.replace(checks[position], hidden=True) for position in entry.hidden]
    return text, (*shown, *kept)


def _known(what: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigError(f"task set: expected a {what} of {', '.join(allowed)}, got {name!r}")

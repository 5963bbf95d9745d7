"""The corpus of mid-training: functions of the standard library and of installed distributions, in canonical
form.

Left out: the packages that the tasks are made of, every file that holds a doctest, test suites, and functions
too short or too long to be a prompt. Nothing is downloaded or run: the files are read where pip put them. It
makes no training examples (`trainer.midtrain_examples`).
"""

import ast
import hashlib
import importlib.metadata
import multiprocessing
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from headrace.errors import ConfigError, PolicyError
from headrace.policy.source import Hole, canonical_tree, holes

# Distributions of requirements.lock with enough Python source, none of them a source of tasks.
DISTRIBUTIONS = (
    "aiohttp aiokafka anyio attrs click faust-streaming filelock fonttools fsspec grpcio httpcore httpx "
    "huggingface-hub hypothesis idna jinja2 jsonschema markdown-it-py matplotlib "
    "mode-streaming mpmath msgpack mypy numpy pathspec pillow pluggy protobuf pygments pyparsing pytest "
    "python-dateutil pytz pyyaml redis rich setuptools sympy torch tqdm typeguard typer "
    "typing-extensions yarl"
)
TASK_DISTRIBUTIONS = frozenset(
    {
        "boltons",
        "glom",
        "humanize",
        "more-itertools",
        "packaging",
        "pydash",
        "pyrsistent",
        "toolz",
    }
)
_FOREIGN_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib", "lib2to3"}
)
_VENDORED = frozenset({"_vendor", "vendor", "_vendored_packages"})  # copies of task packages hide here
FILE_BYTES_MAX = 400_000  # larger ones are generated tables
CHARACTERS_MIN = 100  # shorter functions only pass a call on


class Function(msgspec.Struct, frozen=True):
    """One function: its canonical text, its holes, and whether it stands outside a class."""

    text: str
    holes: list[Hole]
    free: bool


class Source(msgspec.Struct, frozen=True):
    """What was read of one distribution."""

    name: str
    version: str
    functions: int


def read(
    distributions: list[str],
    distribution_bytes_max: int,
    characters_max: int,
    workers: int,
    progress: Callable[[str], None],
) -> tuple[list[Function], list[Source]]:
    """All different functions of the standard library and `distributions`, in an order that depends on
    nothing but the files.

    Raises ConfigError for a distribution that is not installed or that the tasks are made of.
    """
    files = {name: _files(name) for name in ["python", *sorted(distributions)]}
    seen: set[str] = set()
    functions: list[Function] = []
    sources: list[Source] = []
    context = multiprocessing.get_context("forkserver")  # the caller may hold torch's threads
    with ProcessPoolExecutor(max_workers=workers, mp_context=context) as pool:
        for name, (version, paths) in files.items():
            jobs = [(path, characters_max) for path in _within(paths, distribution_bytes_max)]
            before = len(functions)
            for found in pool.map(_functions_of, jobs, chunksize=8):
                for function in found:
                    mark = hashlib.sha256(function.text.encode()).hexdigest()
                    if mark not in seen:
                        seen.add(mark)
                        functions.append(function)
            sources.append(Source(name, version, len(functions) - before))
            progress(f"corpus: {name} {version}: {len(functions) - before} functions of {len(jobs)} files")
    return functions, sources


def _files(name: str) -> tuple[str, list[Path]]:
    if name == "python":
        root = Path(sysconfig.get_path("stdlib"))
        return sysconfig.get_python_version(), sorted(
            path for path in root.rglob("*.py") if _ours(path, root)
        )
    if name.lower().replace("_", "-") in TASK_DISTRIBUTIONS:
        raise ConfigError(
            f"midtrain.distributions: {name} is a source of tasks: the policy must not have read it"
        )
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"midtrain.distributions: expected {name} to be installed") from error
    root = Path(str(distribution.locate_file("")))
    files = [
        Path(str(distribution.locate_file(file))) for file in distribution.files or [] if file.suffix == ".py"
    ]
    return distribution.version, sorted(path for path in files if _ours(path, root))


def _ours(path: Path, root: Path) -> bool:
    try:
        parts = set(path.relative_to(root).parts[:-1])
    except ValueError:
        return False
    return not parts & (_FOREIGN_FOLDERS | _VENDORED)


def _within(paths: list[Path], bytes_max: int) -> Iterator[Path]:
    """The files, in an order that mixes folders, until `bytes_max` are read."""
    left = bytes_max
    for path in sorted(paths, key=lambda path: hashlib.sha256("/".join(path.parts[-3:]).encode()).digest()):
        size = path.stat().st_size if path.exists() else 0
        if 0 < size <= FILE_BYTES_MAX and left > 0:
            left -= size
            yield path


def _functions_of(job: tuple[Path, int]) -> list[Function]:
    path, characters_max = job
    try:
        text = path.read_text("utf-8")
        if ">>>" in text:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []  # a template or a file for another Python
    found = []
    for node, free in _functions(tree.body, True):
        try:
            body = canonical_tree(node)
            if CHARACTERS_MIN <= len(body) <= characters_max:
                found.append(Function(body, holes(body), free))
        except (PolicyError, ValueError, RecursionError, tokenize.TokenError):
            continue  # a construct that unparses to what the tokenizer of this Python can't read
    return found


def _functions(body: list[ast.stmt], free: bool) -> Iterator[tuple[ast.AST, bool]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, free
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, False)
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node.body, free)

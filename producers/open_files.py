"""The files that simulated editors have open: functions of installed packages, and the places in them where a
user asks for a suggestion.

Source is read where pip put it, and nothing of it is stored. What the user is about to write (`wanted`) is
known to the simulated person alone: it is in no request. Not here: who types (`producers.people`) and what
becomes of it (`producers.editors`).
"""

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from headrace.errors import ConfigError, PolicyError
from headrace.policy import source
from headrace.policy.dialogue import TokenCodec
from headrace.policy.source import Hole

WANTED_TOKENS_MAX = 10
"""What is longer the small model never gets right."""


@dataclass(frozen=True, slots=True)
class OpenFunction:
    """One function of a file, in canonical form, with the pieces that a user may be about to write."""

    distribution: str
    path: str
    name: str
    text: str
    holes: tuple[Hole, ...]


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place where a suggestion is asked for. `wanted`: what the user is about to write there."""

    distribution: str
    path: str
    function: str
    kind: source.HoleKind
    prefix: str
    suffix: str
    wanted: str


def functions(
    distributions: Sequence[str], codec: TokenCodec, *, tokens_min: int, tokens_max: int
) -> list[OpenFunction]:
    """All functions of these lengths, in the order of distributions, files and lines; tests left out. Raises
    ConfigError for a distribution that is not installed or has none."""
    found: list[OpenFunction] = []
    for name in distributions:
        before = len(found)
        for path, place in _files(name):
            found += _of_file(name, path, place, codec, tokens_min, tokens_max)
        if len(found) == before:
            raise ConfigError(f"editors: {name}: expected functions of {tokens_min} to {tokens_max} tokens")
    return found


def cursors(
    opened: Sequence[OpenFunction], kinds: Mapping[source.HoleKind, float], draw: random.Random
) -> Iterator[Cursor]:
    """Endless: a user opens a function somewhere and types it from top to bottom, asking at some places.
    `kinds`: how often each kind of place is asked at, in proportion, where a function has it. Raises
    ConfigError when none has any."""
    wanted = sorted(kind for kind, share in kinds.items() if share > 0)
    if not any(hole.kind in wanted for function in opened for hole in function.holes):
        raise ConfigError(
            f"editors.kinds: expected a kind of place that the open functions have, got {wanted}"
        )
    while True:
        function = opened[draw.randrange(len(opened))]
        kind_here = [kind for kind in wanted if any(hole.kind == kind for hole in function.holes)]
        if not kind_here:
            continue
        asked = {_draw_hole(function, kinds, kind_here, draw) for _ in range(draw.randint(1, 3))}
        for hole in sorted(asked, key=lambda hole: (hole.start, hole.end)):
            yield Cursor(
                function.distribution,
                function.path,
                function.name,
                hole.kind,
                function.text[: hole.start],
                function.text[hole.end :],
                hole.text,
            )


def _draw_hole(
    function: OpenFunction,
    kinds: Mapping[source.HoleKind, float],
    kind_here: Sequence[source.HoleKind],
    draw: random.Random,
) -> Hole:
    kind = draw.choices(kind_here, [kinds[kind] for kind in kind_here])[0]
    return draw.choice([hole for hole in function.holes if hole.kind == kind])


def _files(distribution: str) -> list[tuple[str, Path]]:
    try:
        files = metadata.files(distribution)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"editors: {distribution}: expected an installed distribution") from error
    chosen = [
        file
        for file in files or ()
        if file.suffix == ".py" and not any("test" in part for part in file.parts)
    ]
    return [(str(file), Path(str(file.locate()))) for file in sorted(chosen, key=str)]


def _of_file(
    distribution: str, path: str, place: Path, codec: TokenCodec, tokens_min: int, tokens_max: int
) -> Iterator[OpenFunction]:
    try:
        tree = ast.parse(place.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{place}: expected Python source: {error}") from error
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = source.canonical_tree(node)
        if not tokens_min <= len(codec.encode(text)) <= tokens_max:
            continue
        try:
            holes = source.holes(text)
        except PolicyError:  # a few forms that `ast.unparse` writes have no canonical holes
            continue
        kept = tuple(
            hole
            for hole in holes
            if "__" not in hole.text and len(codec.encode(hole.text)) <= WANTED_TOKENS_MAX
        )
        if kept:
            yield OpenFunction(distribution, path, node.name, text, kept)

"""What a doctest example asks of a program, and the verdict on what the program printed.

The worker's side of the judgement: expected texts stay here. Runs no code.
"""

import ast
import doctest
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Status = Literal["passed", "failed", "error", "timeout", "crash", "limit"]
DETAIL_CHARACTERS_MAX = 200
_FINAL: dict[str, tuple[Status, str]] = {
    "time": ("timeout", "processor time used up"),
    "hang": ("timeout", "no sign of life"),
    "memory": ("limit", "MemoryError"),
    "flood": ("limit", "too much output"),
    "crash": ("crash", "the process died"),
    "forged": ("crash", "wrote into the pipe of results"),
}


class Check(msgspec.Struct, frozen=True):
    """One example that can be run alone: `setup` statements in order, then `source`, which prints `want` or
    raises `exception` (exactly one of the two is given)."""

    setup: tuple[str, ...]
    source: str
    want: str = ""
    exception: str | None = None
    flags: int = 0
    hidden: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """What became of one candidate program."""

    status: Status
    unmet: tuple[int, ...] = ()
    """Checks that were not met or not reached, in that order; all of them if the definition failed."""
    detail: str = ""
    """One bounded line about the first of them."""
    unmet_visible: int | None = None
    """The first of them that may be shown and was run."""
    got_visible: str = ""
    """One line: what that one printed or raised; never of a hidden check."""
    raised_visible: bool = False
    defined: bool = True


def checks_of(docstring: str) -> list[Check]:
    """Each example of `docstring` with an expected result, after the statements before it that expect none.

    Empty when the docstring holds no well-formed examples. Examples marked SKIP are left out. Fences of
    Markdown around examples are no part of what is expected.
    """
    unfenced = "\n".join("" if line.lstrip().startswith("```") else line for line in docstring.split("\n"))
    try:
        examples = doctest.DocTestParser().get_examples(unfenced)
    except ValueError:
        return []
    setup: list[str] = []
    checks = []
    for example in examples:
        if example.options.get(doctest.SKIP):
            continue
        if example.want or example.exc_msg is not None:
            flags = sum(flag for flag, on in example.options.items() if on)
            want = example.want if example.exc_msg is None else ""
            checks.append(Check(tuple(setup), example.source, want, example.exc_msg, flags))
        if not example.want or _binds(example.source):
            setup.append(example.source)
    return checks


def met(check: Check, kind: str, text: str) -> bool:
    """Whether a frame of `candidate.run` is what the check expects, by doctest's own comparison."""
    compare = doctest.OutputChecker().check_output
    if check.exception is None:
        return kind == "out" and compare(check.want, text, check.flags)
    if kind != "exc":
        return False
    if check.flags & doctest.IGNORE_EXCEPTION_DETAIL:
        return check.exception.split(":")[0] == text.split(":")[0].strip()
    return compare(check.exception, text, check.flags)


def outcomes(checks: Sequence[Check], count: int, frames: Iterable[Sequence[object]]) -> list[Outcome]:
    """The verdict on each of `count` candidates from the fork server's frames, in their order."""
    of_candidate: list[list[tuple[int, str, str]]] = [[] for _ in range(count)]
    for number, index, kind, text in frames:
        assert isinstance(number, int) and isinstance(index, int)
        of_candidate[number].append((index, str(kind), str(text)))
    return [_outcome(checks, seen) for seen in of_candidate]


def _outcome(checks: Sequence[Check], seen: list[tuple[int, str, str]]) -> Outcome:
    _, kind, text = seen[0]
    if kind != "loaded":
        status, detail = _FINAL.get(kind, ("error", one_line(text)))
        return Outcome(status, tuple(range(len(checks))), detail, defined=False)
    wrong = [(index, kind, text) for index, kind, text in seen[1:] if not met(checks[index], kind, text)]
    unreached = range(len(seen) - 1, len(checks))
    if not wrong and not unreached:
        return Outcome("passed")
    _, kind, text = wrong[0]
    status, detail = _FINAL.get(kind, ("failed" if kind == "out" else "error", one_line(text)))
    shown = next((frame for frame in wrong if not checks[frame[0]].hidden), None)
    return Outcome(
        status,
        (*(index for index, _, _ in wrong), *unreached),
        detail,
        unmet_visible=shown[0] if shown else None,
        got_visible=_told(*shown[1:]) if shown else "",
        raised_visible=shown is not None and shown[1] != "out",
    )


def _told(kind: str, text: str) -> str:
    return _FINAL[kind][1] if kind in _FINAL else one_line(text) or "nothing"


def one_line(text: str) -> str:
    return " ".join(text.split())[:DETAIL_CHARACTERS_MAX]


def _binds(source: str) -> bool:
    """Whether an example also leaves something behind for later ones (it is more than one expression)."""
    try:
        return not isinstance(ast.parse(source).body[0], ast.Expr)
    except (SyntaxError, IndexError):
        return False

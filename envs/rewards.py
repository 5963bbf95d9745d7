"""What an episode is worth: components in stated ranges, each with its grader's name and version.

    tests   1 if the first try passes every example, `value_later_try` if a later one does, else 0
    format  share of the turns that were a tool call with a fill that may run

A failure of the sandbox never comes here: it is raised before there is a try.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.envs.checks import Outcome
from headrace.envs.config import EnvConfig

TESTS_GRADER = "doctest/1"
FORMAT_GRADER = "fill-format/1"


@dataclass(frozen=True, slots=True)
class Try:
    """One turn: `fill` is None for a turn that was no call, `outcome` None for a fill that was not run."""

    fill: str | None
    outcome: Outcome | None
    detail: str


@dataclass(frozen=True, slots=True)
class Score:
    component: str
    value: float
    range_min: float
    range_max: float
    evidence: str
    grader: str


def scores(tries: Sequence[Try], config: EnvConfig) -> list[Score]:
    """Both components, always; an episode without a turn is worth 0 of each."""
    passed = [bool(attempt.outcome and attempt.outcome.status == "passed") for attempt in tries]
    tests = 0.0
    if any(passed):
        tests = 1.0 if passed[0] else config.value_later_try
    ran = sum(attempt.outcome is not None for attempt in tries)
    told = "; ".join(_told(number, attempt) for number, attempt in enumerate(tries, 1))
    return [
        Score("tests", tests, 0.0, 1.0, told, TESTS_GRADER),
        Score(
            "format", ran / len(tries) if tries else 0.0, 0.0, 1.0, f"{ran} of {len(tries)}", FORMAT_GRADER
        ),
    ]


def _told(number: int, attempt: Try) -> str:
    status = attempt.outcome.status if attempt.outcome else "not run"
    return f"try {number}: {status}" + (f": {attempt.detail}" if attempt.detail else "")

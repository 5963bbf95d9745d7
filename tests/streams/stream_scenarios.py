"""What the experience join must do, written once and run by every host. Not tests.

A scenario sends its records in order; its group must close as `Expected` says, exactly once. Records of
`after` are sent when it has closed, and must change nothing. Deadlines are relative, because a real log
stamps its own time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from feedback_records import suggestion
from stream_records import COMPONENTS, failed, prompt, reward, rollout, step

from headrace.wire.records import Experience, Record, Reward

FAR_MS = 3_600_000
NEAR_MS = 10_000
"""What comes in time is in the log by then, also when the machine or the broker stands still for a while."""


@dataclass(frozen=True)
class Expected:
    closed: str
    rewards: dict[int, float | None]
    """By member, of the rollouts that went out."""
    missing: tuple[int, ...] = ()
    attempts: tuple[int, ...] = ()
    """Of the rollouts; empty: all 1."""
    quarantined: tuple[int, ...] = ()
    reason: str = ""

    @classmethod
    def of(cls, experience: Experience) -> "Expected":
        attempts = tuple(rollout.attempt for rollout in experience.rollouts)
        return cls(
            experience.closed,
            {rollout.member: rollout.reward for rollout in experience.rollouts},
            experience.missing,
            () if set(attempts) <= {1} else attempts,
            tuple(rollout.member for rollout in experience.rollouts if rollout.quarantined),
            experience.reason,
        )


@dataclass(frozen=True)
class Scenario:
    name: str
    deadline_in_ms: int
    records: Callable[[str, int], Sequence[Record]]
    """Of (group, deadline)."""
    expected: Expected
    after: Callable[[str, int], Sequence[Record]] = lambda group, deadline_ms: []
    late: int = 0
    """Records that come after the group has closed."""


def _whole(group: str, deadline_ms: int) -> list[Record]:
    return [prompt(group, deadline_ms=deadline_ms), *rollout(group, 0), *rollout(group, 1, tests=0.0)]


SCENARIOS = [
    Scenario("whole group", FAR_MS, _whole, Expected("complete", {0: 1.5, 1: 0.5})),
    Scenario(
        "everything twice",
        FAR_MS,
        lambda g, d: [record for record in _whole(g, d) for _ in range(2)],
        Expected("complete", {0: 1.5, 1: 0.5}),
        late=1,
    ),
    Scenario(
        "rewards before steps before the prompt",
        FAR_MS,
        lambda g, d: list(reversed(_whole(g, d))),
        Expected("complete", {0: 1.5, 1: 0.5}),
    ),
    Scenario(
        "late step, second attempt and prompt again after closing",
        FAR_MS,
        _whole,
        Expected("complete", {0: 1.5, 1: 0.5}),
        after=lambda g, d: [prompt(g, deadline_ms=d), *rollout(g, 0, attempt=2), step(g, 0, 1, last=True)],
        late=6,
    ),
    Scenario(
        "one member never ends",
        NEAR_MS,
        lambda g, d: [prompt(g, deadline_ms=d), *rollout(g, 0), step(g, 1, 0)],
        Expected("timeout", {0: 1.5, 1: None}, missing=(1,)),
        after=lambda g, d: rollout(g, 1),
        late=4,
    ),
    Scenario(
        "one member never starts",
        NEAR_MS,
        lambda g, d: [prompt(g, deadline_ms=d), *rollout(g, 1)],
        Expected("timeout", {1: 1.5}, missing=(0,)),
    ),
    Scenario(
        "no rollout at all",
        NEAR_MS,
        lambda g, d: [prompt(g, deadline_ms=d)],
        Expected("timeout", {}, missing=(0, 1)),
    ),
    Scenario(
        "a required reward never comes and is not invented",
        NEAR_MS,
        lambda g, d: [record for record in _whole(g, d) if record != reward(g, 1, "format", 1.0)],
        Expected("timeout", {0: 1.5, 1: None}, missing=(1,)),
    ),
    Scenario(
        "second attempt supersedes a broken first one",
        FAR_MS,
        lambda g, d: [
            prompt(g, deadline_ms=d),
            step(g, 0, 0),
            *rollout(g, 0, attempt=2),
            reward(g, 0, "tests", 0.25),
            *rollout(g, 1, attempt=2, tests=0.0),
        ],
        Expected("complete", {0: 1.5, 1: 0.5}, attempts=(2, 2)),
    ),
    Scenario(
        "a broken second attempt supersedes nothing",
        FAR_MS,
        lambda g, d: [
            prompt(g, deadline_ms=d),
            *rollout(g, 0),
            step(g, 0, 1, last=True, attempt=2),
            reward(g, 0, "tests", 0.25, attempt=2),
            *rollout(g, 1, tests=0.0),
        ],
        Expected("complete", {0: 1.5, 1: 0.5}),
    ),
    Scenario(
        "steps of two attempts never make one rollout",
        NEAR_MS,
        lambda g, d: [
            prompt(g, size=1, deadline_ms=d),
            step(g, 0, 0),
            step(g, 0, 1, last=True, attempt=2),
            *[reward(g, 0, name, 1.0, attempt=attempt) for name in COMPONENTS for attempt in (1, 2)],
        ],
        Expected("timeout", {0: 1.5}, missing=(0,), attempts=(2,)),
    ),
    Scenario(
        "the worker gives up",
        FAR_MS,
        lambda g, d: [prompt(g, deadline_ms=d), *rollout(g, 0), step(g, 1, 0), failed(g)],
        Expected("failed", {0: 1.5, 1: None}, missing=(1,), reason="sandbox gone"),
        after=lambda g, d: rollout(g, 1),
        late=4,
    ),
    Scenario(
        "an old attempt given up while the next one runs",
        FAR_MS,
        lambda g, d: [
            prompt(g, deadline_ms=d),
            *rollout(g, 0, attempt=2),
            failed(g, attempt=1),
            *rollout(g, 1, attempt=2),
        ],
        Expected("complete", {0: 1.5, 1: 1.5}, attempts=(2, 2)),
    ),
    Scenario(
        "quarantined by a required component",
        FAR_MS,
        lambda g, d: [
            prompt(g, deadline_ms=d),
            *rollout(g, 0)[:2],
            reward(g, 0, "format", 0.0, quarantine=True),
            *rollout(g, 1),
        ],
        Expected("complete", {0: None, 1: 1.5}, quarantined=(0,)),
    ),
    Scenario(
        "quarantined by a guard",
        FAR_MS,
        lambda g, d: [
            prompt(g, deadline_ms=d),
            reward(g, 0, "guard.tests_untouched", 0.0, quarantine=True),
            *rollout(g, 0),
            *rollout(g, 1),
        ],
        Expected("complete", {0: 1.5, 1: 1.5}, quarantined=(0,)),
    ),
    Scenario(
        "a component that is not asked for changes no total",
        FAR_MS,
        lambda g, d: [
            prompt(g, deadline_ms=d),
            reward(g, 0, "judge.style", 1.0),
            *rollout(g, 0),
            *rollout(g, 1),
        ],
        Expected("complete", {0: 1.5, 1: 1.5}),
    ),
    Scenario(
        "a live suggestion and its judgement",
        FAR_MS,
        lambda g, d: [suggestion(g), judged(g, -0.25)],
        Expected("complete", {0: -0.25}, attempts=(0,)),
        after=lambda g, d: [judged(g, 0.75), suggestion(g)],
        late=2,
    ),
    Scenario(
        "a judgement that is read before its suggestion",
        FAR_MS,
        lambda g, d: [judged(g, 0.75), judged(g, 0.75), suggestion(g)],
        Expected("complete", {0: 0.75}, attempts=(0,)),
    ),
    Scenario(
        "a live suggestion that was never shown",
        FAR_MS,
        lambda g, d: [suggestion(g), failed(g, attempt=0, reason="never_shown")],
        Expected("failed", {0: None}, missing=(0,), attempts=(0,), reason="never_shown"),
        after=lambda g, d: [judged(g, 0.75)],
        late=1,
    ),
    Scenario(
        "a live suggestion in quarantine",
        FAR_MS,
        lambda g, d: [suggestion(g), judged(g, None)],
        Expected("complete", {0: None}, attempts=(0,), quarantined=(0,), reason="too many"),
    ),
]


def judged(group: str, value: float | None) -> Reward:
    """The judgement of a live suggestion; None: its user gave too many."""
    return Reward(
        run="test",
        group_id=group,
        member=0,
        attempt=0,
        component="user",
        verdict="quarantine" if value is None else "score",
        value=value or 0.0,
        range_min=-1.0,
        range_max=1.0,
        evidence="too many" if value is None else "",
    )

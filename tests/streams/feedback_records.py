"""Live suggestions and what editors say of them, and both feedback processors without a host. Not tests."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.streams.feedback import FeedbackConfig, FeedbackJoin
from headrace.streams.fold import Fold
from headrace.streams.processor import Event, Output
from headrace.streams.users import UsersConfig, UsersLimit
from headrace.wire.packed import pack_f32, pack_u32
from headrace.wire.records import (
    DeadLetter,
    Exposure,
    Feedback,
    GroupFailed,
    Record,
    Reward,
    RolloutStep,
    Span,
)
from headrace.wire.topics import (
    DEAD_LETTERS,
    EXPOSURES,
    FEEDBACK,
    JUDGEMENTS,
    REWARDS,
    ROLLOUT_STEPS,
)

TEXT_LENGTH = 8


def suggestion(name: str, *, silent: bool = False, user: str | None = None, **more: Any) -> RolloutStep:
    tokens = 1 if silent else 2
    fields: dict[str, Any] = {
        "run": "test",
        "group_id": name,
        "member": 0,
        "attempt": 0,
        "step": 0,
        "last": True,
        "source": "live",
        "base_length": 0,
        "prefix_length": 0,
        "tokens_in": pack_u32([7, 7]),
        "tokens_out": pack_u32([8] * tokens),
        "logp": pack_f32([-0.5] * tokens),
        "loss_mask": b"\1" * tokens,
        "spans": (Span(start=0, end=tokens, weights_version=3),),
        "weights_version": 3,
        "finish": "silent" if silent else "stop",
        "temperature": 1.0,
        "started_ms": 1_000,
        "ended_ms": 1_040,
        "region": "far",
        "user": f"user of {name}" if user is None else user,
        "cohort": "canary",
        "text_length": 0 if silent else TEXT_LENGTH,
    }
    return RolloutStep(**fields | more)


_serial = iter(range(1 << 60))


def said(name: str, kind: Any, *, event: str | None = None, user: str | None = None, **more: Any) -> Feedback:
    """An event with an id of its own, unless `event` gives one; ten seconds after the one before by the
    editor's clock."""
    number = next(_serial)
    fields = {
        "event_id": f"e{number}" if event is None else event,
        "suggestion_id": name,
        "kind": kind,
        "editor_ms": 10_000 * number,
        "user": f"user of {name.removesuffix(REST)}" if user is None else user,
    }
    return Feedback(**fields | more)


REST = " rest"
"""Of the id under which the rest of a suggestion is shown."""


@dataclass(frozen=True)
class Became:
    """What became of one suggestion: all that went out for it, each kind at most once."""

    reward: float | None = None
    """None: no score."""
    quarantine: str = ""
    failed: str = ""
    exposed: tuple[bool, float, float] | None = None
    """(shown, accepted share, reward); None: no exposure."""
    letters: int = 0

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Became":
        by_type = defaultdict[type[Record], list[Any]](list)
        for record in records:
            by_type[type(record)].append(record)
        assert all(len(same) == 1 for kind, same in by_type.items() if kind is not DeadLetter), by_type
        reward: Reward | None = next(iter(by_type[Reward]), None)
        failed: GroupFailed | None = next(iter(by_type[GroupFailed]), None)
        exposure: Exposure | None = next(iter(by_type[Exposure]), None)
        assert not (reward and failed)
        scored = reward is not None and reward.verdict == "score"
        return cls(
            reward=reward.value if reward is not None and scored else None,
            quarantine=reward.evidence if reward is not None and not scored else "",
            failed=failed.reason if failed is not None else "",
            exposed=None if exposure is None else (exposure.shown, exposure.accepted, exposure.reward),
            letters=len(by_type[DeadLetter]),
        )


@dataclass
class Pipeline:
    """Both processors as folds. What goes back into `feedback` is read again; time is the test's."""

    config: FeedbackConfig = field(default_factory=FeedbackConfig)
    users_config: UsersConfig = field(default_factory=UsersConfig)
    sent: list[Output] = field(default_factory=list)
    now_ms: int = 0

    def __post_init__(self) -> None:
        self.join = Fold(FeedbackJoin(self.config))
        self.users = Fold(UsersLimit(self.users_config))
        self._offsets: Counter[str] = Counter()
        self._log: dict[bytes, bytes | None] = {}

    def send(self, *records: Record, at_ms: int | None = None) -> None:
        """Applies `records` at `at_ms`, or a millisecond after what was before each."""
        for record in records:
            self.now_ms = self.now_ms + 1 if at_ms is None else at_ms
            topic = FEEDBACK.name if isinstance(record, Feedback) else ROLLOUT_STEPS.name
            self.join.apply(self._event(topic, record))
            self._drain()

    def advance(self, now_ms: int) -> None:
        self.now_ms = max(now_ms, self.now_ms)
        while self.join.advance(now_ms) or self.users.advance(now_ms):
            self._drain()
        self._drain()

    def restart(self) -> None:
        """A new host that reads the states from the changelog."""
        self.join = Fold(FeedbackJoin(self.config))
        self.join.restore(self._log.items(), self.now_ms)

    def records(self, topic: str) -> list[Any]:
        return [output.record for output in self.sent if output.topic == topic]

    def became(self, name: str) -> Became:
        return Became.of(about(name, [output.record for output in self.sent]))

    def _event(self, topic: str, record: Record) -> Event:
        self._offsets[topic] += 1
        return Event(topic, 0, self._offsets[topic], self.now_ms, record)

    def _drain(self) -> None:
        changes = self.join.drain()
        self._log.update(changes.entries)
        outputs = list(changes.outputs)
        for output in outputs:
            if output.topic == JUDGEMENTS.name:
                self.users.apply(self._event(output.topic, output.record))
                outputs += self.users.drain().outputs
            self.sent.append(output)
        for output in outputs:
            if output.topic == FEEDBACK.name:
                self.send(output.record)


def about(name: str, records: Sequence[Record]) -> list[Record]:
    """What says what became of `name`."""
    found: list[Record] = []
    for record in records:
        match record:
            case Reward() | GroupFailed() | Exposure() if record.group_id == name:
                found.append(record)
            case DeadLetter() if record.key == name.encode():
                found.append(record)
    return found


NAN = math.nan
OUTPUTS = (EXPOSURES.name, REWARDS.name, ROLLOUT_STEPS.name, DEAD_LETTERS.name)
"""Exposures first: who reads one has the reward of its transaction before it, too."""

"""One group of rollouts, read off the records it got so far: who is whole, who is rewarded, what is missing.

Not here: when a group closes (`streams.experience`). Built again from the log whenever a state is restored;
never stored.

An attempt is never mixed with another inside one rollout. A member's rollout is its highest attempt that is
whole and rewarded; else the highest whole one; else the highest there is.

A live suggestion is a group of one that no Prompt announces: its step says all that a Prompt would.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.wire.codec import encode_plain
from headrace.wire.records import GroupFailed, Prompt, Record, Reward, Rollout, RolloutStep, Source

LIVE_COMPONENTS = {"user": 1.0}
"""What the reward of a live suggestion is made of: the one judgement of `streams.feedback`."""
LIVE_MS = 6 * 3_600_000
"""A live suggestion waits so long for its judgement: far longer than any window of the feedback join, which
may have been away."""


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """A record that counts, one of four, and when the log took it."""

    at_ms: int
    step: RolloutStep | None = None
    reward: Reward | None = None
    prompt: Prompt | None = None
    failed: GroupFailed | None = None

    @classmethod
    def of(cls, at_ms: int, record: Record) -> "Kept":
        match record:
            case RolloutStep():
                return cls(at_ms, step=record)
            case Reward():
                return cls(at_ms, reward=record)
            case Prompt():
                return cls(at_ms, prompt=record)
            case GroupFailed():
                return cls(at_ms, failed=record)
        raise AssertionError(type(record))

    @property
    def identity(self) -> Hashable:
        """Equal for a record and its repetition."""
        if self.step is not None:
            return (self.step.member, self.step.attempt, self.step.step)
        if self.reward is not None:
            reward = self.reward
            return (reward.member, reward.attempt, reward.component, reward.verdict)
        return "prompt" if self.prompt is not None else ("failed", self.failed and self.failed.attempt)

    @property
    def bytes(self) -> int:
        """About what it holds in memory: the arrays and texts, and a rough price for the rest; never less
        than its own size, whichever of its fields is long."""
        record = self.step or self.reward or self.prompt or self.failed
        assert record is not None
        return max(self._price, len(encode_plain(record)))

    @property
    def _price(self) -> int:
        if self.step is not None:
            step = self.step
            arrays = len(step.tokens_in) + len(step.tokens_out) + len(step.logp) + len(step.loss_mask)
            return 1000 + arrays + len(step.routes) + len(step.tool_result or "")
        return 500 + (len(self.reward.evidence) if self.reward is not None else 0)


@dataclass(slots=True)
class Attempt:
    """One try of one member."""

    steps: dict[int, RolloutStep] = field(default_factory=dict)
    length: int | None = None
    """Number of steps, once the last one is there."""
    scores: dict[str, float] = field(default_factory=dict)
    quarantined: bool = False

    @property
    def whole(self) -> bool:
        length = self.length
        return (
            length is not None and len(self.steps) >= length and all(i in self.steps for i in range(length))
        )

    def settled(self, components: Iterable[str]) -> bool:
        """Nothing more is needed: whole, and judged by all required components or thrown out by one."""
        return self.whole and (self.quarantined or all(name in self.scores for name in components))


class Group:
    """Grows by `add`; equal logs in any order make groups with equal rollouts."""

    def __init__(self) -> None:
        self.prompt: Prompt | None = None
        self.bytes = 0
        self.first_ms = 0
        self.last_ms = 0
        self.live: RolloutStep | None = None
        """The step of a live suggestion; None in a group that a Prompt announces."""
        self._live_ms = 0
        self._any: Record | None = None
        self._newest = 0
        self._failed: GroupFailed | None = None
        self._failed_ms = 0
        self._seen: set[Hashable] = set()
        self._members: dict[int, dict[int, Attempt]] = {}
        self._settled: set[int] = set()
        self._quarantines: dict[str, str] = {}

    @classmethod
    def of(cls, log: list[Kept]) -> "Group":
        """The group behind `log`; records after its end do not count, in whatever order they stand there."""
        group = cls()
        group.prompt = next((kept.prompt for kept in log if kept.prompt is not None), None)
        for kept in log:
            group._note_live(kept)
        for kept in sorted(log, key=lambda kept: kept.at_ms):
            if kept.prompt is not None or group.ends_ms is None or kept.at_ms <= group.ends_ms:
                group.add(kept)
        return group

    def add(self, kept: Kept) -> bool:
        """False, and nothing changed, for a record that is already there."""
        identity = kept.identity
        if identity in self._seen:
            return False
        self._seen.add(identity)
        self.bytes += kept.bytes
        self.first_ms = kept.at_ms if self._any is None else min(self.first_ms, kept.at_ms)
        if kept.failed is None:  # a failure completes nothing
            self.last_ms = max(self.last_ms, kept.at_ms)
        if kept.step is not None:
            self._any = kept.step
            self._note_live(kept)
            self._add_step(kept.step)
        elif kept.reward is not None:
            self._any = kept.reward
            self._add_reward(kept.reward)
        elif kept.prompt is not None:
            self._any = self.prompt = kept.prompt
        elif kept.failed is not None:
            self._any = kept.failed
            if self._failed is None or kept.failed.attempt > self._failed.attempt:
                self._failed, self._failed_ms = kept.failed, kept.at_ms
        return True

    @property
    def ends_ms(self) -> int | None:
        """The last broker time that counts: of a failure or the deadline. None: neither Prompt nor live step
        yet."""
        if self.prompt is not None:
            deadline_ms = self.prompt.deadline_ms
        elif self.live is not None:
            deadline_ms = self._live_ms + LIVE_MS
        else:
            return None
        return deadline_ms if self.failure is None else min(self._failed_ms, deadline_ms)

    @property
    def failure(self) -> GroupFailed | None:
        """That of the newest attempt: an older one that failed says nothing about the one under way."""
        return self._failed if self._failed is not None and self._failed.attempt >= self._newest else None

    @property
    def members(self) -> Sequence[int]:
        """Those that the Prompt asked for; without one, those that were seen."""
        return sorted(self._members) if self._size is None else range(self._size)

    @property
    def complete(self) -> bool:
        return (
            self._size is not None
            and len(self._settled) >= self._size
            and all(member in self._settled for member in self.members)
        )

    @property
    def _size(self) -> int | None:
        if self.prompt is not None:
            return self.prompt.group_size
        return None if self.live is None else 1

    @property
    def _components(self) -> dict[str, float]:
        """The required ones; empty while they are unknown."""
        if self.prompt is not None:
            return self.prompt.components
        return {} if self.live is None else LIVE_COMPONENTS

    def missing(self) -> tuple[int, ...]:
        return tuple(member for member in self.members if member not in self._settled)

    def rollouts(self) -> tuple[Rollout, ...]:
        """One for each member that sent a step, in order."""
        return tuple(
            _rollout(member, *best, self._components)
            for member in self.members
            if (best := self._best(self._members.get(member, {}))) is not None
        )

    @property
    def run(self) -> str:
        return getattr(self.prompt or self._any, "run", "")

    @property
    def source(self) -> Source:
        return next((step.source for step in self._steps()), "sim")

    @property
    def region(self) -> str:
        if self.prompt is not None:
            return self.prompt.region
        return min((step.region for step in self._steps()), default="local")

    @property
    def env(self) -> str:
        if self.prompt is not None:
            return self.prompt.env
        return "" if self.live is None else "live"

    @property
    def user(self) -> str:
        return "" if self.live is None else self.live.user

    @property
    def thrown_out(self) -> str:
        """Why the judgement of a live suggestion is a quarantine; empty otherwise."""
        return "" if self.live is None else min(self._quarantines.values(), default="")

    @property
    def admitted_version(self) -> int:
        """The Prompt's; without one, the oldest that a step was generated under."""
        if self.prompt is not None:
            return self.prompt.weights_version
        return min((step.weights_version for step in self._steps()), default=0)

    def _steps(self) -> Iterator[RolloutStep]:
        return (
            step
            for attempts in self._members.values()
            for attempt in attempts.values()
            for step in attempt.steps.values()
        )

    def _note_live(self, kept: Kept) -> None:
        if kept.step is not None and kept.step.source == "live" and self.prompt is None and self.live is None:
            self.live, self._live_ms = kept.step, kept.at_ms

    def _add_step(self, step: RolloutStep) -> None:
        attempt = self._attempt(step.member, step.attempt)
        attempt.steps[step.step] = step
        if step.last:
            attempt.length = step.step + 1
        self._settle(step.member, attempt)

    def _add_reward(self, reward: Reward) -> None:
        attempt = self._attempt(reward.member, reward.attempt)
        if reward.verdict == "quarantine":
            attempt.quarantined = True
            self._quarantines[reward.component] = reward.evidence or reward.component
        else:
            attempt.scores[reward.component] = reward.value
        self._settle(reward.member, attempt)

    def _attempt(self, member: int, number: int) -> Attempt:
        self._newest = max(self._newest, number)
        return self._members.setdefault(member, {}).setdefault(number, Attempt())

    def _settle(self, member: int, attempt: Attempt) -> None:
        if self._size is not None and attempt.settled(self._components):
            self._settled.add(member)

    def _best(self, attempts: dict[int, Attempt]) -> tuple[int, Attempt] | None:
        components = self._components
        tried = [(number, attempt) for number, attempt in attempts.items() if attempt.steps]
        return max(
            tried, key=lambda try_: (try_[1].settled(components), try_[1].whole, try_[0]), default=None
        )


def _rollout(member: int, number: int, attempt: Attempt, weights: dict[str, float]) -> Rollout:
    judged = bool(weights) and all(name in attempt.scores for name in weights)
    return Rollout(
        member=member,
        attempt=number,
        steps=tuple(attempt.steps[index] for index in sorted(attempt.steps)),
        components=dict(sorted(attempt.scores.items())),
        reward=sum(weight * attempt.scores[name] for name, weight in weights.items()) if judged else None,
        quarantined=attempt.quarantined,
        whole=attempt.whole,
    )

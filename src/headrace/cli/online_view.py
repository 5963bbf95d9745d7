"""The live half of a run, folded from its topics: what users were shown and took, how long they waited, how
soon an accept came back to them as new weights, and what the canary decided.

Reads the bus alone, so it is the same on both. Not here: how it looks (`cli.online_report`), the rounds on
held-out files (`cli.measure`).
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from headrace.bus.protocol import Bus, Delivery
from headrace.errors import WireError
from headrace.wire import records as r
from headrace.wire.codec import decode
from headrace.wire.topics import EXPOSURES, FEEDBACK, ROLLOUT_STEPS, TRAIN_STEPS, WEIGHTS, WEIGHTS_ACKS

ACCEPTS = ("accepted", "partially_accepted")
READ = (ROLLOUT_STEPS, FEEDBACK, EXPOSURES, TRAIN_STEPS, WEIGHTS, WEIGHTS_ACKS)


@dataclass(slots=True)
class Shown:
    """Suggestions of one version, or of a stretch of time."""

    asked: int = 0
    shown: int = 0
    silent: int = 0
    accepted: float = 0.0
    reward: float = 0.0

    @property
    def shown_share(self) -> float:
        return self.shown / self.asked if self.asked else 0.0

    @property
    def accept_rate(self) -> float:
        return self.accepted / self.shown if self.shown else 0.0

    @property
    def reward_each(self) -> float:
        return self.reward / self.asked if self.asked else 0.0

    def add(self, exposure: r.Exposure) -> None:
        self.asked += 1
        self.shown += exposure.shown
        self.silent += exposure.silent
        self.accepted += exposure.accepted
        self.reward += exposure.reward


@dataclass(frozen=True, slots=True)
class Live:
    """One answer to an editor."""

    group_id: str
    version: int
    at_ms: int
    latency_ms: int


@dataclass(slots=True)
class OnlineView:
    run: str
    answers: list[Live] = field(default_factory=list)
    exposures: dict[str, r.Exposure] = field(default_factory=dict)
    accepted_ms: dict[str, int] = field(default_factory=dict)
    """Broker time of each suggestion's first accept."""
    trained: dict[str, int] = field(default_factory=dict)
    """Live units: the step that trained each."""
    steps: int = 0
    consumed: Counter[str] = field(default_factory=Counter)
    """Units by source."""
    admitted: Counter[str] = field(default_factory=Counter)
    served_ms: dict[int, int] = field(default_factory=dict)
    """Broker time at which a replica first said it serves a version."""
    decisions: list[tuple[int, r.WeightsPromoted | r.WeightsRevoked]] = field(default_factory=list)
    """With broker times, in order."""

    def apply(self, delivery: Delivery) -> None:
        try:
            record = decode(delivery.topic, delivery.value or b"", delivery.headers)
        except WireError:
            return
        at_ms = delivery.timestamp_ms
        match record:
            case r.RolloutStep() if record.source == "live" and record.run == self.run:
                latency_ms = record.ended_ms - record.started_ms
                self.answers.append(Live(record.group_id, record.weights_version, at_ms, latency_ms))
            case r.Feedback() if record.run == self.run and record.kind in ACCEPTS:
                unit = record.continues or record.suggestion_id  # the rest of one is judged with it
                self.accepted_ms[unit] = min(at_ms, self.accepted_ms.get(unit, at_ms))
            case r.Exposure() if record.run == self.run:
                self.exposures[record.group_id] = record
            case r.TrainStep() if record.run == self.run:
                self._step(record)
            case r.WeightsAck() if record.run == self.run and record.outcome == "serving":
                self.served_ms.setdefault(record.version, at_ms)
            case r.WeightsPromoted() | r.WeightsRevoked() if record.run == self.run:
                self.decisions.append((at_ms, record))

    def _step(self, record: r.TrainStep) -> None:
        self.steps += 1
        sources = {unit.group_id: unit.source for unit in record.consumed}
        self.consumed.update(sources.values())
        for group_id in record.admitted:
            source = sources.get(group_id, "sim")
            self.admitted[source] += 1
            if source == "live":
                self.trained[group_id] = record.version_to

    def by_version(self) -> dict[int, Shown]:
        found: dict[int, Shown] = defaultdict(Shown)
        for exposure in self.exposures.values():
            if not exposure.quarantined:
                found[exposure.version].add(exposure)
        return dict(sorted(found.items()))

    def clock_ms(self) -> list[tuple[int, int | None]]:
        """Of each accept that was trained: ms to the first replica that served weights trained on it, and to
        the first suggestion made by such weights, if one was. "Such" is that version or a later one."""
        acks = _Soonest(self.served_ms.items())
        made = _Soonest((live.version, live.at_ms) for live in self.answers)
        found = []
        for group_id, version in self.trained.items():
            accepted_ms = self.accepted_ms.get(group_id)
            served_ms = acks.at(version)
            if accepted_ms is not None and served_ms is not None:
                suggested_ms = made.at(version)
                after = None if suggested_ms is None else suggested_ms - accepted_ms
                found.append((served_ms - accepted_ms, after))
        return found

    def latencies_ms(self, first_ms: int, last_ms: int) -> list[int]:
        """Of suggestions answered in a stretch of time, growing."""
        return sorted(live.latency_ms for live in self.answers if first_ms <= live.at_ms <= last_ms)


class _Soonest:
    """For each version, the first time at which it or a later one is seen."""

    def __init__(self, seen: Iterable[tuple[int, int]]) -> None:
        first: dict[int, int] = {}
        for version, at_ms in seen:
            first[version] = min(at_ms, first.get(version, at_ms))
        self._versions = sorted(first)
        self._at_ms: list[int] = []
        soonest: int | None = None
        for version in reversed(self._versions):
            soonest = first[version] if soonest is None else min(soonest, first[version])
            self._at_ms.insert(0, soonest)

    def at(self, version: int) -> int | None:
        index = bisect_left(self._versions, version)
        return self._at_ms[index] if index < len(self._versions) else None


def quantile(growing: list[int], share: float) -> int | None:
    """The nearest rank: the least value that `share` of them do not exceed. None of nothing."""
    return growing[max(0, math.ceil(share * len(growing)) - 1)] if growing else None


async def view(bus: Bus, run: str) -> OnlineView:
    """All that the log says now. Raises BusUnavailable."""
    found = OnlineView(run)
    async for delivery in _deliveries(bus):
        found.apply(delivery)
    return found


async def _deliveries(bus: Bus) -> AsyncIterator[Delivery]:
    known = await bus.topics()
    there = [topic.name for topic in READ if topic.name in known]
    begins, ends = await bus.begins(there), await bus.ends(there)
    for tp, end in sorted(ends.items()):
        async for delivery in bus.read_range(tp, begins[tp], end):
            yield delivery

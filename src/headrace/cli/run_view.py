"""A run's current numbers, folded from its topics: what the screen, `headrace status` and the report show.

Reads the small topics only (prompts, ledger, announcements, acks, held-out tries, dead letters), through the
bus protocol alone: the same on both buses. Not here: how the numbers look (`screen`, `status`, `report`).
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace.bus.protocol import Bus, Delivery, TopicPartition
from headrace.errors import WireError
from headrace.wire import records as r
from headrace.wire.codec import decode
from headrace.wire.release import Release
from headrace.wire.topics import DEAD_LETTERS, EVALUATIONS, PROMPTS, TRAIN_STEPS, WEIGHTS, WEIGHTS_ACKS

FOLLOWED = (
    PROMPTS.name,
    TRAIN_STEPS.name,
    WEIGHTS.name,
    WEIGHTS_ACKS.name,
    EVALUATIONS.name,
    DEAD_LETTERS.name,
)
STEPS_RECENT = 10
"""Rates are taken over this many steps."""
REWARD, LAG, LAG_MAX, IDLE, TOKENS = "reward.mean", "lag.mean", "lag.max", "idle_share", "tokens.consumed"
DUPLICATE = "duplicate"
"""A unit that came again: dropped, and already counted."""
WAIT_S = "seconds.wait"
MISMATCH, MISMATCH_MAX = "mismatch.abs_mean", "mismatch.abs_max"


@dataclass(frozen=True, slots=True)
class StepPoint:
    """What is kept of one ledger record."""

    step: int
    started_ms: int
    ended_ms: int
    units: int
    """Consumed groups."""
    trained: int
    metrics: dict[str, float]

    @property
    def duration_ms(self) -> float:
        """From the first wait for the step's groups to its end."""
        return self.ended_ms - self.started_ms + 1000 * self.metrics.get(WAIT_S, 0.0)


@dataclass(slots=True)
class Tally:
    """Held-out tries of one round, mode and version."""

    passed: int = 0
    tried: int = 0

    @property
    def rate(self) -> float:
        return self.passed / self.tried if self.tried else 0.0


@dataclass(slots=True)
class RunView:
    """Fold with `apply`; every field is a plain number that the log accounts for."""

    run: str
    prompts: int = 0
    consumed: int = 0
    trained: int = 0
    live_consumed: int = 0
    """Suggestions among `consumed`."""
    live_trained: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    """Whole units that were not trained, by reason."""
    withheld: Counter[str] = field(default_factory=Counter)
    """Members of trained units whose tokens were not trained, by reason."""
    steps: list[StepPoint] = field(default_factory=list)
    version: int | None = None
    """Newest announced version."""
    release: Release = field(default_factory=Release)
    replicas: dict[str, r.WeightsAck] = field(default_factory=dict)
    served: int = 0
    """Newest version that a replica has said it serves beside any release."""
    rounds: dict[tuple[str, str, int], Tally] = field(default_factory=lambda: defaultdict(Tally))
    """By (round, mode, version)."""
    tried: set[tuple[str, str, int, str, int]] = field(default_factory=set)
    """Held-out tries seen: one that was recorded twice counts once."""
    dead: int = 0
    undecodable: int = 0

    def apply(self, delivery: Delivery) -> None:
        """Folds one delivery in. A record of another run has no effect; one that can't be decoded is counted
        (its reader dead-letters it)."""
        try:
            record = decode(delivery.topic, delivery.value or b"", delivery.headers)
        except WireError:
            self.undecodable += 1
            return
        if isinstance(record, r.DeadLetter):
            self.dead += 1
        elif getattr(record, "run", self.run) == self.run:
            self._apply(record)

    def _apply(self, record: r.Record) -> None:
        match record:
            case r.Prompt():
                self.prompts += 1
            case r.TrainStep():
                self._step(record)
            case r.WeightsPublished() | r.WeightsPromoted() | r.WeightsRevoked():
                self.release.learn(record)
                if isinstance(record, r.WeightsPublished):
                    self.version = record.version
            case r.WeightsAck() if record.outcome == "serving":
                self.replicas[f"{record.region}/{record.replica}"] = record
                if not record.role:
                    self.served = max(self.served, record.version)
            case r.Evaluation():
                key = (record.round, record.mode, record.version, record.task_id, record.sample)
                if key not in self.tried:
                    self.tried.add(key)
                    tally = self.rounds[key[:3]]
                    tally.tried += 1
                    tally.passed += record.passed

    def _step(self, record: r.TrainStep) -> None:
        self.consumed += len(record.consumed) - sum(drop.reason == DUPLICATE for drop in record.drops)
        self.trained += len(record.admitted)
        live = {unit.group_id for unit in record.consumed if unit.source == "live"}
        repeated = sum(drop.reason == DUPLICATE and drop.group_id in live for drop in record.drops)
        self.live_consumed += sum(unit.source == "live" for unit in record.consumed) - repeated
        self.live_trained += len(live.intersection(record.admitted))
        for drop in record.drops:
            (self.drops if drop.member is None else self.withheld)[drop.reason] += 1
        self.steps.append(
            StepPoint(
                record.step,
                record.started_ms,
                record.ended_ms,
                len(record.consumed),
                len(record.admitted),
                {**record.metrics, TOKENS: _tokens(record.metrics)},
            )
        )

    @property
    def step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    @property
    def in_flight(self) -> int:
        """Groups that were issued and have not reached the ledger."""
        return max(0, self.prompts - (self.consumed - self.live_consumed))

    def latest(self, metric: str) -> float | None:
        return self.steps[-1].metrics.get(metric) if self.steps else None

    def recent(self, metric: str, steps: int = STEPS_RECENT) -> float | None:
        """Mean of a metric over the newest steps that have it."""
        values = [point.metrics[metric] for point in self.steps[-steps:] if metric in point.metrics]
        return sum(values) / len(values) if values else None

    def most(self, metric: str, steps: int = STEPS_RECENT) -> float | None:
        """Largest value of a metric over the newest steps."""
        return max((p.metrics[metric] for p in self.steps[-steps:] if metric in p.metrics), default=None)

    def per_second(self, metric: str, steps: int = STEPS_RECENT) -> float | None:
        """Sum of a metric over the newest steps, by the time that they took, waiting for groups included. A
        pause between two demos is nobody's time."""
        points = self.steps[-steps:]
        spent_ms = sum(point.duration_ms for point in points)
        return sum(point.metrics.get(metric, 0.0) for point in points) * 1000 / spent_ms if spent_ms else None

    def held_out(self, mode: str = "sampled", rounds: Iterable[str] = ()) -> list[tuple[int, float, int]]:
        """(version, pass rate, tries) of the given rounds (all by default), by version."""
        wanted = set(rounds)
        points: dict[int, Tally] = defaultdict(Tally)
        for (name, tally_mode, version), tally in self.rounds.items():
            if tally_mode == mode and (not wanted or name in wanted):
                points[version].passed += tally.passed
                points[version].tried += tally.tried
        return [(version, tally.rate, tally.tried) for version, tally in sorted(points.items())]


def _tokens(metrics: Mapping[str, float]) -> float:
    """Generated tokens that a step consumed, whether it trained them or not."""
    dropped = sum(
        count
        for name, count in metrics.items()
        if name.startswith(("drops.", "withheld.")) and name.endswith(".tokens")
    )
    return metrics.get("tokens.trained", 0.0) + dropped


class Follower:
    """Keeps a `RunView` up to date, however often `refresh` is called."""

    def __init__(self, bus: Bus, run: str) -> None:
        self.view = RunView(run)
        self._bus = bus
        self._positions: dict[TopicPartition, int] = {}
        self._present: list[str] = []
        self._refreshing = asyncio.Lock()

    async def refresh(self) -> RunView:
        """Reads what is new and returns the view. Raises BusUnavailable."""
        async with self._refreshing:
            if len(self._present) < len(FOLLOWED):
                known = await self._bus.topics()
                self._present = [name for name in FOLLOWED if name in known]
            ends = await self._bus.ends(self._present)
            begins = await self._bus.begins(self._present)
            for tp, end in sorted(ends.items()):
                # A topic that retention has cut since the last look goes on at what is left of it.
                start = max(self._positions.get(tp, 0), begins[tp])
                if end > start:
                    async for delivery in self._bus.read_range(tp, start, end):
                        self.view.apply(delivery)
                self._positions[tp] = max(start, end)
            return self.view

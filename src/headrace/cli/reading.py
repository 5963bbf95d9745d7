"""Records off a run's topics, decoded and with their places, for the commands that look back.

Through the bus protocol alone, and without torch: what a step computes is none of its business. Not here:
what the records mean together (`story`, `account`, `parting`).
"""

import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from headrace.bus.protocol import Bus, Delivery, TopicPartition
from headrace.errors import BusError, ConfigError, WireError
from headrace.wire.codec import decode
from headrace.wire.records import Experience, Record, TrainStep
from headrace.wire.topics import TOPICS, TRAIN_STEPS

CLOSED_TOPICS = tuple(topic.name for topic in TOPICS.values() if Experience in topic.records)
"""Where closed units lie."""
SHOW_S = 0.5
"""Between two lines of progress; work that is done before shows none."""
SKEW_MS = 60_000
"""Clocks of brokers differ: a look-up by time begins so much earlier."""


@dataclass(frozen=True, slots=True)
class Told:
    """One record at its place. `record` is the error where its bytes say nothing."""

    delivery: Delivery
    record: Record | WireError

    @property
    def place(self) -> str:
        return self.delivery.place

    @property
    def at_ms(self) -> int:
        """Broker time."""
        return self.delivery.timestamp_ms

    @property
    def event_id(self) -> str:
        return event_id(self.delivery)


def event_id(delivery: Delivery) -> str:
    """The `ce_id` header; empty without one."""
    return (delivery.header("ce_id") or b"").decode(errors="replace")


def told(delivery: Delivery) -> Told:
    """The record in `delivery`, or why there is none."""
    try:
        return Told(delivery, decode(delivery.topic, delivery.value or b"", delivery.headers))
    except WireError as error:
        return Told(delivery, error)


async def partition(
    bus: Bus,
    tp: TopicPartition,
    *,
    key: bytes | None = None,
    since_ms: int | None = None,
    until: int | None = None,
    progress: "Progress | None" = None,
) -> AsyncIterator[Told]:
    """What a partition holds now, in order: only records under `key` if given, only those that the broker
    took since about `since_ms`, only those before the offset `until`."""
    begin, end = (await bus.begins([tp.topic]))[tp], (await bus.ends([tp.topic]))[tp]
    if since_ms is not None:
        found = await bus.offsets_at(tp.topic, max(0, since_ms - SKEW_MS))
        begin = max(begin, min(found.get(tp, begin), end))
    end = end if until is None else min(until, end)
    if begin < end:
        async for delivery in bus.read_range(tp, begin, end):
            if progress is not None:
                progress.advance()
            if key is None or delivery.key == key:
                yield told(delivery)


async def ledger(
    bus: Bus, run: str, *, since_ms: int | None = None
) -> AsyncIterator[tuple[Delivery, TrainStep]]:
    """The steps of `run` in the ledger, in order. Raises WireError, with the place, for a record under the
    run's key that can't be read: its steps can't be told from a guess."""
    if TRAIN_STEPS.name not in await bus.topics():
        return
    tp = TopicPartition(TRAIN_STEPS.name, 0)
    async for item in partition(bus, tp, key=run.encode()):
        if isinstance(item.record, WireError):
            raise WireError(f"{item.place}: expected a step of the ledger: {item.record}")
        if isinstance(item.record, TrainStep) and item.record.run == run:
            yield item.delivery, item.record


async def expect_run(bus: Bus, run: str) -> None:
    """Raises ConfigError when the ledger has no step of `run`, with the runs that it has."""
    from headrace.cli import shown

    runs: set[str] = set()
    if TRAIN_STEPS.name in await bus.topics():
        tp = TopicPartition(TRAIN_STEPS.name, 0)
        async for item in partition(bus, tp):
            name = (item.delivery.key or b"").decode(errors="replace")
            if name == run:
                return
            runs.add(shown.printable(name))
    raise ConfigError(f"{shown.unknown('run', run, runs)} (its steps in the ledger; --run.name NAME)")


async def whole_log(bus: Bus, topics: Iterable[str], progress: "Progress") -> AsyncIterator[Delivery]:
    """Every record of `topics`, undecoded: for what no key leads to. A range that retention takes away
    meanwhile is passed over."""
    names = list(topics)
    begins, ends = await bus.begins(names), await bus.ends(names)
    for tp in sorted(ends):
        try:
            async for delivery in bus.read_range(tp, begins[tp], ends[tp]):
                progress.advance()
                yield delivery
        except BusError as error:
            print(f"headrace: {tp}: passed over from here: {error}", file=sys.stderr)


class Progress:
    """How far a long reading has come: one line on standard error, rewritten, on a terminal only."""

    def __init__(self, what: str, total: int, unit: str = "records") -> None:
        self._what = what
        self._unit = unit
        self._total = max(total, 1)
        self._done = 0
        self._started_s = self._shown_s = time.monotonic()
        self._on = sys.stderr.isatty()

    def advance(self, count: int = 1) -> None:
        self._done += count
        if not self._on:
            return
        now_s = time.monotonic()
        if now_s - self._shown_s >= SHOW_S:
            self._shown_s = now_s
            rate = self._done / (now_s - self._started_s)
            left_s = max(0.0, (self._total - self._done) / rate)
            share = min(100.0, 100 * self._done / self._total)
            line = f"{self._what}: {share:.0f} %, {rate:,.0f} {self._unit}/s, {left_s:.0f} s left"
            print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Takes the line away."""
        if self._on:
            print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)


async def at_places(bus: Bus, wanted: Iterable[tuple[TopicPartition, int]]) -> dict[str, Told]:
    """The records at these places, by `experience[3]@17`; those that the log no longer has are left out."""
    by_partition: dict[TopicPartition, set[int]] = {}
    for tp, offset in wanted:
        by_partition.setdefault(tp, set()).add(offset)
    found: dict[str, Told] = {}
    for tp, offsets in sorted(by_partition.items()):
        begin = max(min(offsets), (await bus.begins([tp.topic])).get(tp, 0))
        end = min(max(offsets) + 1, (await bus.ends([tp.topic])).get(tp, 0))
        if begin < end:
            async for delivery in bus.read_range(tp, begin, end):
                if delivery.offset in offsets:
                    found[delivery.place] = told(delivery)
    return found

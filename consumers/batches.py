"""The trainer's input: the next closed groups of its run, in the order read.

A step takes `groups_per_step` groups that were never read before; duplicates ride along, groups of other
runs on the same log are passed over. Waiting is measured, and long waiting raises an alarm. Not here: whether
a group is trained (`trainer.admission`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Container, Iterable, Sequence
from dataclasses import dataclass, field

from headrace import log
from headrace.bus.dead_letters import dead_letter
from headrace.bus.protocol import Bus, Delivery, Message, Reader, TopicPartition
from headrace.errors import OffsetGone, StoreError, StoreUnavailable, WireError
from headrace.store.blobs import BlobReader, Blobs
from headrace.store.claims import check_out
from headrace.trainer.admission import Entry
from headrace.wire.codec import decode
from headrace.wire.packed import TOKEN_BYTES
from headrace.wire.records import Consumed, Experience, Rollout, TrainStep

_logger = logging.getLogger(__name__)

ENTRIES_FACTOR = 4
"""A step ends early at so many records for each group it should have: a flood of duplicates stays bounded."""
WAIT_MS = 200
"""How soon a stop is seen while nothing comes."""


@dataclass(slots=True)
class Batch:
    """What one step consumes. `positions`: `topic/partition` -> next offset after it."""

    positions: dict[str, int]
    entries: list[Entry] = field(default_factory=list)
    deliveries: dict[str, Delivery] = field(default_factory=dict)
    """By place, as in `Entry.place`: what goes to the dead letters if it must."""
    other_run: int = 0
    wait_s: float = 0.0

    def dead_letters(self, malformed: Iterable[tuple[Entry, WireError]], now_ms: int) -> list[Message]:
        """Those of its entries that make no sense, with their bytes, as they go to the dead letters."""
        return [
            dead_letter(self.deliveries[entry.place], error, by="trainer", now_ms=now_ms)
            for entry, error in malformed
        ]


class Batches:
    """Reads from `positions` on, through a reader that stays open."""

    def __init__(
        self,
        reader: Reader,
        blobs: Blobs,
        *,
        run_name: str,
        groups: int,
        alarm_ms: int,
        positions: dict[str, int],
    ) -> None:
        self._reader = reader
        self._blobs = blobs
        self._run_name = run_name
        self._groups = groups
        self._alarm_s = alarm_ms / 1000
        self._positions = positions
        self._ahead: deque[Delivery] = deque()
        """Read and not yet taken; at most one read's worth."""

    async def next(self, seen: Container[str], stop: asyncio.Event) -> Batch | None:
        """The next full batch, or None when `stop` is set before. Raises OffsetGone, BusUnavailable,
        StoreUnavailable."""
        batch = Batch(dict(self._positions))
        fresh: set[str] = set()
        while len(fresh) < self._groups and len(batch.entries) < ENTRIES_FACTOR * self._groups:
            if not self._ahead and not await self._read(batch, len(fresh), stop):
                return None
            delivery = self._ahead[0]
            entry = await entry_of(delivery, self._blobs)
            self._ahead.popleft()  # only now: a store that is away must not lose it
            batch.positions[_key(delivery.tp)] = delivery.offset + 1
            if isinstance(entry.experience, Experience) and entry.experience.run != self._run_name:
                batch.other_run += 1
                continue
            batch.entries.append(entry)
            batch.deliveries[entry.place] = delivery
            if entry.consumed.group_id not in seen and self._is_ours(entry):
                fresh.add(entry.consumed.group_id)
        self._positions = batch.positions
        return batch

    def _is_ours(self, entry: Entry) -> bool:
        """Whether a group of this run was closed by it. Of bytes that can't be read only the key speaks: the
        feed's ids begin with the run's name."""
        return isinstance(entry.experience, Experience) or entry.consumed.group_id.startswith(
            f"{self._run_name}-"
        )

    async def _read(self, batch: Batch, fresh: int, stop: asyncio.Event) -> bool:
        """Fills `_ahead`; False when told to stop. An alarm each `alarm_ms` in which nothing came."""
        started_s = quiet_s = time.monotonic()
        while not self._ahead:
            if stop.is_set():
                return False
            self._ahead.extend(await self._reader.read(records_max=2 * self._groups, wait_ms=WAIT_MS))
            now_s = time.monotonic()
            if not self._ahead and now_s - quiet_s >= self._alarm_s:
                quiet_s = now_s
                log.event(
                    _logger,
                    "alarm",
                    level=logging.WARNING,
                    kind="no_experience",
                    quiet_s=round(now_s - started_s, 1),
                    groups_waiting=fresh,
                    groups_wanted=self._groups,
                )
        batch.wait_s += time.monotonic() - started_s
        return True


async def entry_of(delivery: Delivery, blobs: BlobReader) -> Entry:
    """What a delivery holds, its claim checked out; a WireError inside when it can't be known. Raises
    StoreUnavailable."""
    key = (delivery.key or b"").decode(errors="replace")
    consumed = Consumed(
        topic=delivery.topic, partition=delivery.partition, offset=delivery.offset, group_id=key
    )
    try:
        record = decode(delivery.topic, delivery.value or b"", delivery.headers)
        assert isinstance(record, Experience), "the only type of this topic"
        experience = await check_out(record, blobs)
        return Entry(
            Consumed(
                topic=delivery.topic,
                partition=delivery.partition,
                offset=delivery.offset,
                group_id=record.group_id,
                source=record.source,
                env=record.env,
                region=record.region,
                tokens=max(map(tokens_generated, experience.rollouts), default=0),
            ),
            experience,
        )
    except StoreUnavailable:
        raise
    except StoreError as error:
        return Entry(consumed, WireError(f"claim: {error}"))
    except WireError as error:
        return Entry(consumed, error)


def tokens_generated(rollout: Rollout) -> int:
    """By the model, over all turns."""
    return sum(len(step.tokens_out) for step in rollout.steps) // TOKEN_BYTES


async def entries_of(bus: Bus, blobs: BlobReader, step: TrainStep) -> list[Entry]:
    """The records of a step in the ledger, in its order, as they were judged then. Raises StoreError that
    names every record which is gone, or the first that is another than the ledger says."""
    deliveries = await fetch(bus, step)
    entries = []
    malformed = {drop.group_id for drop in step.drops if drop.reason == "malformed"}
    for consumed in step.consumed:
        delivery = deliveries[consumed]
        entry = await entry_of(delivery, blobs)
        if isinstance(entry.experience, WireError) and consumed.group_id not in malformed:
            raise StoreError(
                f"{delivery.place}: expected the experience that step {step.step} trained on:"
                f" {entry.experience}"
            )
        if entry.consumed.group_id != consumed.group_id:
            raise StoreError(
                f"{delivery.place}: expected group {consumed.group_id!r}, as step {step.step} read it, found"
                f" {entry.consumed.group_id!r}: the topic was made anew, or its records were exchanged"
            )
        entries.append(entry)
    return entries


async def fetch(bus: Bus, step: TrainStep) -> dict[Consumed, Delivery]:
    """The records of a step as they lie. Raises StoreError that names those which the log no longer has."""
    ranges: dict[TopicPartition, set[int]] = {}
    for item in step.consumed:
        ranges.setdefault(TopicPartition(item.topic, item.partition), set()).add(item.offset)
    found: dict[tuple[TopicPartition, int], Delivery] = {}
    for tp, offsets in ranges.items():
        async for delivery in _kept(bus, tp, min(offsets), max(offsets) + 1):
            if delivery.offset in offsets:
                found[tp, delivery.offset] = delivery
    gone = {tp: sorted(o for o in offsets if (tp, o) not in found) for tp, offsets in ranges.items()}
    count = sum(map(len, gone.values()))
    if count:
        places = ", ".join(f"{tp}@{offsets_text(offsets)}" for tp, offsets in gone.items() if offsets)
        raise StoreError(
            f"{places}: expected {len(step.consumed)} records of step {step.step}, {count} of them have left"
            " the log"
        )
    return {w: found[TopicPartition(w.topic, w.partition), w.offset] for w in step.consumed}


async def _kept(bus: Bus, tp: TopicPartition, start: int, end: int) -> AsyncIterator[Delivery]:
    """What the log still has of a range."""
    try:
        async for delivery in bus.read_range(tp, start, end):
            yield delivery
    except OffsetGone:
        begin, stop = (await bus.begins([tp.topic]))[tp], (await bus.ends([tp.topic]))[tp]
        if begin <= start:
            return  # the whole range lies beyond the end
        async for delivery in bus.read_range(tp, begin, min(end, stop)):
            yield delivery


def offsets_text(offsets: Sequence[int]) -> str:
    """`3..7,9` of sorted offsets."""
    runs: list[list[int]] = []
    for offset in offsets:
        if runs and offset == runs[-1][1] + 1:
            runs[-1][1] = offset
        else:
            runs.append([offset, offset])
    return ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


def positions_of(positions: dict[str, int]) -> dict[TopicPartition, int]:
    """`experience/3` -> 17 as the bus has it."""
    split = {key.rpartition("/"): offset for key, offset in positions.items()}
    return {TopicPartition(topic, int(partition)): offset for (topic, _, partition), offset in split.items()}


def positions_by_name(positions: dict[TopicPartition, int]) -> dict[str, int]:
    """The inverse of `positions_of`."""
    return {_key(tp): offset for tp, offset in sorted(positions.items())}


def _key(tp: TopicPartition) -> str:
    return f"{tp.topic}/{tp.partition}"

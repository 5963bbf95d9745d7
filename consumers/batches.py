"""The trainer's input: the next closed groups of its run, the oldest of what there is first.

A step takes `groups_per_step` simulated groups that were never read before, and up to `live_per_step` live
units; duplicates ride along, groups of other runs on the same log are passed over. Waiting is measured, and
long waiting raises an alarm. Not here: whether a group is trained (`trainer.admission`).
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace import log
from headrace.bus.dead_letters import dead_letter
from headrace.bus.ordering import in_time_order
from headrace.bus.protocol import Bus, Delivery, Message, Reader, TopicPartition
from headrace.config import RunConfig
from headrace.errors import OffsetGone, StoreError, StoreUnavailable, WireError
from headrace.store.blobs import BlobReader, Blobs
from headrace.store.claims import check_out
from headrace.trainer.admission import Entry
from headrace.wire.codec import decode
from headrace.wire.packed import TOKEN_BYTES
from headrace.wire.records import Consumed, Experience, Rollout, TrainStep
from headrace.wire.topics import EXPERIENCE, EXPERIENCE_LIVE

_logger = logging.getLogger(__name__)

ENTRIES_FACTOR = 4
"""A step ends early at so many records for each group it should have: a flood of duplicates stays bounded."""
WAIT_MS = 200
"""How soon a stop is seen while nothing comes."""
LOOK_MS = 10
"""For what need not be waited for."""


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
    """Reads from `positions` on, through readers that stay open: one for each source, so that neither
    source's backlog can stand before the other's."""

    def __init__(
        self,
        readers: Mapping[str, Reader],
        blobs: Blobs,
        run: RunConfig,
        *,
        alarm_ms: int,
        positions: dict[str, int],
    ) -> None:
        """`readers`: by topic, `experience` and `experience.live`."""
        self._blobs = blobs
        self._run = run
        self._alarm_s = alarm_ms / 1000
        self._positions = positions
        ahead = run.lag_versions_max + 2  # steps' worth: what the feed may have out, and a step
        self._simulated = _Lane(readers[EXPERIENCE.name], run.groups_per_step, ahead)
        self._live = _Lane(readers[EXPERIENCE_LIVE.name], run.live_per_step, ahead)

    async def next(self, seen: Container[str], version: int, stop: asyncio.Event) -> Batch | None:
        """The next batch for a step from `version`, or None when `stop` is set before. Raises OffsetGone,
        BusUnavailable, StoreUnavailable.

        Simulated groups set the pace: the feed issues as many as steps consume. Live units ride along, as
        many as there are up to their share, or come within `live_wait_ms`; they set the pace only where
        nothing is simulated.
        """
        batch = Batch(dict(self._positions))
        pace, riding = self._simulated, self._live
        if not pace.units:
            pace, riding = riding, pace
        if not await self._take(pace, batch, seen, version, stop):
            return None
        await self._take(riding, batch, seen, version, stop, wait_s=self._run.live_wait_ms / 1000)
        self._positions = batch.positions
        return batch

    async def _take(
        self,
        lane: "_Lane",
        batch: Batch,
        seen: Container[str],
        version: int,
        stop: asyncio.Event,
        *,
        wait_s: float = math.inf,
    ) -> bool:
        """Adds the lane's share to `batch`, or what there is of it after `wait_s`; False when told to stop
        before a share that has all time."""
        until_s = time.monotonic() + wait_s
        fresh: set[str] = set()
        before = len(batch.entries)
        while len(fresh) < lane.units and len(batch.entries) - before < ENTRIES_FACTOR * lane.units:
            if not lane.ahead and not await self._read(lane, batch, len(fresh), stop, until_s):
                return until_s < math.inf
            delivery = lane.ahead[0]
            entry = await entry_of(delivery, self._blobs)
            lane.ahead.popleft()  # only now: a store that is away must not lose it
            batch.positions[_key(delivery.tp)] = delivery.offset + 1
            if isinstance(entry.experience, Experience) and entry.experience.run != self._run.name:
                batch.other_run += 1
                continue
            batch.entries.append(entry)
            batch.deliveries[entry.place] = delivery
            if entry.consumed.group_id not in seen and self._counts(entry, version):
                fresh.add(entry.consumed.group_id)
        return True

    def _counts(self, entry: Entry, version: int) -> bool:
        """Whether the entry takes a place in the step. Of bytes that can't be read only the key speaks: the
        feed's ids begin with the run's name. Live units that waited too long take none, or a backlog of them
        would keep out the fresh ones for ever; simulated groups do: the feed counts on it."""
        experience = entry.experience
        if not isinstance(experience, Experience):
            return entry.consumed.group_id.startswith(f"{self._run.name}-")
        return experience.source == "sim" or _oldest(experience) >= version - self._run.lag_versions_max

    async def _read(
        self, lane: "_Lane", batch: Batch, fresh: int, stop: asyncio.Event, until_s: float
    ) -> bool:
        """Fills `lane.ahead`; False when told to stop, or when nothing came until `until_s`. An alarm each
        `alarm_ms` in which nothing came."""
        started_s = quiet_s = time.monotonic()
        while not lane.ahead:
            if stop.is_set():
                return False
            deliveries = await lane.reader.read(
                records_max=lane.steps_ahead * lane.units,
                wait_ms=round(max(LOOK_MS, min(WAIT_MS, 1000 * (until_s - time.monotonic())))),
            )
            # A read fills up with one partition first: groups of the others would grow too old meanwhile.
            lane.ahead.extend(delivery for _, delivery in in_time_order(deliveries, {}))
            now_s = time.monotonic()
            if not lane.ahead and now_s >= until_s:
                break
            if not lane.ahead and now_s - quiet_s >= self._alarm_s:
                quiet_s = now_s
                log.event(
                    _logger,
                    "alarm",
                    level=logging.WARNING,
                    kind="no_experience",
                    quiet_s=round(now_s - started_s, 1),
                    groups_waiting=fresh,
                    groups_wanted=lane.units,
                )
        batch.wait_s += time.monotonic() - started_s
        return bool(lane.ahead)


@dataclass(slots=True)
class _Lane:
    """One source's reader and its share of a step, in units."""

    reader: Reader
    units: int
    steps_ahead: int
    ahead: deque[Delivery] = field(default_factory=deque)
    """Read and not yet taken; at most one read's worth."""


def _oldest(experience: Experience) -> int:
    """The version of the oldest tokens in it."""
    spans = (span for rollout in experience.rollouts for step in rollout.steps for span in step.spans)
    return min((span.weights_version for span in spans), default=0)


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
        mark = msgspec.structs.replace(entry.consumed, revoked=consumed.revoked)
        entries.append(Entry(mark, entry.experience))
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

"""The bus host: one processor on one partition of its inputs, exactly once, on either bus.

A batch is folded, and its outputs, changed states, dead letters and positions go out in **one** transaction.
The transactional id belongs to the partition, not to the process: whoever starts last owns it, and an earlier
owner that wakes up is fenced before it can write. Not here: which partitions a process owns (`streams.run`),
what is computed (`streams.processor`).
"""

import asyncio
import logging
from collections import Counter
from typing import Annotated, Literal

import msgspec

from headrace import log
from headrace.bus.dead_letters import dead_letter
from headrace.bus.ordering import in_time_order
from headrace.bus.protocol import Bus, Delivery, Message, Reader, TopicPartition, Transactor
from headrace.clock import Clock
from headrace.errors import BusUnavailable, HeadraceError, OffsetGone, WireError
from headrace.store.blobs import Blobs
from headrace.store.claims import check_in
from headrace.streams.fold import Fold
from headrace.streams.processor import Output, Processor
from headrace.streams.reading import apply

OUTPUTS_MAX = 64
"""Outputs and dead letters in one transaction; each may take 1 MB."""
READ_WAIT_MS = 500
"""A stop is seen at least this often."""
BACKOFF_S = 0.2
BACKOFF_S_MAX = 5.0

_logger = logging.getLogger(__name__)


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    records_max: int = 500
    """Records in one batch, and so in one transaction."""
    linger_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0
    """After a transaction nothing is read for so long, unless more than a batch waits: fewer and larger
    transactions, for outputs that much later."""
    recovery_ms: int = 60_000
    """Reading the states back may take so long."""
    unavailable_ms: int = 120_000
    """Without bus or store for longer than this, the process ends."""
    clock_skew_ms: int = 1_000
    """How far this machine's clock may run ahead of the broker's: idle timers fire so much later."""
    on_gone: Literal["stop", "resume"] = "stop"
    """When the log no longer holds the committed position (retention, a topic made anew): end with an error,
    or go on at the oldest record. Groups that lost records close by timeout."""


class PartitionHost:
    """`counts` add up over the life of the process, also over restarts of the partition."""

    def __init__(
        self,
        bus: Bus,
        processor: Processor,
        partition: int,
        *,
        blobs: Blobs,
        clock: Clock,
        config: HostConfig,
    ) -> None:
        self._bus = bus
        self._processor = processor
        self._partition = partition
        self._blobs = blobs
        self._clock = clock
        self._config = config
        self._topics = [topic.name for topic in processor.inputs]
        self._inputs = [TopicPartition(topic, partition) for topic in self._topics]
        self._fold = Fold(processor)
        self._reached_ms: dict[TopicPartition, int] = {}
        self._dead: list[Message] = []
        self._parents: dict[str, bytes | None] = {}
        self._asked_ms = 0
        self.counts: Counter[str] = Counter()

    @property
    def stream(self) -> str:
        return self._processor.name

    @property
    def group(self) -> str:
        """Consumer group of the positions, and the `ce_source` of what goes out."""
        return f"streams.{self._processor.name}"

    @property
    def transactional_id(self) -> str:
        return f"{self.group}-{self._partition}"

    @property
    def open(self) -> int:
        return self._fold.open

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, with the last batch committed.

        Raises Fenced when another process took the partition over, OffsetGone (see `HostConfig.on_gone`), and
        BusUnavailable or StoreUnavailable once they last for `unavailable_ms`.
        """
        backoff_s, failing_since_ms = BACKOFF_S, None
        while not stop.is_set():
            commits = self.counts["commits"]
            try:
                await self._own(stop)
            except HeadraceError as error:
                now_ms = self._clock.now_ms()
                if self.counts["commits"] > commits:
                    backoff_s, failing_since_ms = BACKOFF_S, None
                failing_since_ms = now_ms if failing_since_ms is None else failing_since_ms
                if not error.retriable or now_ms - failing_since_ms > self._config.unavailable_ms:
                    raise
                self._log(logging.WARNING, "again", after_s=backoff_s, error=error)
                await _pause(stop, backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def _own(self, stop: asyncio.Event) -> None:
        # 1 fence earlier owners  2 positions and states, now final  3 batches, each one transaction.
        # After any fault: again from 1.
        async with self._bus.transactor(self.transactional_id) as transactor:
            positions = await self._bus.begins(self._topics)
            positions.update(await self._bus.committed(self.group, self._topics))
            self._reached_ms = dict.fromkeys(self._inputs, 0)
            self._dead, self._parents = [], {}
            self._fold = await self._restored()
            async with self._bus.reader({tp: positions[tp] for tp in self._inputs}) as reader:
                self._log(logging.INFO, "ready", open=self._fold.open, settled=self._fold.settled)
                while not stop.is_set():
                    commits = self.counts["commits"]
                    try:
                        full = await self._batch(reader, transactor)
                        if self.counts["commits"] > commits and not full:
                            await _pause(stop, self._config.linger_ms / 1000)
                    except OffsetGone as error:
                        if self._config.on_gone == "stop":
                            raise
                        await self._resume(reader, error)

    async def _batch(self, reader: Reader, transactor: Transactor) -> bool:
        """True when there may be more to read at once."""
        deliveries = await reader.read(records_max=self._config.records_max, wait_ms=READ_WAIT_MS)
        done: dict[TopicPartition, int] = {}
        for at_ms, delivery in in_time_order(deliveries, self._reached_ms):
            self._apply(delivery, at_ms)
            done[delivery.tp] = delivery.offset + 1
            if self._fold.pending + len(self._dead) >= OUTPUTS_MAX:
                await self._commit(transactor, done)
        reached_ms = await self._horizon(reader, idle=not deliveries)
        while self._fold.advance(reached_ms):
            await self._commit(transactor, done)
        await self._commit(transactor, reader.positions() if deliveries else {})
        return len(deliveries) == self._config.records_max

    def _apply(self, delivery: Delivery, at_ms: int) -> None:
        pending = self._fold.pending
        try:
            key = apply(self._fold, self._processor, delivery, at_ms)
            if self._fold.pending > pending:
                self._parents[key] = delivery.header("traceparent")
        except WireError as error:
            self.counts["dead"] += 1
            self._dead.append(dead_letter(delivery, error, by=self.group, now_ms=self._clock.now_ms()))
            self._log(logging.WARNING, "dead", place=delivery.place, error=error)
        self._reached_ms[delivery.tp] = at_ms

    async def _commit(self, transactor: Transactor, positions: dict[TopicPartition, int]) -> None:
        changes = self._fold.drain()
        if not (changes or self._dead or positions):
            return
        state_topic = self._processor.state_topic.name
        messages = [await self._message(output) for output in changes.outputs]
        messages += [
            Message(state_topic, key, value, partition=self._partition) for key, value in changes.entries
        ]
        messages += self._dead
        await transactor.commit(messages, group=self.group, positions=positions)
        self._dead, self._parents = [], {}
        self.counts["commits"] += 1

    async def _message(self, output: Output) -> Message:
        value, headers = await check_in(
            output.record,
            self._blobs,
            source=self.group,
            now_ms=self._clock.now_ms(),
            event_id=output.event_id,
            parent=self._parents.get(output.key),
        )
        return Message(output.topic, output.key.encode(), value, headers)

    async def _horizon(self, reader: Reader, *, idle: bool) -> int:
        """The broker time that every input has reached: no record up to it can still come.

        An input that is read to its end has reached the present, less the skew of clocks; asked of the bus
        only when a timer may be due, and at most once a second while records come.
        """
        reached_ms = min(self._reached_ms.values())
        due_ms = self._fold.due_ms
        now_ms = self._clock.now_ms() - self._config.clock_skew_ms
        if (
            due_ms is None
            or not reached_ms < due_ms <= now_ms
            or not (idle or now_ms - self._asked_ms >= 1000)
        ):
            return reached_ms
        self._asked_ms = now_ms
        ends, positions = await self._bus.ends(self._topics), reader.positions()
        return min(now_ms if positions[tp] >= ends[tp] else self._reached_ms[tp] for tp in self._inputs)

    async def _restored(self) -> Fold:
        """The states as of the last commit. Raises BusUnavailable that says how far it came within
        `recovery_ms`."""
        tp = TopicPartition(self._processor.state_topic.name, self._partition)
        offset, end = -1, -1
        try:
            async with asyncio.timeout(self._config.recovery_ms / 1000):
                while True:
                    offset, end = (
                        (await self._bus.begins([tp.topic]))[tp],
                        (await self._bus.ends([tp.topic]))[tp],
                    )
                    states: dict[bytes, bytes] = {}
                    try:
                        async for delivery in self._bus.read_range(tp, offset, end):
                            offset = delivery.offset
                            _put(states, delivery)
                        break
                    except OffsetGone as error:  # trimmed while it was read: what is left begins later now
                        self._log(logging.WARNING, "state trimmed, reading it again", error=error)
        except TimeoutError as error:
            raise BusUnavailable(
                f"{tp}: expected the states up to offset {end} within {self._config.recovery_ms} ms,"
                f" got to {offset}"
            ) from error
        fold = Fold(self._processor, self.counts)
        fold.restore(states.items(), self._clock.now_ms())
        return fold

    async def _resume(self, reader: Reader, error: OffsetGone) -> None:
        begins, positions = await self._bus.begins(self._topics), reader.positions()
        ends = await self._bus.ends(self._topics)
        gone = {tp: begins[tp] for tp in self._inputs if not begins[tp] <= positions[tp] <= ends[tp]}
        if not gone:
            raise error
        self.counts["gone"] += len(gone)
        self._log(logging.ERROR, "records gone, resuming at the oldest", gone=gone, error=error)
        reader.seek(gone)

    def _log(self, level: int, event: str, **fields: object) -> None:
        log.event(_logger, event, level=level, stream=self.group, partition=self._partition, **fields)


def _put(states: dict[bytes, bytes], delivery: Delivery) -> None:
    assert delivery.key is not None, delivery.place
    if delivery.value is None:
        states.pop(delivery.key, None)
    else:
        states[delivery.key] = delivery.value


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    if not seconds:
        return
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return

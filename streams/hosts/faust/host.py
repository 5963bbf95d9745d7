"""The partitions that a Faust worker has, and what becomes of their events. The app: `hosts.faust`."""

import asyncio
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import faust
import msgspec
from faust.streams import _current_event
from faust.types import TP

from headrace.bus.dead_letters import dead_letter
from headrace.bus.ordering import in_time_order
from headrace.bus.protocol import Delivery, Message, TopicPartition, partition_of
from headrace.clock import Clock
from headrace.errors import WireError
from headrace.store.blobs import Blobs
from headrace.store.claims import check_in
from headrace.streams.fold import Changes, Fold
from headrace.streams.processor import Processor
from headrace.streams.reading import apply
from headrace.wire.topics import TOPICS

_logger = logging.getLogger(__name__)


class FaustConfig(msgspec.Struct, frozen=True, kw_only=True):
    store: str = "memory"
    """Of the table: `memory`, or `rocksdb` on local disk (through rocksdict)."""
    directory: str = "faust"
    """Where RocksDB keeps its files; one for each worker."""
    instance: str = ""
    """Static membership: a worker that restarts under its name has its partitions back without a
    rebalance."""
    records_max: int = 500
    within_ms: int = 50
    """A batch waits so long for more."""
    quiet_ms: int = 2_000
    """Idle timers fire when an input was read to its end and then silent for so long."""


class FaustHost:
    """The folds of the partitions that this worker has now."""

    def __init__(
        self, app: faust.App, processor: Processor, blobs: Blobs, clock: Clock, config: FaustConfig
    ) -> None:
        self._app = app
        self._processor = processor
        self._blobs = blobs
        self._clock = clock
        self._config = config
        self._table: Any = app.Table(
            "state", key_type=bytes, value_type=bytes, partitions=processor.state_topic.partitions
        )
        self._folds: dict[int, Fold] = {}
        self._reached_ms: dict[TopicPartition, int] = {}
        self._heard_s: dict[int, float] = {}
        self._one_at_a_time = asyncio.Lock()
        self.counts: Counter[str] = Counter()
        revoked: Any = app.on_partitions_revoked
        revoked.connect(self._revoked)

    @property
    def source(self) -> str:
        return f"streams.{self._processor.name}"

    @property
    def open(self) -> int:
        return sum(fold.open for fold in self._folds.values())

    async def batch(self, events: Sequence[Any]) -> None:
        """Handles and acknowledges `events`; those from before a rebalance are left to their new owner."""
        async with self._one_at_a_time:
            ours = [e for e in events if e.message.generation_id == self._app.consumer_generation_id]
            try:
                dead = self._applied(ours)
                partitions = {event.message.partition for event in ours}
                for partition in partitions:
                    await self._advance(partition, min(self._reached(partition).values()))
                await asyncio.gather(*[await self._send(letter) for letter in dead])
            except Exception:
                _die()
            for event in ours:
                event.ack()

    async def tick(self) -> None:
        """Fires the timers of partitions whose inputs were read to their end and are silent."""
        if self._app.rebalancing or not self._app.flow_control.is_active():
            return
        now_ms = self._clock.now_ms() - self._config.quiet_ms
        assigned = self._app.consumer.assignment()
        first = self._processor.inputs[0].name
        due = {tp.partition for tp in assigned if tp.topic == first and self._quiet(tp.partition, now_ms)}
        inputs = [TP(topic.name, partition) for topic in self._processor.inputs for partition in due]
        if not inputs:
            return
        # Not under the lock: the broker answers after the fetcher's long poll, a second or two.
        ends = await self._app.consumer.highwaters(*inputs)
        behind = {tp.partition for tp in inputs if (await self._app.consumer.position(tp) or 0) < ends[tp]}
        async with self._one_at_a_time:
            for partition in due - behind:
                if partition in self._folds and self._quiet(partition, now_ms):
                    try:
                        await self._advance(partition, now_ms)
                    except Exception:
                        _die()

    def _quiet(self, partition: int, now_ms: int) -> bool:
        due_ms = self._fold(partition).due_ms
        quiet_s = time.monotonic() - self._heard_s[partition]
        return due_ms is not None and due_ms <= now_ms and quiet_s >= self._config.quiet_ms / 1000

    def _applied(self, events: Sequence[Any]) -> list[Message]:
        """Folds `events`; the letters of those that could not be."""
        dead = []
        for at_ms, delivery in in_time_order([_delivery(event) for event in events], self._reached_ms):
            fold = self._fold(delivery.partition)
            try:
                apply(fold, self._processor, delivery, at_ms)
            except WireError as error:
                self.counts["dead"] += 1
                dead.append(dead_letter(delivery, error, by=self.source, now_ms=self._clock.now_ms()))
            self._reached_ms[delivery.tp] = at_ms
            self._heard_s[delivery.partition] = time.monotonic()
        return dead

    async def _advance(self, partition: int, reached_ms: int) -> None:
        more = True
        while more:
            more = self._fold(partition).advance(reached_ms)
            await self._write(partition, self._fold(partition).drain())

    async def _write(self, partition: int, changes: Changes) -> None:
        # 1 outputs, acknowledged  2 states. A crash after 1 sends them again under the same ids.
        messages = []
        for output in changes.outputs:
            value, headers = await check_in(
                output.record,
                self._blobs,
                source=self.source,
                now_ms=self._clock.now_ms(),
                event_id=output.event_id,
            )
            messages.append(Message(output.topic, output.key.encode(), value, headers))
        await asyncio.gather(*[await self._send(message) for message in messages])
        # Faust takes the partition of a table's record from the event under way; a batch has several, a timer
        # has none.
        place: Any = _Place(self._processor.inputs[0].name, partition)
        if self._app.consumer.topic_partitions(self._table.changelog_topic_name) == 0:
            # Faust's view of a topic that it has only just made: refused as a mismatch, until a restart.
            self._table._verified_source_topics_for_partitions.add(place.message.topic)
        token = _current_event.set(weakref.ref(place))
        try:
            for key, entry in changes.entries:
                if entry is None:
                    self._table.pop(key, None)
                else:
                    self._table[key] = entry
        finally:
            _current_event.reset(token)

    async def _send(self, message: Message) -> Any:
        partition = partition_of(message.key or b"", TOPICS[message.topic].partitions)
        return await self._app.send(
            message.topic,
            key=message.key,
            value=message.value,
            partition=partition,
            headers=list(message.headers),
            key_serializer="raw",
            value_serializer="raw",
        )

    def _fold(self, partition: int) -> Fold:
        """That of `partition`, read from the table when it is new here."""
        if partition not in self._folds:
            fold = Fold(self._processor, self.counts)
            count = self._processor.state_topic.partitions
            fold.restore(
                (
                    (key, value)
                    for key, value in self._table.items()
                    if partition_of(key.partition(b"\0")[0], count) == partition
                ),
                self._clock.now_ms(),
            )
            self._folds[partition] = fold
            self._heard_s[partition] = time.monotonic()
        return self._folds[partition]

    def _reached(self, partition: int) -> dict[TopicPartition, int]:
        inputs = [TopicPartition(topic.name, partition) for topic in self._processor.inputs]
        return {tp: self._reached_ms.get(tp, 0) for tp in inputs}

    async def _revoked(self, app: faust.App, revoked: set[TP], **kwargs: Any) -> None:
        async with self._one_at_a_time:
            for tp in revoked:
                self._folds.pop(tp.partition, None)
                self._reached_ms.pop(TopicPartition(tp.topic, tp.partition), None)


class _Place:
    """As much of an event as a Faust table asks for."""

    def __init__(self, topic: str, partition: int) -> None:
        self.message = SimpleNamespace(topic=topic, partition=partition)


def _delivery(event: Any) -> Delivery:
    message = event.message
    headers = message.headers or ()
    return Delivery(
        message.topic,
        message.partition,
        message.offset,
        round(message.timestamp * 1000),
        message.key,
        message.value,
        tuple(headers.items() if isinstance(headers, dict) else headers),
    )


def _die() -> None:
    """Ends the process with nothing acknowledged. Stopping the app from inside its agent would wait for that
    agent for ever."""
    _logger.critical("stream host failed, ending before the offset is acknowledged", exc_info=True)
    logging.shutdown()
    os._exit(1)

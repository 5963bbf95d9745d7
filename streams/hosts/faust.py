"""The Faust host: the same processors as a Faust app, at least once. Needs Kafka.

A batch is folded; then, in this order, its outputs and dead letters are sent and acknowledged, its states go
into a Faust table, and only then its events are acknowledged. A crash between two of these repeats work on
newer state, which changes nothing, and may send an output again under the same id: readers drop it. Faust has
no fencing and reads uncommitted records; where that matters, use `hosts.bus` (docs/adr/0006-stream-hosts.md).

The agent never lets an exception out, because Faust commits past it: a bad record is dead-lettered, any other
fault ends the process at once, with nothing acknowledged.
"""

import asyncio
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import faust
import msgspec
from faust.app import BootStrategy
from faust.streams import _current_event
from faust.types import TP

from headrace import log
from headrace.bus import open_bus
from headrace.bus.dead_letters import dead_letter
from headrace.bus.protocol import Bus, Delivery, Message, TopicPartition, partition_of
from headrace.clock import Clock, SystemClock
from headrace.errors import WireError
from headrace.store.blobs import Blobs
from headrace.store.claims import check_in
from headrace.streams.fold import Changes, Fold
from headrace.streams.processor import Processor
from headrace.streams.reading import apply, in_time_order
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


def stream_app(
    processor: Processor,
    brokers: str,
    blobs: Blobs,
    config: FaustConfig,
    *,
    clock: Clock | None = None,
    security: Mapping[str, str] | None = None,
    **settings: Any,
) -> faust.App:
    """A Faust app that runs `processor` on Kafka at `brokers` (`host:port[,host:port]`).

    `settings` are Faust's own and win (`broker_credentials` for TLS and SASL); `security` is the same for the
    bus that makes the topics first.
    """
    name = f"headrace-streams-{processor.name}"
    app = _App(
        name,
        **{
            "broker": [f"kafka://{address}" for address in brokers.split(",")],
            "store": f"{config.store}://",
            "datadir": config.directory,
            "consumer_group_instance_id": config.instance or None,
            "consumer_auto_offset_reset": "earliest",
            "autodiscover": False,
            "web_enabled": False,
            "broker_commit_interval": 1.0,
            "broker_session_timeout": 10.0,
            "broker_rebalance_timeout": 20.0,
            "broker_request_timeout": 30.0,  # 1200 s by default: it would wait in silence for a broker
            "topic_partitions": processor.state_topic.partitions,
            "worker_redirect_stdouts": False,
            **settings,
        },
    )
    app.bus = lambda: open_bus(f"kafka:{brokers}", security=security)
    host = FaustHost(app, processor, blobs, clock or SystemClock(), config)
    topic = app.topic(
        *(topic.name for topic in processor.inputs), key_serializer="raw", value_serializer="raw"
    )

    @app.agent(topic, name=processor.name)
    async def agent(stream: Any) -> AsyncIterator[None]:
        async for events in stream.noack_take(config.records_max, within=config.within_ms / 1000):
            await host.batch(events)
            yield

    @app.timer(1.0)  # type: ignore[untyped-decorator]  # Faust's own
    async def timers() -> None:
        await host.tick()

    @app.timer(10.0)  # type: ignore[untyped-decorator]
    async def report() -> None:
        log.event(_logger, "counts", stream=processor.name, open=host.open, **host.counts)

    return app


class _Boot(BootStrategy):
    enable_web = (
        False  # the worker's command line turns the server on, whatever the settings say: it shows tables
    )


class _App(faust.App):
    BootStrategy = _Boot
    bus: Callable[[], Bus]

    async def on_first_start(self) -> None:
        # A missing output topic would block the agent for ever, with an error line every 100 ms.
        async with self.bus() as bus:
            for difference in await bus.create_topics(list(TOPICS.values())):
                log.event(_logger, "topic differs", level=logging.WARNING, difference=difference)
        await super().on_first_start()


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

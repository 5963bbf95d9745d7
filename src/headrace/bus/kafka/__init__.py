"""The log on Apache Kafka, through aiokafka. The only place that imports it.

Not here: what the calls promise (`bus.protocol`). Inside: `connection` (settings, deadlines, errors),
`sending`, `reading`, `admin`.

`acks=all` and idempotent; readers see committed transactions only; group members have static ids if they are
given one, and the range assignor. Kafka's own semantics that differ from the embedded log's: docs/bus.md.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Self

from headrace.bus.kafka import sending
from headrace.bus.kafka.admin import Admin
from headrace.bus.kafka.connection import RETRY_S, Connection
from headrace.bus.kafka.reading import KafkaMember, KafkaReader, membership, reading
from headrace.bus.protocol import (
    Delivery,
    Difference,
    Message,
    PartitionInfo,
    Positions,
    TopicPartition,
)
from headrace.errors import BusUnavailable, OffsetGone
from headrace.wire.topics import Topic

SESSION_MS = 10_000


class KafkaBus:
    """See `bus.protocol.Bus`. `address` is `host:port[,host:port]`."""

    def __init__(
        self,
        address: str,
        *,
        security: Mapping[str, str] | None = None,
        session_ms: int = SESSION_MS,
        retry_s: float = RETRY_S,
    ) -> None:
        self._connection = Connection(address, security or {}, session_ms=session_ms, retry_s=retry_s)
        self._opened: tuple[Admin, sending.Sender] | None = None

    async def __aenter__(self) -> Self:
        admin = Admin(self._connection)
        try:
            await admin.start()
        except BaseException:
            await admin.stop()
            raise
        self._opened = admin, sending.Sender(self._connection, admin.partitions)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._opened is not None:
            admin, sender = self._opened
            self._opened = None
            await sender.stop()
            await admin.stop()

    @property
    def _admin(self) -> Admin:
        assert self._opened is not None, "use the bus inside `async with`"
        return self._opened[0]

    async def create_topics(self, topics: Sequence[Topic]) -> list[Difference]:
        return await self._admin.create(topics)

    async def topics(self) -> dict[str, list[PartitionInfo]]:
        return await self._admin.topics()

    async def retention_ms(self, topic: str) -> int:
        return await self._admin.retention_ms(topic)

    async def groups(self) -> dict[str, dict[TopicPartition, int]]:
        return await self._admin.groups()

    async def produce(self, messages: Sequence[Message]) -> list[int]:
        assert self._opened is not None, "use the bus inside `async with`"
        return await self._opened[1].send(messages)

    def reader(self, positions: Positions) -> AbstractAsyncContextManager[KafkaReader]:
        return reading(self._connection, positions)

    @contextlib.asynccontextmanager
    async def member(
        self, group: str, topics: Sequence[str], *, member_id: str | None = None
    ) -> AsyncIterator[KafkaMember]:
        for topic in topics:
            await self._admin.partitions(topic)
        async with membership(self._connection, group, topics, member_id) as member:
            yield member

    @contextlib.asynccontextmanager
    async def transactor(self, transactional_id: str) -> AsyncIterator[sending.KafkaTransactor]:
        producer = await sending.start(self._connection, transactional_id)
        transactor = sending.KafkaTransactor(
            self._connection, self._admin.partitions, producer, transactional_id
        )
        try:
            yield transactor
        finally:
            await (sending.abandon if transactor.broken else sending.stop)(producer)

    async def committed(self, group: str, topics: Sequence[str]) -> dict[TopicPartition, int]:
        return await self._admin.committed(group, topics)

    async def ends(self, topics: Sequence[str]) -> dict[TopicPartition, int]:
        return await self._admin.ends(topics)

    async def begins(self, topics: Sequence[str]) -> dict[TopicPartition, int]:
        return await self._admin.begins(topics)

    async def offsets_at(self, topic: str, timestamp_ms: int) -> dict[TopicPartition, int]:
        return await self._admin.offsets_at(topic, timestamp_ms)

    async def read_range(self, tp: TopicPartition, start: int, end: int) -> AsyncIterator[Delivery]:
        end = min(end, (await self._admin.ends([tp.topic]))[tp])
        begin = (await self._admin.begins([tp.topic]))[tp]
        if start < begin:
            raise OffsetGone(f"{tp}@{start}: expected a position from {begin} on, the log no longer holds it")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._connection.retry_s
        async with self.reader({tp: start}) as reader:
            while reader.positions()[tp] < end:
                deliveries = await reader.read()
                for delivery in deliveries:
                    if delivery.offset >= end:
                        return
                    yield delivery
                if deliveries:
                    deadline_s = loop.time() + self._connection.retry_s
                elif loop.time() > deadline_s:
                    raise BusUnavailable(f"{tp}@{start}: expected records up to {end}, none came in time")

"""Reading from Kafka: committed records from given positions, and as a member of a consumer group.

Not here: where a topic begins and ends (`admin`).

Positions are never reset in silence (`auto_offset_reset="none"`): OffsetGone goes to the caller. aiokafka
leaves a group whose member does not poll for `max_poll_interval_ms`; that limit is lifted, so that a handler
may take as long as it needs while heart-beats go on.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
    RebalanceInProgressError,
)

from headrace import failpoints
from headrace.bus.kafka.connection import Connection
from headrace.bus.protocol import Delivery, Positions, TopicPartition
from headrace.errors import BusUnavailable, OffsetGone

FETCH_WAIT_MS = 200  # how long a broker holds an empty fetch; a seek waits for the one that is under way
FETCH_BYTES_MAX = 16 << 20
SLICE_MS = 50  # how often a wait looks whether a position has moved past a gap
POLL_INTERVAL_MS = 2**31 - 1

_logger = logging.getLogger(__name__)


class KafkaReader:
    def __init__(self, connection: Connection, consumer: AIOKafkaConsumer, positions: Positions) -> None:
        self._connection = connection
        self._consumer = consumer
        self._since_s = time.time()
        self._positions: dict[TopicPartition, int] = {}
        consumer.assign([KafkaPartition(*tp) for tp in positions])
        self.seek(positions)

    async def read(self, *, records_max: int = 500, wait_ms: int = 1000) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_ms / 1000
        while True:
            left_ms = max(0, int((deadline_s - loop.time()) * 1000))
            deliveries = await _fetch(self._connection, self._consumer, records_max, min(left_ms, SLICE_MS))
            before, self._positions = self._positions, await self._now()
            if deliveries or self._positions != before or left_ms == 0:
                return deliveries
            _check_alive(self._connection, self._consumer, self._since_s)

    def positions(self) -> dict[TopicPartition, int]:
        return dict(self._positions)

    def seek(self, positions: Positions) -> None:
        for tp, position in positions.items():
            self._consumer.seek(KafkaPartition(*tp), position)
        self._positions.update(positions)

    async def _now(self) -> dict[TopicPartition, int]:
        return {tp: await self._consumer.position(KafkaPartition(*tp)) for tp in self._positions}


class KafkaMember:
    def __init__(self, connection: Connection, consumer: AIOKafkaConsumer, group: str) -> None:
        self._connection = connection
        self._consumer = consumer
        self._group = group
        self._since_s = time.time()
        self._assigned: frozenset[TopicPartition] = frozenset()

    async def poll(self, *, records_max: int = 500, wait_ms: int = 1000) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_ms / 1000
        while True:
            left_ms = max(0, int((deadline_s - loop.time()) * 1000))
            try:
                async with asyncio.timeout_at(
                    max(deadline_s, loop.time() + SLICE_MS / 1000)
                ):  # not longer in a rebalance
                    deliveries = await _fetch(self._connection, self._consumer, records_max, left_ms)
            except TimeoutError:
                deliveries = []
            except NoOffsetForPartitionError:
                await self._start_at_oldest()
                continue
            self._assigned = frozenset(TopicPartition(*tp) for tp in self._consumer.assignment())
            if not deliveries:
                _check_alive(self._connection, self._consumer, self._since_s)
            return deliveries

    def assignment(self) -> frozenset[TopicPartition]:
        return self._assigned

    def seek(self, positions: Positions) -> None:
        for tp in self._ours(positions):
            self._consumer.seek(tp, positions[TopicPartition(*tp)])

    async def commit(self, positions: Positions) -> None:
        ours = {tp: positions[TopicPartition(*tp)] for tp in self._ours(positions)}
        if not ours:
            return
        try:
            async with asyncio.timeout(self._connection.retry_s):
                await self._consumer.commit(ours)
        except (CommitFailedError, RebalanceInProgressError, IllegalStateError) as error:
            _logger.info("commit left to the next owner: group=%s %s", self._group, type(error).__name__)
        except TimeoutError as error:
            raise self._connection.late(f"commit of {self._group}") from error
        except KafkaError as error:
            raise self._connection.named(f"commit of {self._group}", error) from error

    def _ours(self, positions: Iterable[TopicPartition]) -> list[KafkaPartition]:
        assigned = self._consumer.assignment()
        return [tp for tp in (KafkaPartition(*tp) for tp in positions) if tp in assigned]

    async def _start_at_oldest(self) -> None:
        """Partitions that the group never committed begin at their oldest record."""

        async def attempt() -> None:
            assigned = self._consumer.assignment()
            new = [tp for tp in assigned if await self._consumer.committed(tp) is None]
            for tp, begin in (await self._consumer.beginning_offsets(new) if new else {}).items():
                with contextlib.suppress(IllegalStateError):  # gone to another member meanwhile
                    self._consumer.seek(tp, begin)

        await self._connection.call(f"first position of {self._group}", attempt)


def consumer_of(connection: Connection, **settings: object) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        **{
            "isolation_level": "read_committed",
            "auto_offset_reset": "none",
            "enable_auto_commit": False,
            "fetch_max_wait_ms": FETCH_WAIT_MS,
            "fetch_max_bytes": FETCH_BYTES_MAX,
            **connection.settings,
            **settings,
        }
    )


@contextlib.asynccontextmanager
async def reading(connection: Connection, positions: Positions) -> AsyncIterator[KafkaReader]:
    async with running(connection, consumer_of(connection)) as consumer:
        yield KafkaReader(connection, consumer, positions)


@contextlib.asynccontextmanager
async def membership(
    connection: Connection, group: str, topics: Sequence[str], member_id: str | None
) -> AsyncIterator[KafkaMember]:
    """A joined member. Range assignment: whoever has `rollout.steps[2]` has `rewards[2]` too."""
    member = AIOKafkaConsumer(
        group_id=group,
        group_instance_id=member_id,
        partition_assignment_strategy=(RangePartitionAssignor,),
        session_timeout_ms=connection.session_ms,
        heartbeat_interval_ms=connection.session_ms // 4,
        max_poll_interval_ms=POLL_INTERVAL_MS,
        isolation_level="read_committed",
        auto_offset_reset="none",
        enable_auto_commit=False,
        fetch_max_wait_ms=FETCH_WAIT_MS,
        fetch_max_bytes=FETCH_BYTES_MAX,
        **connection.settings,
    )
    member.subscribe(topics, listener=_InRebalance(group))
    # A killed member's ghost holds a joining one up for a session.
    async with running(connection, member, wait_s=connection.session_ms / 1000) as consumer:
        yield KafkaMember(connection, consumer, group)


class _InRebalance(ConsumerRebalanceListener):  # type: ignore[misc]
    """Between giving partitions back and joining again."""

    def __init__(self, group: str) -> None:
        self._place = f"bus.rebalance/{group}"

    def on_partitions_revoked(self, revoked: object) -> None:
        failpoints.reach(self._place)

    def on_partitions_assigned(self, assigned: object) -> None:
        return


@contextlib.asynccontextmanager
async def running(
    connection: Connection, consumer: AIOKafkaConsumer, *, wait_s: float = 0.0
) -> AsyncIterator[AIOKafkaConsumer]:
    try:
        yield await connection.started(consumer, consumer.start, wait_s=wait_s)
    finally:
        await stop(consumer)


async def stop(consumer: AIOKafkaConsumer) -> None:
    """Stops `consumer`. With a broker gone, aiokafka lets out the cancellation of one of its own tasks
    half-way; and where it waits for its tasks, it keeps ours to itself.
    """
    me = asyncio.current_task()
    before = me.cancelling() if me is not None else 0
    try:
        await consumer.stop()
    except asyncio.CancelledError:
        await consumer._client.close()
    if me is not None and me.cancelling() > before:
        raise asyncio.CancelledError


async def _fetch(
    connection: Connection, consumer: AIOKafkaConsumer, records_max: int, wait_ms: int
) -> list[Delivery]:
    try:
        found = await consumer.getmany(timeout_ms=wait_ms, max_records=records_max)
    except NoOffsetForPartitionError:
        raise
    except OffsetOutOfRangeError as error:
        [(tp, offset)] = error.args[0].items()
        raise OffsetGone(
            f"{TopicPartition(*tp)}@{offset}: expected a position in the log, the log no longer holds it"
        ) from error
    except KafkaError as error:
        raise connection.named("read", error) from error
    return [_delivery(record) for records in found.values() for record in records]


def _delivery(record: "ConsumerRecord[bytes | None, bytes | None]") -> Delivery:
    return Delivery(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        record.key,
        record.value,
        tuple(record.headers),
    )


def _check_alive(connection: Connection, consumer: AIOKafkaConsumer, since_s: float) -> None:
    """Raises BusUnavailable when no partition has answered a fetch for `retry_s`: an empty topic still
    answers.
    """
    answered_s = [(consumer.last_poll_timestamp(tp) or 0) / 1000 for tp in consumer.assignment()]
    if answered_s and time.time() - max(since_s, *answered_s) > connection.retry_s:
        raise BusUnavailable(
            f"kafka:{connection.address}: read: expected an answer within {connection.retry_s:g} s, none came"
        )

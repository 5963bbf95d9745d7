"""Sending to Kafka: batches of an idempotent producer, and transactions.

Not here: how faults are named (`connection`).

Records go as one batch per partition (`create_batch`, `send_batch`): six times cheaper than one `send` each.
A producer whose call ran into its deadline is thrown away with all that it still held, so that nothing is
written after its caller was told that it failed (what a broker had already taken stays: a caller that sends
again may double it).
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiokafka import AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.client import ConnectionGroup, CoordinationType
from aiokafka.errors import (
    ConcurrentTransactions,
    IllegalOperation,
    InvalidProducerEpoch,
    KafkaError,
    ProducerFenced,
    UnknownError,
    for_code,
)
from aiokafka.producer.transaction_manager import TransactionResult
from aiokafka.protocol.transaction import EndTxnRequest

from headrace import failpoints
from headrace.bus.kafka.connection import Connection
from headrace.bus.protocol import Message, Positions, TopicPartition, check_size, partition_for
from headrace.errors import BusError, BusUnavailable

BATCH_BYTES = 1_000_000  # the broker takes 1,048,588; the first record of a batch may be larger than this
STOP_S = 2.0
RETRY_BACKOFF_MS = (
    20  # a transaction right behind another of the same id meets ConcurrentTransactions for a few ms
)

PartitionCount = Callable[[str], Awaitable[int]]


class Sender:
    """The bus's idempotent producer, started at the first batch and made anew after a failure."""

    def __init__(self, connection: Connection, partitions: PartitionCount) -> None:
        self._connection = connection
        self._partitions = partitions
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()

    async def send(self, messages: Sequence[Message]) -> list[int]:
        """Offsets of the appended messages. Raises as `Bus.produce`."""
        placed = await place(messages, self._partitions)
        producer = await self._started()
        try:
            async with asyncio.timeout(self._connection.retry_s):
                return await append(producer, messages, placed)
        except TimeoutError as error:
            await self._replace(producer)
            raise self._connection.late("produce") from error
        except KafkaError as error:
            await self._replace(producer)
            raise self._connection.named("produce", error) from error

    async def stop(self) -> None:
        if self._producer is not None:
            await stop(self._producer)

    async def _started(self) -> AIOKafkaProducer:
        async with self._starting:
            if self._producer is None:
                self._producer = await start(self._connection)
            return self._producer

    async def _replace(self, failed: AIOKafkaProducer) -> None:
        if self._producer is failed:
            self._producer = None
            await abandon(failed)


class KafkaTransactor:
    """One producer under one transactional id. After any failure but a refused message: start anew."""

    def __init__(
        self,
        connection: Connection,
        partitions: PartitionCount,
        producer: AIOKafkaProducer,
        transactional_id: str,
    ) -> None:
        self._connection = connection
        self._partitions = partitions
        self._producer = producer
        self._id = transactional_id
        self._one_at_a_time = (
            asyncio.Lock()
        )  # aiokafka fails with KeyError on overlapping offset commits (#1098)
        self.broken: BusError | None = None

    async def commit(
        self, messages: Sequence[Message], *, group: str | None = None, positions: Positions | None = None
    ) -> list[int]:
        async with self._one_at_a_time:
            if self.broken is not None:
                raise self.broken
            placed = await place(messages, self._partitions)
            self.broken = BusUnavailable(
                f"{self._id}: the outcome of the last transaction is unknown: start anew"
            )
            try:
                async with asyncio.timeout(self._connection.retry_s):
                    offsets = await self._transaction(messages, placed, group, positions or {})
            except TimeoutError as error:
                raise self._connection.late(f"transaction of {self._id}") from error
            except KafkaError as error:
                self.broken = self._connection.named(f"transaction of {self._id}", error)
                raise self.broken from error
            except IllegalOperation as error:
                if (reason := self._died_of()) is not None:
                    self.broken = self._connection.named(f"transaction of {self._id}", reason)
                raise self.broken from error
            self.broken = None
            return offsets

    async def _transaction(
        self,
        messages: Sequence[Message],
        placed: Mapping[TopicPartition, list[int]],
        group: str | None,
        positions: Positions,
    ) -> list[int]:
        await self._producer.begin_transaction()
        try:
            sending = append(self._producer, messages, placed)
            if group is not None and positions:
                offsets, _ = await asyncio.gather(sending, self._send_positions(group, positions))
            else:
                offsets = await sending
        except BaseException:
            _hear(self._producer)
            # An open transaction holds back every reader of its partitions until it times out.
            with contextlib.suppress(KafkaError, IllegalOperation, AssertionError, TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._producer.abort_transaction()
            raise
        failpoints.reach(f"bus.in_transaction/{self._id}")
        try:
            await self._producer.commit_transaction()
        except KafkaError as error:
            if not isinstance(error.__cause__, UnknownError):
                raise
            if await self._overtaken():
                raise ProducerFenced from error
            raise BusUnavailable(
                f"{self._id}: the last transaction ended without an answer: start anew"
            ) from error
        return offsets

    async def _overtaken(self) -> bool:
        """Asks for the same end again, after an answer that says nothing.

        A broker that has begun to fence, and not yet counted up the epoch, fails with an error it has no name
        for (Kafka 4.3: an IllegalStateException in `TransactionMetadata.prepareTransitionTo`). A moment later
        it says whether a newer holder has the id.
        """
        sender, transaction = self._producer._sender, self._producer._txn_manager
        end = EndTxnRequest(
            transactional_id=self._id,
            producer_id=transaction.producer_id,
            producer_epoch=transaction.producer_epoch,
            transaction_result=TransactionResult.COMMIT,
        )
        found = UnknownError
        while found in (UnknownError, ConcurrentTransactions):
            await asyncio.sleep(RETRY_BACKOFF_MS / 1000)
            node = sender._coordinators[CoordinationType.TRANSACTION]
            answer = await self._producer.client.send(node, end, group=ConnectionGroup.COORDINATION)
            found = for_code(answer.error_code)
        return found is InvalidProducerEpoch

    def _died_of(self) -> KafkaError | None:
        """What aiokafka's sending task ended with, where it has: fenced, the next call of this transaction
        first meets a producer without one, which is no answer."""
        sender = self._producer._sender.sender_task
        if sender is None or not sender.done() or sender.cancelled():
            return None
        error = sender.exception()
        return error if isinstance(error, KafkaError) else None

    async def _send_positions(self, group: str, positions: Positions) -> None:
        offsets = {KafkaPartition(*tp): position for tp, position in positions.items()}
        await self._producer.send_offsets_to_transaction(offsets, group)


async def place(messages: Sequence[Message], partitions: PartitionCount) -> dict[TopicPartition, list[int]]:
    """Indices of `messages` by the partition they go to. Raises RecordTooLarge, TopicMismatch: before
    anything is sent.
    """
    counts = {topic: await partitions(topic) for topic in {message.topic for message in messages}}
    placed: dict[TopicPartition, list[int]] = defaultdict(list)
    for index, message in enumerate(messages):
        check_size(message)
        placed[TopicPartition(message.topic, partition_for(message, counts[message.topic]))].append(index)
    return placed


async def append(
    producer: AIOKafkaProducer, messages: Sequence[Message], placed: Mapping[TopicPartition, list[int]]
) -> list[int]:
    """Sends and waits for the broker; offsets in the order of `messages`."""
    batches: list[tuple[Awaitable[object], list[int]]] = []
    for tp, indices in placed.items():
        rest = indices
        while rest:
            batch = producer.create_batch()
            count = 0
            for index in rest:
                message = messages[index]
                if (
                    batch.append(
                        timestamp=None, key=message.key, value=message.value, headers=list(message.headers)
                    )
                    is None
                ):
                    break
                count += 1
            future = await producer.send_batch(batch, tp.topic, partition=tp.partition)
            batches.append((future, rest[:count]))
            rest = rest[count:]
    offsets = [0] * len(messages)
    written = await asyncio.gather(*(future for future, _ in batches))
    for metadata, (_, indices) in zip(written, batches, strict=True):
        for offset, index in enumerate(indices, start=metadata.offset):  # type: ignore[attr-defined]
            offsets[index] = offset
    return offsets


async def start(connection: Connection, transactional_id: str | None = None) -> AIOKafkaProducer:
    """A started producer; with an id, every earlier holder of it is fenced. Raises BusUnavailable."""
    producer = AIOKafkaProducer(
        **connection.settings,
        acks="all",
        enable_idempotence=True,
        transactional_id=transactional_id,
        transaction_timeout_ms=int(2 * connection.retry_s * 1000),
        max_batch_size=BATCH_BYTES,
        retry_backoff_ms=RETRY_BACKOFF_MS,
    )
    try:
        return await connection.started(producer, producer.start)
    except BaseException:
        await abandon(producer)
        raise


async def stop(producer: AIOKafkaProducer) -> None:
    try:
        async with asyncio.timeout(STOP_S):  # `wait_for` of Python 3.11 can lose our cancellation
            await producer.stop()
    except (TimeoutError, KafkaError):
        await abandon(producer)
    except asyncio.CancelledError:
        await abandon(producer)
        raise
    _hear(producer)


async def abandon(producer: AIOKafkaProducer) -> None:
    """Stops `producer` without waiting for what it still holds. aiokafka has no public way to do it."""
    producer._closed = True
    sender = producer._sender.sender_task
    try:
        if sender is not None:
            sender.cancel()
            await asyncio.wait({sender}, timeout=STOP_S)
    finally:
        await producer.client.close()
    _hear(producer)


def _hear(producer: AIOKafkaProducer) -> None:
    """What its sender and its transaction ended with is told by the call that failed; unheard, asyncio would
    log it once more, as an error that nobody handles."""
    transaction = producer._txn_manager and producer._txn_manager._transaction_waiter
    for future in (producer._sender.sender_task, transaction):
        if future is not None and future.done() and not future.cancelled():
            future.exception()

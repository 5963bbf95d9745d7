"""What a transaction says when aiokafka's producer ends in the middle of it; played by a double."""

import asyncio
from collections.abc import Awaitable, Sequence
from types import SimpleNamespace

import pytest
from aiokafka.client import ConnectionGroup, CoordinationType
from aiokafka.errors import (
    ConcurrentTransactions,
    IllegalOperation,
    InvalidProducerEpoch,
    InvalidTxnState,
    KafkaError,
    NoError,
    NotCoordinatorForGroupError,
    ProducerFenced,
    UnknownError,
)
from aiokafka.protocol.transaction import EndTxnRequest

from headrace.bus.kafka.connection import Connection
from headrace.bus.kafka.sending import KafkaTransactor
from headrace.bus.protocol import Message, TopicPartition
from headrace.errors import BusError, BusUnavailable, Fenced


class Ending:
    """A producer whose sender may have died; what is sent meets it without a transaction."""

    _txn_manager: SimpleNamespace | None = None

    def __init__(self, died_of: KafkaError | None) -> None:
        self._sender = SimpleNamespace(sender_task=asyncio.get_running_loop().create_future())
        if died_of is not None:
            self._sender.sender_task.set_exception(died_of)

    async def begin_transaction(self) -> None:
        pass

    def create_batch(self) -> "Ending":
        return self

    def append(self, **_: object) -> bool:
        return True

    async def send_batch(self, *_: object, **__: object) -> Awaitable[object]:
        raise IllegalOperation("Can't send messages while not in transaction")

    async def send_offsets_to_transaction(self, *_: object) -> None:
        pass

    async def abort_transaction(self) -> None:
        raise AssertionError("no way from FATAL_ERROR to ABORTING_TRANSACTION")


class Unsure(Ending):
    """The broker answers the end of its transaction with an error that says nothing, and then `answers`."""

    def __init__(self, answers: Sequence[int]) -> None:
        super().__init__(None)
        self._sender._coordinators = {CoordinationType.TRANSACTION: 0}
        self._txn_manager = SimpleNamespace(producer_id=7, producer_epoch=3)
        self._answers = iter(answers)
        self.client = self
        self.asked: list[tuple[str, int, int, bool]] = []

    async def send_batch(self, *_: object, **__: object) -> Awaitable[object]:
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        done.set_result(SimpleNamespace(offset=0))
        return done

    async def commit_transaction(self) -> None:
        raise KafkaError("Unexpected error during batch delivery") from UnknownError("?")

    async def send(self, node: int, end: EndTxnRequest, *, group: ConnectionGroup) -> SimpleNamespace:
        assert (node, group) == (0, ConnectionGroup.COORDINATION)
        self.asked.append(
            (end._transactional_id, end._producer_id, end._producer_epoch, end._transaction_result)
        )
        return SimpleNamespace(error_code=next(self._answers))


async def commits(producer: Ending, expected: type[BusError]) -> None:
    """One transaction fails as expected, and so does every later one."""

    async def partitions(topic: str) -> int:
        return 1

    transactor = KafkaTransactor(Connection("localhost:1", {}, session_ms=1000), partitions, producer, "id")
    for _ in range(2):
        with pytest.raises(BusError) as told:
            await transactor.commit(
                [Message("t", b"k", b"v")], group="g", positions={TopicPartition("t", 0): 1}
            )
        assert type(told.value) is expected


@pytest.mark.parametrize(
    ("died_of", "expected"), [(ProducerFenced(), Fenced), (UnknownError(), BusError), (None, BusUnavailable)]
)
def test_the_cause_is_told_and_not_what_follows(died_of: KafkaError | None, expected: type[BusError]) -> None:
    """Fenced is said to be fenced, though a call of the transaction meets a producer without one; where
    nothing else is known, the outcome is unknown. Either way it commits nothing more."""

    async def act() -> None:
        await commits(Ending(died_of), expected)

    asyncio.run(act())


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([InvalidProducerEpoch.errno], Fenced),
        ([UnknownError.errno, ConcurrentTransactions.errno, InvalidProducerEpoch.errno], Fenced),
        ([NoError.errno], BusUnavailable),
        ([InvalidTxnState.errno], BusUnavailable),
    ],
)
def test_an_end_without_a_clear_answer_is_asked_again(answers: list[int], expected: type[BusError]) -> None:
    """In the middle of being fenced a broker knows no name for what went wrong. The very same end, asked
    again, tells it of a newer holder; any other process starts anew."""

    async def act() -> None:
        producer = Unsure(answers)
        await commits(producer, expected)
        assert producer.asked == [("id", 7, 3, True)] * len(answers)

    asyncio.run(act())


def test_the_reason_of_a_dead_sender_is_told() -> None:
    """aiokafka's sending task dies with a plain KafkaError; what it died of decides if trying again helps."""
    connection = Connection("localhost:1", {}, session_ms=1000)
    for cause, expected in (
        (NotCoordinatorForGroupError("moved"), BusUnavailable),
        (ProducerFenced(), Fenced),
        (UnknownError("?"), BusError),
        (None, BusError),
    ):
        error = KafkaError("Unexpected error during batch delivery")
        error.__cause__ = cause
        named = connection.named("transaction of id", error)
        assert type(named) is expected
        assert str(cause or error) in str(named) or expected is Fenced

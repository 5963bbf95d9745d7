"""What a transaction says when aiokafka's producer ends in the middle of it; played by a double."""

import asyncio

import pytest
from aiokafka.errors import (
    IllegalOperation,
    KafkaError,
    NotCoordinatorForGroupError,
    ProducerFenced,
    UnknownError,
)

from headrace.bus.kafka.connection import Connection
from headrace.bus.kafka.sending import KafkaTransactor
from headrace.bus.protocol import Message, TopicPartition
from headrace.errors import BusError, BusUnavailable, Fenced


class Ending:
    """Its sender has ended, by what `send_offsets_to_transaction` is told a moment later."""

    def __init__(self, told: KafkaError | None) -> None:
        self.told = told

    async def begin_transaction(self) -> None:
        pass

    def create_batch(self) -> "Ending":
        return self

    def append(self, **_: object) -> bool:
        return True

    async def send_batch(self, *_: object, **__: object) -> None:
        raise IllegalOperation("Can't send messages while not in transaction")

    async def send_offsets_to_transaction(self, *_: object) -> None:
        await asyncio.sleep(0.01)
        if self.told:
            raise self.told

    async def abort_transaction(self) -> None:
        raise AssertionError("no way from FATAL_ERROR to ABORTING_TRANSACTION")


@pytest.mark.parametrize(("told", "expected"), [(ProducerFenced(), Fenced), (None, BusUnavailable)])
def test_the_cause_is_told_and_not_what_follows(told: KafkaError | None, expected: type[BusError]) -> None:
    """Fenced is said to be fenced, though the other call of the transaction fails first, on a producer
    without one; where nothing else is known, the outcome is unknown. Either way it commits nothing more."""

    async def partitions(topic: str) -> int:
        return 1

    async def act() -> None:
        connection = Connection("localhost:1", {}, session_ms=1000)
        transactor = KafkaTransactor(connection, partitions, Ending(told), "id")
        for _ in range(2):
            with pytest.raises(expected):
                await transactor.commit(
                    [Message("t", b"k", b"v")], group="g", positions={TopicPartition("t", 0): 1}
                )

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

"""The bus on Kafka when the broker is killed, absent, or holds an open transaction; and the local broker
itself.
"""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from contract import DEADLINE_S, poll_until, read_all, values

from headrace.bus import local_kafka, open_bus
from headrace.bus.kafka import KafkaBus
from headrace.bus.protocol import Delivery, Message, TopicPartition
from headrace.errors import BusError, BusUnavailable, ConfigError
from headrace.wire.topics import FOR_EVER, Topic

ONE = Topic("one", (), "k", 1, FOR_EVER)
TP = TopicPartition("one", 0)
needs_broker = pytest.mark.kafka


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory, kafka: str) -> Iterator[Path]:
    """The directory of a broker of our own, to be killed."""
    if lack := local_kafka.missing():
        pytest.skip(f"no local broker: {lack}")
    directory = tmp_path_factory.mktemp("mortal")
    local_kafka.up(directory)
    yield directory
    local_kafka.down(directory)


def v(i: int) -> Message:
    return Message("one", b"k", b"%d" % i)


@needs_broker
def test_broker_killed_under_everything(mortal: Path) -> None:
    """Producer, transactor, reader and group member ride over kill -9 and restart of the broker: nothing
    acknowledged is lost or doubled, order holds, committed positions stand.
    """

    async def run() -> None:
        async with KafkaBus(local_kafka.status(mortal).address, session_ms=6000) as bus:
            await bus.create_topics([ONE])
            async with (
                bus.reader({TP: 0}) as reader,
                bus.transactor("x") as transactor,
                bus.member("g", ["one"]) as m,
            ):
                await bus.produce([v(i) for i in range(10)])
                await transactor.commit([v(10)], group="other", positions={TP: 5})
                assert len(await poll_until(m, 11)) == 11
                await m.commit({TP: 11})
                await asyncio.to_thread(local_kafka.down, mortal, kill=True)
                producing = asyncio.create_task(bus.produce([v(11)]))
                committing = asyncio.create_task(transactor.commit([v(12)], group="other", positions={TP: 6}))
                await asyncio.to_thread(local_kafka.up, mortal)
                await asyncio.gather(producing, committing)
                await bus.produce([v(13)])
                found = sorted(int(d.value or b"") for d in await read_all(bus, "one"))
                assert found == list(range(14))
                mine: list[Delivery] = []
                async with asyncio.timeout(30):
                    while len(mine) < 14:
                        mine += await reader.read()
                assert sorted(int(d.value or b"") for d in mine) == list(range(14))
                rest = await poll_until(m, 3)
                assert sorted(int(d.value or b"") for d in rest)[-3:] == [11, 12, 13]
                await m.commit({TP: rest[-1].offset + 1})
                assert await bus.committed("g", ["one"]) == {TP: rest[-1].offset + 1}
            async with bus.transactor("x"):
                assert await bus.committed("other", ["one"]) == {TP: 6}

    asyncio.run(run())


@needs_broker
def test_broker_that_stays_away(mortal: Path) -> None:
    """Within the deadline: BusUnavailable from produce, transaction, poll and questions. What failed is not
    written later.
    """

    async def run() -> None:
        address = local_kafka.status(mortal).address
        async with KafkaBus(address) as bus:
            usual_s = bus._connection.retry_s
            await bus.create_topics([ONE])
            before = values(await read_all(bus, "one"))
            async with bus.transactor("y") as transactor, bus.reader(await bus.ends(["one"])) as reader:
                await bus.produce([v(100)])
                await transactor.commit([v(101)])
                await bus.ends(["one"])  # its markers are written: see docs/bus.md on a broker killed before
                bus._connection.retry_s = 4.0  # not before: a busy machine must not look like a broker away
                await asyncio.to_thread(local_kafka.down, mortal, kill=True)
                outcomes = await asyncio.gather(
                    bus.produce([v(102)]),
                    transactor.commit([v(103)]),
                    bus.ends(["one"]),
                    return_exceptions=True,
                )
                for outcome in outcomes:
                    assert isinstance(outcome, BusUnavailable), outcome
                    assert address in str(outcome)
                with pytest.raises(BusUnavailable, match="start anew"):
                    await transactor.commit([v(104)])
                with pytest.raises(BusUnavailable, match="read: expected an answer within 4 s"):
                    while True:
                        await reader.read(wait_ms=5000)
            await asyncio.to_thread(local_kafka.up, mortal)
            bus._connection.retry_s = usual_s
            async with bus.transactor("y"):  # settles whatever the dead one left
                await bus.produce([v(105)])
            assert values(await read_all(bus, "one")) == [*before, b"100", b"101", b"105"]

    asyncio.run(run())


@needs_broker
def test_readers_see_neither_open_nor_aborted_transactions(kafka: str) -> None:
    """Records of an open transaction are held back, and with them what follows; aborted ones never come;
    positions pass both.
    """
    topic = Topic(f"tx-{os.urandom(4).hex()}", (), "k", 1, FOR_EVER)
    tp = TopicPartition(topic.name, 0)

    async def run() -> None:
        async with KafkaBus(kafka) as bus:
            await bus.create_topics([topic])
            producer = AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=f"raw-{topic.name}")
            await producer.start()
            async with bus.reader({tp: 0}) as reader:
                await producer.begin_transaction()
                await producer.send_and_wait(topic.name, b"open", b"k")
                await bus.produce([Message(topic.name, b"k", b"behind")])
                assert await reader.read(wait_ms=500) == []
                assert await bus.ends([topic.name]) == {tp: 0}
                assert [d async for d in bus.read_range(tp, 0, 10)] == []
                await producer.abort_transaction()
                found: list[Delivery] = []
                while reader.positions() != await bus.ends([topic.name]):
                    found += await reader.read()
                assert values(found) == [b"behind"]
            await producer.stop()

    asyncio.run(run())


@needs_broker
def test_transaction_that_the_broker_refuses_is_aborted(kafka: str) -> None:
    """A record is over the limit of a topic made elsewhere: BusError, and nothing holds readers back."""
    topic = f"small-{os.urandom(4).hex()}"

    def message(value: bytes, partition: int = 1) -> Message:
        return Message(topic, b"k", value, partition=partition)

    async def run() -> None:
        limit = {"max.message.bytes": "1000"}
        operator = AIOKafkaAdminClient(bootstrap_servers=kafka)
        await operator.start()
        await operator.create_topics([NewTopic(topic, 2, 1, topic_configs=limit)])
        await operator.close()
        async with KafkaBus(kafka) as bus, bus.transactor(f"x-{topic}") as transactor:
            positions = {TopicPartition(topic, 0): 5}
            for _ in range(2):  # the second time because the transactor must be started anew
                with pytest.raises(BusError, match="MessageSizeTooLarge"):
                    await transactor.commit(
                        [message(b"fits"), message(bytes(5000), partition=0)], group="g", positions=positions
                    )
            await bus.produce([message(b"behind")])
            assert values(await read_all(bus, topic)) == [b"behind"]
            assert await bus.committed("g", [topic]) == {}

    asyncio.run(run())


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "is silent"])
def test_absent_broker_is_named_within_ten_seconds(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens: at once. Something listens and never answers: at the deadline. The message names the
    address.
    """
    connect_s, told = (1.0, "within 1 s, none answered") if silent else (2 * DEADLINE_S, "got ")
    monkeypatch.setattr("headrace.bus.kafka.connection.CONNECT_S", connect_s)

    async def run() -> None:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            if silent:
                listener.listen()
            address = f"localhost:{listener.getsockname()[1]}"
            with pytest.raises(BusUnavailable, match=f"kafka:{address}: expected a broker,? {told}"):
                async with asyncio.timeout(DEADLINE_S), open_bus(f"kafka:{address}"):
                    pass

    asyncio.run(run())


def test_unknown_security_setting_is_refused() -> None:
    """A misspelt setting names the nearest one; TLS settings become a context."""
    with pytest.raises(ConfigError, match="did you mean 'sasl_mechanism'"):
        KafkaBus("localhost:1", security={"sasl_mecanism": "PLAIN"})
    bus = KafkaBus(
        "localhost:1",
        security={
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_plain_username": "u",
        },
    )
    assert bus._connection.settings["ssl_context"] is not None
    assert bus._connection.settings["sasl_plain_username"] == "u"


@needs_broker
def test_local_broker_is_one(tmp_path: Path, mortal: Path) -> None:
    """`up` of a running broker gives its address, `down` twice is harmless, a stopped one keeps it."""
    end_s = time.monotonic() + DEADLINE_S
    while not (status := local_kafka.status(mortal)).running:  # `up` gives it a second for an answer
        assert time.monotonic() < end_s, status
        time.sleep(0.1)
    assert local_kafka.up(mortal) == status.address
    assert local_kafka.status(tmp_path) == local_kafka.Status(running=False, address="", pid=None)
    local_kafka.down(mortal)
    local_kafka.down(mortal)
    assert local_kafka.status(mortal) == local_kafka.Status(running=False, address=status.address, pid=None)

"""Records and transactions a second of both buses, beside bare aiokafka on the same broker in the same run.

Records of 300 random bytes with seven headers as `wire.codec` writes them, keys shared by eight records, four
partitions, batches of 500. Rounds of bare and wrapped take turns and the median counts, so that a busy
machine slows both. Bare aiokafka is used as well as its interface allows: an idempotent producer, one
`send_batch` per partition, the keys hashed by its own partitioner.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.partitioner import murmur2

from benchmarks.page import header, table
from headrace.bus import local_kafka, open_bus
from headrace.bus.protocol import Bus, Message, TopicPartition
from headrace.wire.topics import FOR_EVER, Topic

BATCH, BATCHES, TRANSACTIONS, ROUNDS, PARTITIONS = 500, 60, 60, 5, 4
HEADERS = (
    ("ce_specversion", b"1.0"),
    ("ce_id", b"0123456789abcdef0123456789abcdef"),
    ("ce_type", b"headrace.RolloutStep.v1"),
    ("ce_source", b"worker-1"),
    ("ce_time", b"1790000000000"),
    ("content-type", b"application/msgpack"),
    ("traceparent", b"00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"),
)


def batches(topic: str) -> list[list[Message]]:
    return [
        [Message(topic, f"group-{number}-{i // 8}".encode(), os.urandom(300), HEADERS) for i in range(BATCH)]
        for number in range(BATCHES)
    ]


def new_topic() -> Topic:
    return Topic(f"bench-{uuid.uuid4().hex[:8]}", (), "k", PARTITIONS, FOR_EVER)


async def timed(count: int, work: Awaitable[object]) -> float:
    started_s = time.perf_counter()
    await work
    return count / (time.perf_counter() - started_s)


class Wrapped:
    """The rates of one of our buses."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.topic = new_topic()

    async def produce(self) -> float:
        self.topic = new_topic()
        await self.bus.create_topics([self.topic])
        work = batches(self.topic.name)
        await self.bus.produce(work[0][:1])  # the topic is known to the client before the clock starts

        async def run() -> None:
            for batch in work:
                await self.bus.produce(batch)

        return await timed(BATCH * BATCHES, run())

    async def consume(self) -> float:
        """Of what the last `produce` wrote."""
        async with self.bus.reader(await self.bus.begins([self.topic.name])) as reader:

            async def run() -> None:
                count = 0
                while count < BATCH * BATCHES:
                    count += len(await reader.read(records_max=BATCH))

            return await timed(BATCH * BATCHES, run())

    async def transact(self) -> float:
        async with self.bus.transactor(f"id-{uuid.uuid4().hex}") as transactor:
            tp = TopicPartition(self.topic.name, 0)

            async def run() -> None:
                for i in range(TRANSACTIONS):
                    await transactor.commit([Message(tp.topic, b"k", b"v")], group="bench", positions={tp: i})

            return await timed(TRANSACTIONS, run())


class Bare:
    """The rates of aiokafka alone."""

    def __init__(self, address: str, bus: Bus) -> None:
        self.address = address
        self.bus = bus
        self.topic = new_topic()

    async def produce(self) -> float:
        self.topic = new_topic()
        await self.bus.create_topics([self.topic])
        work = batches(self.topic.name)
        producer = AIOKafkaProducer(
            bootstrap_servers=self.address, acks="all", enable_idempotence=True, max_batch_size=1_000_000
        )
        await producer.start()
        await producer.send_and_wait(self.topic.name, b"v", b"k")

        async def run() -> None:
            for batch in work:
                placed: dict[int, list[Message]] = defaultdict(list)
                for message in batch:
                    placed[(murmur2(message.key) & 0x7FFFFFFF) % PARTITIONS].append(message)
                futures = []
                for partition, messages in placed.items():
                    builder = producer.create_batch()
                    for m in messages:
                        builder.append(timestamp=None, key=m.key, value=m.value, headers=list(m.headers))
                    futures.append(await producer.send_batch(builder, self.topic.name, partition=partition))
                await asyncio.gather(*futures)

        rate = await timed(BATCH * BATCHES, run())
        await producer.stop()
        return rate

    async def send(self) -> float:
        """The usual way: one `send` a record, awaited by the batch."""
        producer = AIOKafkaProducer(
            bootstrap_servers=self.address, acks="all", enable_idempotence=True, max_batch_size=1_000_000
        )
        await producer.start()
        work = batches(self.topic.name)[:20]

        async def run() -> None:
            for batch in work:
                await asyncio.gather(
                    *[await producer.send(m.topic, m.value, m.key, headers=list(m.headers)) for m in batch]
                )

        rate = await timed(BATCH * len(work), run())
        await producer.stop()
        return rate

    async def consume(self) -> float:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.address, enable_auto_commit=False, isolation_level="read_committed"
        )
        await consumer.start()
        partitions = [KafkaPartition(self.topic.name, p) for p in range(PARTITIONS)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning(*partitions)

        async def run() -> None:
            count = 0
            while count < BATCH * BATCHES:
                found = await consumer.getmany(timeout_ms=1000, max_records=BATCH)
                count += sum(map(len, found.values()))

        rate = await timed(BATCH * BATCHES, run())
        await consumer.stop()
        return rate

    async def transact(self) -> float:
        producer = AIOKafkaProducer(
            bootstrap_servers=self.address,
            transactional_id=f"id-{uuid.uuid4().hex}",
            max_batch_size=1_000_000,
        )
        await producer.start()
        tp = KafkaPartition(self.topic.name, 0)

        async def run() -> None:
            for i in range(TRANSACTIONS):
                await producer.begin_transaction()
                await producer.send_and_wait(self.topic.name, b"v", b"k")
                await producer.send_offsets_to_transaction({tp: i}, "bench")
                await producer.commit_transaction()

        rate = await timed(TRANSACTIONS, run())
        await producer.stop()
        return rate


async def latency_ms(address: str) -> tuple[float, float]:
    """Median and 99th percentile from before `produce` to after `read`, two buses apart, one record at a
    time.
    """
    topic = new_topic()
    tp = TopicPartition(topic.name, 0)
    async with open_bus(address) as writer, open_bus(address) as other:
        await writer.create_topics([topic])
        waits = []
        async with other.reader({tp: 0}) as reader:
            for i in range(300):
                await asyncio.sleep(0.01)
                started_s = time.perf_counter()
                await writer.produce([Message(topic.name, b"k", b"v", partition=0)])
                while reader.positions()[tp] <= i:
                    await reader.read()
                waits.append((time.perf_counter() - started_s) * 1000)
    return statistics.median(waits), statistics.quantiles(waits, n=100)[98]


async def idle_share(address: str) -> float:
    """Share of a core that a reader takes while nothing happens."""
    topic = new_topic()
    async with open_bus(address) as bus:
        await bus.create_topics([topic])
        async with bus.reader(await bus.ends([topic.name])) as reader:
            used_s = time.process_time()
            await reader.read(wait_ms=5000)
            return (time.process_time() - used_s) / 5


async def run(kafka: str, directory: Path) -> None:
    embedded_address = f"sqlite:{directory}/log.db"
    async with open_bus(embedded_address) as embedded, open_bus(f"kafka:{kafka}") as broker:
        ours, theirs, here = Wrapped(broker), Bare(kafka, broker), Wrapped(embedded)
        rows: list[tuple[str, ...]] = []
        for name, unit in (
            ("produce", "records/s"),
            ("consume", "records/s"),
            ("transact", "transactions/s"),
        ):
            rates: dict[object, list[float]] = {ours: [], theirs: [], here: []}
            for _ in range(ROUNDS):
                for side, found in rates.items():
                    found.append(await getattr(side, name)())
            medians = {side: statistics.median(found) for side, found in rates.items()}
            rows.append(
                (
                    f"{name}, {unit}",
                    f"{medians[here]:,.0f}",
                    f"{medians[ours]:,.0f}",
                    f"{medians[theirs]:,.0f}",
                    f"{medians[ours] / medians[theirs]:.2f}",
                )
            )
        sends = statistics.median([await theirs.send() for _ in range(ROUNDS)])
        rows.append(("produce by single `send`s, records/s", "", "", f"{sends:,.0f}", ""))
    latencies = [await latency_ms(address) for address in (embedded_address, f"kafka:{kafka}")]
    for index, name in enumerate(("p50", "p99")):
        rows.append((f"append to read {name}, ms", *(f"{found[index]:.1f}" for found in latencies), "", ""))
    idle = [await idle_share(address) for address in (embedded_address, f"kafka:{kafka}")]
    rows.append(("core taken by an idle reader", *(f"{share:.1%}" for share in idle), "", ""))
    print(table(("", "bus.sqlite", "bus.kafka", "bare aiokafka", "kafka / bare"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kafka", help="host:port of a broker; without it one is started")
    arguments = parser.parse_args()
    print(header("Bus", "aiokafka"))
    with tempfile.TemporaryDirectory() as directory:
        address = arguments.kafka or local_kafka.up(Path(directory) / "kafka")
        try:
            asyncio.run(run(address, Path(directory)))
        finally:
            if not arguments.kafka:
                local_kafka.down(Path(directory) / "kafka")


if __name__ == "__main__":
    main()

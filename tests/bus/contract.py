"""What every bus must do, written once: `test_sqlite.py` and `test_kafka.py` inherit it.

A subclass says where its log is (`address`) and how an operator shortens or re-creates a topic there.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest
from bus_child import child

from headrace.bus import open_bus
from headrace.bus.protocol import (
    HEAD_BYTES_MAX,
    Bus,
    Delivery,
    GroupMember,
    Message,
    Reader,
    TopicPartition,
    partition_of,
)
from headrace.errors import Fenced, OffsetGone, RecordTooLarge, TopicMismatch
from headrace.wire.topics import DAY_MS, FOR_EVER, RECORD_BYTES_MAX, Topic

DEADLINE_S = 60.0
LONG_MS = 120_000
"""A wait that ends by itself only after DEADLINE_S: what ends before it was woken."""


async def read_all(bus: Bus, topic: str) -> list[Delivery]:
    """Everything committed so far, by partition."""
    ends = await bus.ends([topic])
    async with bus.reader(await bus.begins([topic])) as reader:
        return await read_until(reader, ends)


async def read_until(reader: Reader, ends: dict[TopicPartition, int]) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(DEADLINE_S):
        while any(position < ends[tp] for tp, position in reader.positions().items()):
            found += await reader.read(wait_ms=5000)
    return sorted(found, key=lambda d: (d.partition, d.offset))


async def poll_until(member: GroupMember, count: int) -> list[Delivery]:
    """At least `count` deliveries."""
    found: list[Delivery] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            found += await member.poll(wait_ms=500)
    return found


def values(deliveries: Sequence[Delivery]) -> list[bytes | None]:
    return [delivery.value for delivery in deliveries]


class BusContract:
    SESSION_MS = 2000

    @pytest.fixture
    def address(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def topic(self) -> Topic:
        return Topic(f"t-{uuid.uuid4().hex[:8]}", (), "k", 4, FOR_EVER)

    @pytest.fixture
    def one(self) -> Topic:
        """A topic of one partition."""
        return Topic(f"o-{uuid.uuid4().hex[:8]}", (), "k", 1, FOR_EVER)

    async def shorten(self, address: str, topic: Topic, before: int) -> None:
        """Deletes what is before offset `before` in partition 0, as retention does."""
        raise NotImplementedError

    async def recreate(self, address: str, topic: Topic) -> None:
        raise NotImplementedError

    async def freeze(self, address: str, process: asyncio.subprocess.Process) -> None:
        """SIGSTOP, at a point where `process` holds nothing that the others need."""
        process.send_signal(signal.SIGSTOP)

    @contextlib.asynccontextmanager
    async def opened(self, address: str, *topics: Topic, session_ms: int | None = None) -> AsyncIterator[Bus]:
        async with open_bus(address, session_ms=session_ms or self.SESSION_MS) as bus:
            await bus.create_topics(topics)
            yield bus

    # Appending and reading

    def test_batch_comes_back_as_sent(self, address: str, topic: Topic) -> None:
        """Keys, values, tombstones, empty values and headers come back as sent, in the order of each
        partition.
        """
        sent = [
            Message(topic.name, b"a", b"1", (("h", b"x"), ("h", b"y"), ("empty", b""))),
            Message(topic.name, b"b", None),
            Message(topic.name, b"a", b""),
            Message(topic.name, b"\x00\xff", os.urandom(5000)),
            Message(topic.name, None, b"no key", partition=3),
            Message(topic.name, b"a", b"forced", partition=0),
        ]

        async def run() -> None:
            async with self.opened(address, topic) as bus:
                before_ms = time.time_ns() // 1_000_000
                offsets = await bus.produce(sent)
                found = {(d.partition, d.offset): d for d in await read_all(bus, topic.name)}
                assert len(found) == len(sent)
                for message, offset in zip(sent, offsets, strict=True):
                    partition = message.partition
                    if partition is None:
                        partition = partition_of(message.key or b"", 4)
                    delivery = found[partition, offset]
                    assert (delivery.key, delivery.value) == (message.key, message.value)
                    assert delivery.headers == message.headers
                    assert before_ms - 1000 <= delivery.timestamp_ms <= time.time_ns() // 1_000_000 + 1000
                assert offsets[2] > offsets[0]

        asyncio.run(run())

    def test_order_and_partition_of_keys(self, address: str, topic: Topic) -> None:
        """Batches of several callers at once: each key's records lie in its partition, in the order of their
        caller.
        """

        async def run() -> None:
            async with self.opened(address, topic) as bus:

                async def caller(name: str) -> None:
                    for first in range(0, 200, 20):
                        await bus.produce(
                            [Message(topic.name, name.encode(), b"%d" % i) for i in range(first, first + 20)]
                        )

                await asyncio.gather(*(caller(f"key-{c}") for c in range(5)))
                found = await read_all(bus, topic.name)
                for c in range(5):
                    key = f"key-{c}".encode()
                    mine = [d for d in found if d.key == key]
                    assert values(mine) == [b"%d" % i for i in range(200)]
                    assert {d.partition for d in mine} == {partition_of(key, 4)}

        asyncio.run(run())

    def test_limits(self, address: str, one: Topic) -> None:
        """The largest record passes; a byte more in the value, or in key and headers, is refused with its
        whole batch.
        """
        largest = Message(
            one.name, b"k" * 1000, os.urandom(RECORD_BYTES_MAX), (("h", b"x" * (HEAD_BYTES_MAX - 1001)),)
        )
        too_long = Message(one.name, b"k", b"x" * (RECORD_BYTES_MAX + 1))
        top_heavy = Message(one.name, b"k" * 1000, b"", (("h", b"x" * (HEAD_BYTES_MAX - 1000)),))

        async def run() -> None:
            async with self.opened(address, one) as bus:
                await bus.produce([largest, largest])
                for refused in (too_long, top_heavy):
                    with pytest.raises(RecordTooLarge, match=one.name):
                        await bus.produce([Message(one.name, b"k", b"small"), refused])
                assert values(await read_all(bus, one.name)) == [largest.value] * 2

        asyncio.run(run())

    def test_refuses_what_has_no_place(self, address: str, topic: Topic) -> None:
        """No such topic or partition, neither key nor partition: TopicMismatch, and nothing is created."""

        async def run() -> None:
            async with self.opened(address, topic) as bus:
                for message in (
                    Message("absent", b"k", b"v"),
                    Message(topic.name, b"k", b"v", partition=4),
                    Message(topic.name, None, b"v"),
                ):
                    with pytest.raises(TopicMismatch):
                        await bus.produce([message])
                with pytest.raises(TopicMismatch):
                    await bus.ends(["absent"])
                with pytest.raises(TopicMismatch):
                    async with bus.member("g", ["absent"]):
                        pass
                assert "absent" not in await bus.topics()
                assert all(info.end == 0 for info in (await bus.topics())[topic.name])

        asyncio.run(run())

    def test_topics_are_created_once_and_compared(self, address: str, topic: Topic) -> None:
        """A second creation changes nothing; other settings are reported, not applied."""
        other = Topic(topic.name, (), "k", 2, DAY_MS)
        compacted = Topic(topic.name, (), "k", 4, FOR_EVER, compacted=True)

        async def run() -> None:
            async with self.opened(address, topic) as bus:
                assert await bus.create_topics([topic]) == []
                found = {d.setting: d.found for d in await bus.create_topics([other])}
                assert found["partitions"] == "4"
                assert len(found) == 2
                assert await bus.create_topics([compacted]) != []
                assert await bus.create_topics([topic]) == []

        asyncio.run(run())

    def test_topics_tell_how_long_they_keep(self, address: str, topic: Topic) -> None:
        """As created, or for ever where only newer records of a key take the place of older ones."""
        days = dataclasses.replace(topic, name=f"{topic.name}.days", retention_ms=3 * DAY_MS)
        compacted = dataclasses.replace(days, name=f"{topic.name}.state", compacted=True)

        async def run() -> None:
            async with self.opened(address, topic, days, compacted) as bus:
                assert await bus.retention_ms(topic.name) == FOR_EVER
                assert await bus.retention_ms(days.name) == 3 * DAY_MS
                assert await bus.retention_ms(compacted.name) == FOR_EVER
                with pytest.raises(TopicMismatch, match="nowhere"):
                    await bus.retention_ms("nowhere")

        asyncio.run(run())

    def test_topics_tell_their_extent(self, address: str, topic: Topic) -> None:
        """Begin, end and count of each partition, in order."""

        async def run() -> None:
            async with self.opened(address, topic) as bus:
                await bus.produce([Message(topic.name, b"k", b"v", partition=2)] * 3)
                infos = (await bus.topics())[topic.name]
                assert [(i.begin, i.end, i.records) for i in infos] == [
                    (0, 0, 0),
                    (0, 0, 0),
                    (0, 3, 3),
                    (0, 0, 0),
                ]

        asyncio.run(run())

    def test_reader_waits_wakes_and_seeks(self, address: str, one: Topic) -> None:
        """An empty wait ends on time, a new record ends it early, a seek goes back."""
        tp = TopicPartition(one.name, 0)

        async def run() -> None:
            async with self.opened(address, one) as bus, bus.reader({tp: 0}) as reader:
                loop = asyncio.get_running_loop()
                started_s = loop.time()
                async with asyncio.timeout(DEADLINE_S):
                    assert await reader.read(wait_ms=300) == []
                assert loop.time() - started_s > 0.25

                async with asyncio.timeout(DEADLINE_S):
                    waiting = asyncio.create_task(reader.read(wait_ms=LONG_MS))
                    await asyncio.sleep(0)
                    await bus.produce([Message(one.name, b"k", b"%d" % i) for i in range(5)])
                    found = await waiting
                found += await read_until(reader, {tp: 5})
                assert values(found) == [b"0", b"1", b"2", b"3", b"4"]
                reader.seek({tp: 3})
                assert reader.positions() == {tp: 3}
                assert values(await read_until(reader, {tp: 5})) == [b"3", b"4"]

        asyncio.run(run())

    def test_reader_takes_at_most_what_was_asked(self, address: str, topic: Topic) -> None:
        """With far more records than one read takes, each read stays within its bound, and all come, once."""

        async def run() -> None:
            async with self.opened(address, topic) as bus:
                for partition in range(4):
                    await bus.produce([Message(topic.name, b"k", b"v", partition=partition)] * 500)
                async with bus.reader(await bus.begins([topic.name])) as reader:
                    places: set[str] = set()
                    while len(places) < 2000:
                        deliveries = await reader.read(records_max=100, wait_ms=60_000)
                        assert 0 < len(deliveries) <= 100
                        assert places.isdisjoint(d.place for d in deliveries)
                        places.update(d.place for d in deliveries)

        asyncio.run(run())

    def test_range_is_exact_and_never_waits(self, address: str, one: Topic) -> None:
        """Committed records of [start, end), across the gap of a transaction; an end in the future is not
        waited for.
        """
        tp = TopicPartition(one.name, 0)

        async def run() -> None:
            async with self.opened(address, one) as bus:
                await bus.produce([Message(one.name, b"k", b"%d" % i) for i in range(3)])
                async with bus.transactor(f"x-{one.name}") as transactor:
                    await transactor.commit([Message(one.name, b"k", b"3")])
                [last] = await bus.produce([Message(one.name, b"k", b"4")])
                assert values([d async for d in bus.read_range(tp, 1, 4)]) == [b"1", b"2", b"3"]
                assert values([d async for d in bus.read_range(tp, 2, last + 100)]) == [b"2", b"3", b"4"]
                assert [d async for d in bus.read_range(tp, 2, 2)] == []

        asyncio.run(run())

    def test_lookup_by_time(self, address: str, one: Topic) -> None:
        """The first position not older than a time; the end for a time to come."""
        tp = TopicPartition(one.name, 0)

        async def run() -> None:
            async with self.opened(address, one) as bus:
                for i in range(5):
                    await bus.produce([Message(one.name, b"k", b"%d" % i)])
                    await asyncio.sleep(0.01)
                found = await read_all(bus, one.name)
                assert await bus.offsets_at(one.name, 0) == {tp: 0}
                assert await bus.offsets_at(one.name, found[3].timestamp_ms) == {tp: 3}
                assert await bus.offsets_at(one.name, found[2].timestamp_ms + 1) == {tp: 3}
                assert await bus.offsets_at(one.name, found[4].timestamp_ms + 60_000) == {tp: 5}

        asyncio.run(run())

    # A position that has left the log

    def test_position_before_the_log_is_an_error(self, address: str, one: Topic) -> None:
        """After retention: reader, range and group member say OffsetGone, each time, until they seek."""
        tp = TopicPartition(one.name, 0)

        async def run() -> None:
            async with self.opened(address, one) as bus:
                await bus.produce([Message(one.name, b"k", b"%d" % i) for i in range(10)])
                async with bus.member("g", [one.name]) as member:
                    await poll_until(member, 10)
                    await member.commit({tp: 2})
                await self.shorten(address, one, 5)
                assert await bus.begins([one.name]) == {tp: 5}
                async with bus.reader({tp: 2}) as reader:
                    for _ in range(2):
                        with pytest.raises(OffsetGone, match=r"\[0\]@2"):
                            await reader.read(wait_ms=60_000)
                    reader.seek({tp: 5})
                    assert len(await read_until(reader, {tp: 10})) == 5
                with pytest.raises(OffsetGone):
                    _ = [d async for d in bus.read_range(tp, 2, 8)]
                async with bus.member("g", [one.name]) as member:
                    for _ in range(2):
                        with pytest.raises(OffsetGone, match=r"\[0\]@2"):
                            await poll_until(member, 1)
                    member.seek(await bus.begins([one.name]))
                    assert values(await poll_until(member, 5)) == [b"5", b"6", b"7", b"8", b"9"]

        asyncio.run(run())

    def test_topic_made_anew_is_an_error(self, address: str, one: Topic) -> None:
        """A position beyond the end of a topic that was re-created is OffsetGone, not a wait for ever."""
        tp = TopicPartition(one.name, 0)

        async def run() -> None:
            async with self.opened(address, one) as bus:
                await bus.produce([Message(one.name, b"k", b"old")] * 10)
                await self.recreate(address, one)
                await bus.produce([Message(one.name, b"k", b"new")])
                async with bus.reader({tp: 10}) as reader:
                    with pytest.raises(OffsetGone, match=r"\[0\]@10"):
                        await reader.read(wait_ms=60_000)
                assert values(await read_all(bus, one.name)) == [b"new"]

        asyncio.run(run())

    # Transactions

    def test_transaction_leaves_a_gap_that_readers_pass(self, address: str, one: Topic) -> None:
        """Records and positions become visible together; the offset after a transaction is not the next
        record's.
        """
        tp = TopicPartition(one.name, 0)
        group = f"g-{one.name}"

        async def run() -> None:
            async with self.opened(address, one) as bus:
                async with bus.transactor(f"x-{one.name}") as transactor:
                    first = await transactor.commit(
                        [Message(one.name, b"k", b"a"), Message(one.name, b"k", b"b")],
                        group=group,
                        positions={tp: 41},
                    )
                    second = await transactor.commit(
                        [Message(one.name, b"k", b"c")], group=group, positions={tp: 42}
                    )
                assert first == [0, 1]
                assert second[0] > 2
                found = await read_all(bus, one.name)
                assert values(found) == [b"a", b"b", b"c"]
                assert [d.offset for d in found] == first + second
                async with bus.transactor(f"x-{one.name}") as transactor:
                    assert await bus.committed(group, [one.name]) == {tp: 42}
                    for _ in range(20):
                        [offset] = await transactor.commit([Message(one.name, b"k", b"v")])
                        assert (await bus.ends([one.name]))[tp] > offset
                assert (await bus.groups())[group] == {tp: 42}

        asyncio.run(run())

    def test_refused_message_leaves_nothing_and_harms_nothing(self, address: str, one: Topic) -> None:
        """A transaction with a message too large is refused whole; the next one under the same id goes
        through.
        """
        tp = TopicPartition(one.name, 0)

        async def run() -> None:
            async with self.opened(address, one) as bus, bus.transactor(f"x-{one.name}") as transactor:
                with pytest.raises(RecordTooLarge):
                    await transactor.commit(
                        [
                            Message(one.name, b"k", b"a"),
                            Message(one.name, b"k", b"x" * (RECORD_BYTES_MAX + 1)),
                        ],
                        group="g",
                        positions={tp: 1},
                    )
                await transactor.commit([Message(one.name, b"k", b"b")])
                assert values(await read_all(bus, one.name)) == [b"b"]
                assert await bus.committed("g", [one.name]) == {}

        asyncio.run(run())

    def test_newer_holder_fences_the_older(self, address: str, one: Topic) -> None:
        """The older holder's commits raise Fenced, each, and leave neither records nor positions."""
        tp = TopicPartition(one.name, 0)
        group = f"g-{one.name}"

        async def run() -> None:
            async with self.opened(address, one) as bus, AsyncExitStack() as stack:
                old = await stack.enter_async_context(bus.transactor(f"x-{one.name}"))
                await old.commit([Message(one.name, b"k", b"a")], group=group, positions={tp: 1})
                new = await stack.enter_async_context(bus.transactor(f"x-{one.name}"))
                for _ in range(2):
                    with pytest.raises(Fenced, match=f"x-{one.name}"):
                        await old.commit([Message(one.name, b"k", b"stale")], group=group, positions={tp: 9})
                await new.commit([Message(one.name, b"k", b"b")], group=group, positions={tp: 2})
                assert values(await read_all(bus, one.name)) == [b"a", b"b"]
                async with bus.transactor(f"x-{one.name}"):
                    assert await bus.committed(group, [one.name]) == {tp: 2}

        asyncio.run(run())

    def test_sleeper_in_another_process_is_fenced(self, address: str, one: Topic) -> None:
        """A process that starts an id, sleeps while another takes it over, and then commits: fenced, nothing
        doubled.
        """

        async def run() -> None:
            group = f"g-{one.name}"
            async with (
                self.opened(address, one) as bus,
                child("transact", address, self.SESSION_MS, f"x-{one.name}", one.name, group) as sleeper,
            ):
                await sleeper.until(lambda said: "started" in said)
                async with bus.transactor(f"x-{one.name}") as transactor:
                    await sleeper.tell()
                    assert await sleeper.until(lambda said: "outcome" in said) == {"outcome": "Fenced"}
                    await transactor.commit([Message(one.name, b"k", b"mine")])
                assert values(await read_all(bus, one.name)) == [b"mine"]
                assert await bus.committed(group, [one.name]) == {}

        asyncio.run(run())

    # Groups

    def test_group_resumes_at_what_it_committed(self, address: str, topic: Topic) -> None:
        """What was read and not committed comes again; what was committed does not. Two groups know nothing
        of each other.
        """

        async def run() -> None:
            # members follow each other and none dies: one that a stall throws out would read twice
            async with self.opened(address, topic, session_ms=60_000) as bus:
                await bus.produce([Message(topic.name, b"%d" % (i % 7), b"%d" % i) for i in range(70)])
                async with bus.member("g1", [topic.name]) as member:
                    found = await poll_until(member, 70)
                    assert len(found) == 70
                    assert member.assignment() == {TopicPartition(topic.name, p) for p in range(4)}
                    half = [d for d in found if d.partition < 2]
                    await member.commit({d.tp: d.offset + 1 for d in half})
                async with bus.member("g1", [topic.name]) as member:
                    again = await poll_until(member, 70 - len(half))
                    assert {d.value for d in again} == {d.value for d in found if d.partition >= 2}
                async with bus.member("g2", [topic.name]) as member:
                    assert len(await poll_until(member, 70)) == 70
                assert set(await bus.committed("g1", [topic.name])) == {d.tp for d in half}
                assert await bus.committed("g2", [topic.name]) == {}

        asyncio.run(run())

    def test_handler_longer_than_the_session_keeps_its_partitions(self, address: str, topic: Topic) -> None:
        """A handler that takes longer than a session, and a poll interval, commits its work; no rebalance,
        nothing comes again.
        """

        session_ms = 3 * self.SESSION_MS  # a heart-beat comes every quarter of it: room for a stall

        async def run() -> None:
            async with self.opened(address, topic, session_ms=session_ms) as bus:
                await bus.produce([Message(topic.name, b"%d" % i, b"v") for i in range(20)])
                async with bus.member("g", [topic.name]) as member:
                    found = await poll_until(member, 20)
                    await asyncio.sleep(1.5 * session_ms / 1000)
                    await member.commit({d.tp: d.offset + 1 for d in found})
                    assert await member.poll(wait_ms=300) == []
                    assert len(member.assignment()) == 4
                assert sum((await bus.committed("g", [topic.name])).values()) == 20

        asyncio.run(run())

    def test_commit_after_losing_a_partition_is_left_out(self, address: str, topic: Topic) -> None:
        """A member that lost half of its partitions commits all: no error; the lost ones do not move."""

        async def run() -> None:
            async with (
                self.opened(address, topic, session_ms=3 * self.SESSION_MS) as bus,
                bus.member("g", [topic.name]) as first,
            ):
                await bus.produce([Message(topic.name, b"%d" % i, b"v") for i in range(40)])
                found = await poll_until(first, 40)
                async with bus.member("g", [topic.name]) as second, asyncio.timeout(DEADLINE_S):
                    theirs: list[Delivery] = []
                    while len(second.assignment()) != 2 or not theirs:  # all four may be its own for a moment
                        theirs += await second.poll(wait_ms=500)
                    lost = second.assignment()
                    await first.commit({d.tp: d.offset + 1 for d in found})
                    assert not lost & set(await bus.committed("g", [topic.name]))
                    wanted = {d.place for d in found if d.tp in lost}
                    while wanted - {d.place for d in theirs}:
                        theirs += await second.poll(wait_ms=500)
                    await second.commit({d.tp: d.offset + 1 for d in theirs if d.tp in lost})
                    assert lost <= set(await bus.committed("g", [topic.name]))

        asyncio.run(run())

    def test_topics_of_one_group_are_dealt_out_together(self, address: str) -> None:
        """Whoever has a partition of one topic has the same one of the other: a join finds all of a key."""
        topic, other = (Topic(f"{name}-{uuid.uuid4().hex[:8]}", (), "k", 3, FOR_EVER) for name in "ab")

        async def run() -> None:
            async with (
                self.opened(address, topic, other) as bus,
                bus.member("g", [topic.name, other.name]) as first,
                bus.member("g", [topic.name, other.name]) as second,
            ):
                async with asyncio.timeout(DEADLINE_S):
                    while sorted((len(first.assignment()), len(second.assignment()))) != [2, 4]:
                        await first.poll(wait_ms=100)
                        await second.poll(wait_ms=100)
                for member in (first, second):
                    numbers = [
                        {tp.partition for tp in member.assignment() if tp.topic == name}
                        for name in (topic.name, other.name)
                    ]
                    assert numbers[0] == numbers[1]

        asyncio.run(run())

    def test_killed_member_is_replaced_and_nothing_is_lost(self, address: str, topic: Topic) -> None:
        """Two processes share the partitions; one is killed -9; the other takes over and every record is
        handled.
        """

        async def run() -> None:
            async with self.opened(address, topic) as bus, AsyncExitStack() as stack:
                arguments = ("consume", address, self.SESSION_MS, "g", topic.name, "-")
                first = await stack.enter_async_context(child(*arguments))
                second = await stack.enter_async_context(child(*arguments))
                await first.until(lambda said: len(said.get("owned", ())) == 2)
                await second.until(lambda said: len(said.get("owned", ())) == 2)
                await bus.produce([Message(topic.name, b"a%d" % i, b"v") for i in range(100)])
                await first.until(lambda said: "keys" in said)
                await first.kill()
                await bus.produce([Message(topic.name, b"b%d" % i, b"v") for i in range(100)])
                await second.until(lambda said: len(said.get("owned", ())) == 4)
                wanted = {f"{batch}{i}" for batch in "ab" for i in range(100)}
                while wanted - set(first.of("keys")) - set(second.of("keys")):
                    await second.until(lambda said: "keys" in said)
                ends = await bus.ends([topic.name])
                async with asyncio.timeout(DEADLINE_S):
                    while await bus.committed("g", [topic.name]) != ends:  # noqa: ASYNC110 - a process commits
                        await asyncio.sleep(0.05)

        asyncio.run(run())

    def test_member_stopped_for_longer_than_its_session_comes_back(self, address: str, topic: Topic) -> None:
        """A process that is frozen loses its partitions to the other; thawed, it joins again and takes its
        share.
        """

        async def run() -> None:
            async with self.opened(address, topic) as bus, AsyncExitStack() as stack:
                arguments = ("consume", address, self.SESSION_MS, "g", topic.name, "-")
                frozen = await stack.enter_async_context(child(*arguments))
                other = await stack.enter_async_context(child(*arguments))
                await frozen.until(lambda said: len(said.get("owned", ())) == 2)
                await other.until(lambda said: len(said.get("owned", ())) == 2)
                await self.freeze(address, frozen.process)
                await bus.produce([Message(topic.name, b"%d" % i, b"v") for i in range(100)])
                await other.until(lambda said: len(said.get("owned", ())) == 4)
                wanted = {str(i) for i in range(100)}
                while not set(other.of("keys")) >= wanted:
                    await other.until(lambda said: "keys" in said)
                frozen.process.send_signal(signal.SIGCONT)
                await other.until(lambda said: len(said.get("owned", ())) == 2)
                await bus.produce([Message(topic.name, b"%d" % i, b"v") for i in range(100)])
                await frozen.until(lambda said: "keys" in said)

        asyncio.run(run())

    def test_stable_member_takes_its_partitions_back(self, address: str, topic: Topic) -> None:
        """A member killed -9 and started again under its id has its partitions at once; the other keeps its
        own.
        """

        async def run() -> None:
            async with self.opened(address, topic) as bus, AsyncExitStack() as stack:
                arguments = ("consume", address, 10 * self.SESSION_MS, "g", topic.name)
                first = await stack.enter_async_context(child(*arguments, "m1"))
                second = await stack.enter_async_context(child(*arguments, "m2"))
                before = await first.until(lambda said: len(said.get("owned", ())) == 2)
                await second.until(lambda said: len(said.get("owned", ())) == 2)
                await first.kill()
                killed_s = asyncio.get_running_loop().time()
                again = await stack.enter_async_context(child(*arguments, "m1"))
                assert await again.until(lambda said: "owned" in said) == before
                assert asyncio.get_running_loop().time() - killed_s < 8 * self.SESSION_MS / 1000
                owners_seen = len(second.of("owned"))
                await bus.produce([Message(topic.name, b"%d" % i, b"v") for i in range(100)])
                wanted = {str(i) for i in range(100)}
                while not set(again.of("keys")) | set(second.of("keys")) >= wanted:
                    reading = again if len(again.of("keys")) == 0 else second
                    await reading.until(lambda said: "keys" in said)
                assert len(second.of("owned")) == owners_seen

        asyncio.run(run())

"""The embedded log under kill -9, locks, a full disk, retention, a clock set back, and foreign files."""

import asyncio
import random
import resource
import sqlite3
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from bus_child import child
from contract import poll_until, read_all, values

from headrace.bus import open_bus
from headrace.bus.protocol import Message, TopicPartition
from headrace.bus.sqlite import SqliteBus, log
from headrace.bus.sqlite.file import SCHEMA_VERSION
from headrace.clock import ManualClock
from headrace.errors import BusError, BusUnavailable, ConfigError, Fenced
from headrace.wire.topics import DAY_MS, FOR_EVER, Topic

SEED = random.randrange(1 << 30)
T = Topic("t", (), "k", 2, FOR_EVER)
SHORT = Topic("short", (), "k", 1, 1000)
COMPACTED = Topic("compacted", (), "k", 1, FOR_EVER, compacted=True)


def v(i: int, key: bytes = b"k", topic: str = "t") -> Message:
    return Message(topic, key, b"%d" % i)


def test_eight_writers_killed_at_random_points(tmp_path: Path) -> None:
    """Eight processes append and are killed -9 one by one: whatever was acknowledged is there, once, in
    order; the file is sound.
    """
    path = tmp_path / "log.db"
    print(f"seed {SEED}")
    chance = random.Random(SEED)

    async def run() -> None:
        async with open_bus(f"sqlite:{path}") as bus, AsyncExitStack() as stack:
            await bus.create_topics([T])
            writers = [
                await stack.enter_async_context(child("write", f"sqlite:{path}", 1000, "t", f"w{n}"))
                for n in range(8)
            ]
            for writer in writers:
                await writer.until(lambda said: "acknowledged" in said)
            for writer in writers:
                for _ in range(chance.randrange(5)):
                    await writer.until(lambda said: "acknowledged" in said)
                await writer.kill()
            found = await read_all(bus, "t")
            for n, writer in enumerate(writers):
                mine = [(d.value or b"").decode() for d in found if d.key == f"w{n}".encode()]
                acknowledged = writer.of("acknowledged")
                assert len(acknowledged) >= 10
                assert mine[: len(acknowledged)] == acknowledged
                assert len(mine) - len(acknowledged) in (
                    0,
                    10,
                )  # one batch may have been written and not yet told
            await bus.produce([v(1)])
        with sqlite3.connect(path) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        db.close()

    asyncio.run(run())


def test_locked_file_is_waited_for_and_then_named(tmp_path: Path) -> None:
    """While another process holds the lock a writer waits within its bound, then says which file and how
    long; readers go on.
    """
    path = tmp_path / "log.db"

    async def run() -> None:
        async with SqliteBus(path, lock_wait_ms=300) as bus, SqliteBus(path, lock_wait_ms=60_000) as patient:
            await bus.create_topics([T])
            await bus.produce([v(1)])
            holder = sqlite3.connect(path, isolation_level=None)
            holder.execute("BEGIN IMMEDIATE")
            with pytest.raises(BusUnavailable, match=r"log\.db: expected the lock within 300 ms"):
                await bus.produce([v(2)])
            assert values(await read_all(bus, "t")) == [b"1"]
            waiting = asyncio.create_task(patient.produce([v(3)]))
            await asyncio.sleep(0.05)
            holder.execute("ROLLBACK")
            holder.close()
            await waiting
            assert values(await read_all(bus, "t")) == [b"1", b"3"]

    asyncio.run(run())


def test_reader_that_holds_the_log_open(tmp_path: Path) -> None:
    """A foreign reader in mid-snapshot stops neither writers nor readers, and goes on seeing its moment."""
    path = tmp_path / "log.db"

    async def run() -> None:
        async with open_bus(f"sqlite:{path}") as bus:
            await bus.create_topics([T])
            await bus.produce([v(0)])
            holder = sqlite3.connect(path, isolation_level=None)
            holder.execute("BEGIN")
            count = "SELECT count(*) FROM records"
            assert holder.execute(count).fetchone() == (1,)
            for _ in range(50):
                await bus.produce([Message("t", b"k", bytes(1000))] * 500)
            assert len(await read_all(bus, "t")) == 25_001
            assert holder.execute(count).fetchone() == (1,)
            holder.close()

    asyncio.run(run())


def test_full_disk_is_named_and_passes(tmp_path: Path) -> None:
    """No room: BusUnavailable that names the file; with room again the log goes on, and holds exactly what
    was acknowledged.
    """
    path = tmp_path / "log.db"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def run() -> None:
        async with open_bus(f"sqlite:{path}") as bus:
            await bus.create_topics([T])
            acknowledged = 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
            try:
                with pytest.raises(BusUnavailable, match=r"log\.db: expected room to write"):
                    while acknowledged < 1000:
                        await bus.produce([Message("t", b"k", bytes(100_000))])
                        acknowledged += 1
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert 0 < acknowledged < 1000
            assert len(await read_all(bus, "t")) == acknowledged
            await bus.produce([v(1)])
            assert len(await read_all(bus, "t")) == acknowledged + 1

    asyncio.run(run())


def test_retention_deletes_by_time_with_bounded_work(tmp_path: Path) -> None:
    """What is older than the topic keeps goes, oldest first, never more than the bound at once; other topics
    stay.
    """
    clock = ManualClock(1_000_000)
    tp = TopicPartition("short", 0)

    async def run() -> None:
        async with open_bus(f"sqlite:{tmp_path}/log.db", clock=clock) as bus:
            await bus.create_topics([SHORT, T])
            await bus.produce([v(i, topic="short") for i in range(10)] + [v(0)])
            clock.advance(600)
            await bus.produce([v(i, topic="short") for i in range(10, 15)])
            clock.advance(600)
            assert isinstance(bus, SqliteBus)
            more = await bus._file.write(lambda db: log.sweep(db, clock.now_ms(), records_max=4))
            assert more and await bus.begins(["short"]) == {tp: 4}
            more = await bus._file.write(lambda db: log.sweep(db, clock.now_ms(), records_max=100))
            assert not more and await bus.begins(["short"]) == {tp: 10}
            [info] = (await bus.topics())["short"]
            assert (info.records, info.bytes) == (5, 5 * 3)
            clock.advance(20_000)
            await bus.produce([v(1)])  # an append sweeps by itself
            [info] = (await bus.topics())["short"]
            assert (info.begin, info.end, info.records, info.bytes) == (15, 15, 0, 0)
            assert len(await read_all(bus, "t")) == 2

    asyncio.run(run())


def test_compaction_keeps_the_newest_of_each_key() -> None:
    """Of each key the newest record stays; a tombstone deletes its key and goes itself a day later. Offsets
    do not move.
    """
    clock = ManualClock(1_000_000)

    async def run() -> None:
        async with open_bus("sqlite::memory:", clock=clock) as bus:
            await bus.create_topics([COMPACTED, T])
            await bus.produce([v(0, b"a", "compacted"), v(1, b"b", "compacted"), v(2, b"a", "compacted")])
            await bus.produce([v(3, b"c", "compacted"), Message("compacted", b"b", None)])
            found = await read_all(bus, "compacted")
            assert [(d.offset, d.key, d.value) for d in found] == [
                (2, b"a", b"2"),
                (3, b"c", b"3"),
                (4, b"b", None),
            ]
            clock.advance(DAY_MS + 1)
            await bus.produce([v(0)])
            assert [d.offset for d in await read_all(bus, "compacted")] == [2, 3]
            [info] = (await bus.topics())["compacted"]
            assert (info.begin, info.end, info.records) == (0, 5, 2)

    asyncio.run(run())


def test_clock_that_goes_back_does_not_reorder() -> None:
    """Log-append time never falls within a partition, so a lookup by time stays exact."""
    clock = ManualClock(5000)
    tp = TopicPartition("o", 0)

    async def run() -> None:
        async with open_bus("sqlite::memory:", clock=clock) as bus:
            await bus.create_topics([Topic("o", (), "k", 1, FOR_EVER)])
            await bus.produce([v(0, topic="o")])
            clock.advance(-3000)
            await bus.produce([v(1, topic="o")])
            clock.advance(4000)
            await bus.produce([v(2, topic="o")])
            assert [d.timestamp_ms for d in await read_all(bus, "o")] == [5000, 5000, 6000]
            assert await bus.offsets_at("o", 5001) == {tp: 2}
            assert await bus.offsets_at("o", 2000) == {tp: 0}

    asyncio.run(run())


def test_busy_partition_starves_no_other() -> None:
    """However much waits in one partition, each of four reads begins with another one."""
    topic = Topic("four", (), "k", 4, FOR_EVER)

    async def run() -> None:
        async with open_bus("sqlite::memory:") as bus:
            await bus.create_topics([topic])
            for partition in range(4):
                await bus.produce([Message("four", b"k", b"v", partition=partition)] * 500)
            async with bus.reader(await bus.begins(["four"])) as reader:
                reads = [await reader.read(records_max=100) for _ in range(4)]
                assert {read[0].partition for read in reads} == {0, 1, 2, 3}

    asyncio.run(run())


def test_second_process_under_a_stable_id_fences_the_first(tmp_path: Path) -> None:
    """The first learns it at its next poll, and its commits are left out."""
    tp = TopicPartition("t", 0)

    async def run() -> None:
        async with open_bus(f"sqlite:{tmp_path}/log.db") as bus:
            await bus.create_topics([T])
            await bus.produce([Message("t", b"k", b"v", partition=0)])
            async with bus.member("g", ["t"], member_id="m") as first:
                await poll_until(first, 1)
                async with bus.member("g", ["t"], member_id="m") as second:
                    await first.commit({tp: 1})
                    assert await bus.committed("g", ["t"]) == {}
                    with pytest.raises(Fenced, match="'m'"):
                        await first.poll(wait_ms=0)
                    assert len(await poll_until(second, 1)) == 1

    asyncio.run(run())


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    """No directory, not a database, a database of something else, a log of a later version: each said by
    name.
    """
    (tmp_path / "text.db").write_text("not a database, but long enough to look at " * 50)
    for name, version in (("other.db", 0), ("later.db", SCHEMA_VERSION + 1)):
        with sqlite3.connect(tmp_path / name) as db:
            db.execute("CREATE TABLE x (y)")
            db.execute(f"PRAGMA user_version={version}")
        db.close()

    async def run() -> None:
        for name, reason in (
            ("absent/log.db", "expected an existing directory"),
            ("text.db", "not a database"),
            ("other.db", f"expected a log of version {SCHEMA_VERSION}"),
            ("later.db", f"got a database of version {SCHEMA_VERSION + 1}"),
        ):
            with pytest.raises(BusError, match=f"{name}.*{reason}"):
                async with open_bus(f"sqlite:{tmp_path}/{name}"):
                    pass

    asyncio.run(run())


@pytest.mark.parametrize("address", ["", "log.db", "sqlite:", "kafka:", "redis:localhost:1"])
def test_unknown_address(address: str) -> None:
    """An address that is no bus says what one looks like."""
    with pytest.raises(ConfigError, match="expected sqlite:PATH"):
        open_bus(address)

"""Who is woken when the embedded log grows: the reader whose partition did, and nobody else."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from headrace.bus.protocol import Message, TopicPartition
from headrace.bus.sqlite import SqliteBus
from headrace.bus.sqlite.file import Heads, LogFile
from headrace.bus.sqlite.readers import SqliteReader
from headrace.errors import BusError
from headrace.wire.topics import FOR_EVER, Topic

QUIET, BUSY = (Topic(name, (), "k", 1, FOR_EVER) for name in ("quiet", "busy"))
_T = TypeVar("_T")


class CountedFile(LogFile):
    reads = 0

    async def read(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        self.reads += 1
        return await super().read(work)


def test_others_records_wake_nobody(tmp_path: Path) -> None:
    """Twenty commits elsewhere in the log cost a waiting reader no read; the one to its partition ends the
    wait."""

    async def act() -> None:
        async with SqliteBus(f"{tmp_path}/log.db") as bus:
            await bus.create_topics([QUIET, BUSY])
            file = CountedFile(f"{tmp_path}/log.db")
            reader = SqliteReader(file, {TopicPartition("quiet", 0): 0})
            reading = asyncio.ensure_future(reader.read(wait_ms=20_000))
            for _ in range(20):
                await bus.produce([Message("busy", b"k", b"1")])
                await asyncio.sleep(0.01)
            assert (file.reads, reading.done()) == (1, False)
            await bus.produce([Message("quiet", b"k", b"2")])
            assert [delivery.value for delivery in await reading] == [b"2"]
            assert file.reads == 2
            await file.close()

    asyncio.run(act())


def test_a_wait_ends_at_its_deadline(tmp_path: Path) -> None:
    """Nothing came: False, and no timer is left behind that looks on."""

    async def act() -> None:
        file = LogFile(f"{tmp_path}/log.db")
        loop = asyncio.get_running_loop()
        assert not await file.wait(lambda heads: False, loop.time() + 0.05)
        assert not await file.wait(lambda heads: False, loop.time() - 1)
        assert file._look is None
        await file.close()

    asyncio.run(act())


def test_a_log_that_can_t_be_read_ends_the_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look raises is raised by all who wait, each once."""

    async def act() -> None:
        file = LogFile(f"{tmp_path}/log.db")
        deadline_s = asyncio.get_running_loop().time() + 20
        waits = [asyncio.ensure_future(file.wait(lambda heads: False, deadline_s)) for _ in range(2)]
        await asyncio.sleep(0)

        def broken() -> Heads:
            raise BusError("the disk is gone")

        monkeypatch.setattr(file, "heads", broken)
        for wait in waits:
            with pytest.raises(BusError, match="the disk is gone"):
                await wait
        await file.close()

    asyncio.run(act())

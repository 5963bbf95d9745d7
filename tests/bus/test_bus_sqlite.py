"""The embedded log keeps the contract of every bus."""

import asyncio
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from contract import DEADLINE_S, BusContract

from headrace.wire.topics import Topic


class TestSqlite(BusContract):
    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"sqlite:{tmp_path}/log.db"

    async def shorten(self, address: str, topic: Topic, before: int) -> None:
        with sqlite3.connect(address.removeprefix("sqlite:")) as db:
            [(number,)] = db.execute("SELECT id FROM partitions WHERE topic = ?", (topic.name,)).fetchall()
            db.execute("DELETE FROM records WHERE place < ?", (number << 40 | before,))
            db.execute("UPDATE partitions SET begin = ? WHERE id = ?", (before, number))
        db.close()

    async def recreate(self, address: str, topic: Topic) -> None:
        with sqlite3.connect(address.removeprefix("sqlite:")) as db:
            db.execute("DELETE FROM records")
            db.execute(
                "UPDATE partitions SET id = id + 100, begin = 0, next = 0 WHERE topic = ?", (topic.name,)
            )
        db.close()

    async def freeze(self, address: str, process: asyncio.subprocess.Process) -> None:
        """While we hold the lock: stopped in the middle of a heart-beat, it would keep the lock."""
        path = address.removeprefix("sqlite:")
        with closing(sqlite3.connect(path, timeout=DEADLINE_S, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(DEADLINE_S):
                while not stopped(process.pid):  # noqa: ASYNC110 - the kernel stops it
                    await asyncio.sleep(0.01)
            db.execute("ROLLBACK")


def stopped(pid: int) -> bool:
    """Every thread of it: the one that writes is not the main one."""
    states = [path.read_text().rpartition(") ")[2][0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}

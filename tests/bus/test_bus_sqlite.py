"""The embedded log keeps the contract of every bus."""

import sqlite3
from pathlib import Path

import pytest
from contract import BusContract

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

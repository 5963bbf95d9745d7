"""The embedded log: one SQLite file, any number of processes on one machine, no server. `:memory:` is a log
of one process.

Not here: what the calls promise (`bus.protocol`). Inside: `file` (connections, locks), `log` (records),
`groups` and `assignment` (consumer groups), `readers`.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Self

from headrace import failpoints
from headrace.bus.protocol import (
    Delivery,
    Difference,
    Message,
    PartitionInfo,
    Positions,
    TopicPartition,
)
from headrace.bus.sqlite import groups, log
from headrace.bus.sqlite.file import LOCK_WAIT_MS, MEMORY, LogFile
from headrace.bus.sqlite.readers import SqliteMember, SqliteReader, membership
from headrace.clock import Clock, SystemClock
from headrace.errors import BusUnavailable
from headrace.wire.topics import Topic

SESSION_MS = 10_000
SWEEP_MS = 10_000
RANGE_RECORDS = 500


class SqliteBus:
    """See `bus.protocol.Bus`. `clock` stamps the records and decides what retention deletes."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock | None = None,
        session_ms: int = SESSION_MS,
        lock_wait_ms: int = LOCK_WAIT_MS,
    ) -> None:
        self._path = str(path)
        self._clock = clock or SystemClock()
        self._session_ms = session_ms
        self._lock_wait_ms = lock_wait_ms
        self._swept_ms = 0
        self._opened: LogFile | None = None

    async def __aenter__(self) -> Self:
        if self._path == MEMORY:
            self._opened = LogFile(MEMORY)
        else:
            if not Path(self._path).parent.is_dir():
                raise BusUnavailable(f"{self._path}: expected an existing directory to keep the log in")
            self._opened = await asyncio.to_thread(LogFile, self._path, lock_wait_ms=self._lock_wait_ms)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    @property
    def _file(self) -> LogFile:
        assert self._opened is not None, "use the bus inside `async with`"
        return self._opened

    async def create_topics(self, topics: Sequence[Topic]) -> list[Difference]:
        return await self._file.write(lambda db: log.create_topics(db, topics))

    async def topics(self) -> dict[str, list[PartitionInfo]]:
        return await self._file.read(log.list_topics)

    async def retention_ms(self, topic: str) -> int:
        return await self._file.read(lambda db: log.retention_ms(db, topic))

    async def groups(self) -> dict[str, dict[TopicPartition, int]]:
        return await self._file.read(groups.all_committed)

    async def produce(self, messages: Sequence[Message]) -> list[int]:
        await self._sweep()
        return await self._file.write(lambda db: log.append(db, messages, self._clock.now_ms()))

    @contextlib.asynccontextmanager
    async def reader(self, positions: Positions) -> AsyncIterator[SqliteReader]:
        yield SqliteReader(self._file, positions)

    def member(
        self, group: str, topics: Sequence[str], *, member_id: str | None = None
    ) -> AbstractAsyncContextManager[SqliteMember]:
        return membership(self._file, group, topics, member_id, self._session_ms)

    @contextlib.asynccontextmanager
    async def transactor(self, transactional_id: str) -> AsyncIterator["SqliteTransactor"]:
        epoch = await self._file.write(lambda db: groups.start_epoch(db, transactional_id))
        yield SqliteTransactor(self, transactional_id, epoch)

    async def commit_transaction(
        self,
        transactional_id: str,
        epoch: int,
        messages: Sequence[Message],
        group: str | None,
        positions: Positions | None,
    ) -> list[int]:
        """One transaction of the holder of `epoch`: see `Transactor.commit`."""
        await self._sweep()

        def work(db: sqlite3.Connection) -> list[int]:
            groups.check_epoch(db, transactional_id, epoch)
            offsets = log.append(db, messages, self._clock.now_ms(), control=True)
            if group is not None:
                groups.commit(db, group, positions or {})
            failpoints.reach(f"bus.in_transaction/{transactional_id}")
            return offsets

        return await self._file.write(work)

    async def committed(self, group: str, topics: Sequence[str]) -> dict[TopicPartition, int]:
        found = await self._file.read(lambda db: groups.committed(db, group))
        return {tp: position for tp, position in found.items() if tp.topic in topics}

    async def ends(self, topics: Sequence[str]) -> dict[TopicPartition, int]:
        return {tail.tp: tail.next for tail in await self._tails(topics)}

    async def begins(self, topics: Sequence[str]) -> dict[TopicPartition, int]:
        return {tail.tp: tail.begin for tail in await self._tails(topics)}

    async def offsets_at(self, topic: str, timestamp_ms: int) -> dict[TopicPartition, int]:
        return await self._file.read(
            lambda db: {tail.tp: log.offset_at(db, tail, timestamp_ms) for tail in log.tails(db, topic)}
        )

    async def read_range(self, tp: TopicPartition, start: int, end: int) -> AsyncIterator[Delivery]:
        position = start
        while position < end:
            at = {tp: position}
            deliveries, after = await self._file.read(lambda db: log.read(db, at, RANGE_RECORDS))  # noqa: B023 - awaited here
            for delivery in deliveries:
                if delivery.offset >= end:
                    return
                yield delivery
            if not deliveries:
                return
            position = after[tp]

    async def _tails(self, topics: Sequence[str]) -> list[log.Tail]:
        return await self._file.read(lambda db: [tail for topic in topics for tail in log.tails(db, topic)])

    async def _sweep(self) -> None:
        """Retention, every SWEEP_MS of writing: before the append, so that its failure is not taken for the
        append's.
        """
        now_ms = self._clock.now_ms()
        if abs(now_ms - self._swept_ms) >= SWEEP_MS and not await self._file.write(
            lambda db: log.sweep(db, now_ms)
        ):
            self._swept_ms = now_ms


class SqliteTransactor:
    def __init__(self, bus: SqliteBus, transactional_id: str, epoch: int) -> None:
        self._bus = bus
        self._id = transactional_id
        self._epoch = epoch

    async def commit(
        self, messages: Sequence[Message], *, group: str | None = None, positions: Positions | None = None
    ) -> list[int]:
        return await self._bus.commit_transaction(self._id, self._epoch, messages, group, positions)

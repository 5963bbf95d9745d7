"""One SQLite file as a log that many processes share: schema, connections, waiting, and what SQLite's errors
mean.

Not here: what is stored (`log`, `groups`).

WAL mode: readers never wait for writers, one writer at a time. `synchronous=NORMAL`: a commit is in the
operating system's hands when it returns, so it survives the death of any process at any instant; a power
failure may take the last commits, whole transactions from the end, never the middle. That is what a Kafka
broker with its default flush settings promises on one machine.

Calls run on two threads of their own (one that writes, one that reads), so that the event loop never waits
for a disk or a lock. A bus in memory has one connection and runs its calls in the loop: nothing to wait for,
and the same order every time.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from headrace.bus.protocol import Positions
from headrace.errors import BusError, BusUnavailable

MEMORY = ":memory:"
SCHEMA_VERSION = 1
LOCK_WAIT_MS = 10_000
POLL_MS_MIN = 4.0  # a loop of eight readers at 1 ms took a sixth of a core from its trainer
POLL_MS_MAX = (
    50.0  # 20 looks a second at `PRAGMA data_version`: an idle reader takes half a percent of a core
)
WAL_PAGES = 4000  # a checkpoint, and its sync of the disk, every 16 MB
WAL_BYTES_KEPT = 64 << 20

_SCHEMA = """
CREATE TABLE topics (
    name TEXT PRIMARY KEY, retention_ms INTEGER NOT NULL, compacted INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE partitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, partition INTEGER NOT NULL,
    begin INTEGER NOT NULL DEFAULT 0, next INTEGER NOT NULL DEFAULT 0, last_ms INTEGER NOT NULL DEFAULT 0,
    records INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0, UNIQUE (topic, partition));
CREATE TABLE records (
    place INTEGER PRIMARY KEY, timestamp_ms INTEGER NOT NULL, key BLOB, value BLOB, headers BLOB NOT NULL);
CREATE TABLE newest (
    partition_id INTEGER, key BLOB, offset INTEGER NOT NULL, dies_ms INTEGER,
    PRIMARY KEY (partition_id, key)) WITHOUT ROWID;
CREATE INDEX tombstones ON newest (dies_ms) WHERE dies_ms IS NOT NULL;
CREATE TABLE transactional (id TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (name TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE members (
    group_name TEXT, member_id TEXT, incarnation TEXT NOT NULL, topics BLOB NOT NULL,
    session_ms INTEGER NOT NULL, alive_until_ms INTEGER NOT NULL,
    PRIMARY KEY (group_name, member_id)) WITHOUT ROWID;
CREATE TABLE assignments (
    group_name TEXT, topic TEXT, partition INTEGER, member_id TEXT NOT NULL, since INTEGER NOT NULL,
    PRIMARY KEY (group_name, topic, partition)) WITHOUT ROWID;
CREATE TABLE positions (
    group_name TEXT, topic TEXT, partition INTEGER, position INTEGER NOT NULL,
    PRIMARY KEY (group_name, topic, partition)) WITHOUT ROWID;
"""

_T = TypeVar("_T")


class Heads(NamedTuple):
    """What a commit may have moved. `version`: another number after every commit."""

    version: int
    ends: dict[tuple[str, int], int]
    """Of each partition of a topic: the offset that its next record gets."""
    generations: dict[str, int]
    """Of each consumer group."""

    def beyond(self, positions: Positions) -> bool:
        """There is something to read, or to be told, at one of `positions`."""
        return any(self.ends.get(tp) != position for tp, position in positions.items())


class LogFile:
    """An opened file. `write` and `read` run a function of a connection inside one transaction."""

    def __init__(self, path: str, *, lock_wait_ms: int = LOCK_WAIT_MS) -> None:
        """Opens, creating the file and its schema when missing. Raises BusUnavailable, BusError (not a log of
        this version).

        Blocks for up to `lock_wait_ms`: call it in a thread, or for `:memory:`.
        """
        self.path = path
        self._lock_wait_ms = lock_wait_ms
        self._waiting: dict[asyncio.Future[bool], Callable[[Heads], bool]] = {}
        self._look: asyncio.TimerHandle | None = None
        self._nap_ms = POLL_MS_MIN
        self._heads = Heads(-1, {}, {})
        self._commits = 0
        self._opened: list[sqlite3.Connection] = []
        try:
            with self._named_errors():
                self._writer = self._connect()
                _create_schema(self._writer, path, lock_wait_ms)
                self._reader = self._writer if self.in_memory else self._connect()
                self._watcher = self._writer if self.in_memory else self._connect()
        except BusError:
            self._close_connections()
            raise
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="bus-write")
        self._read_thread = ThreadPoolExecutor(1, thread_name_prefix="bus-read")

    @property
    def in_memory(self) -> bool:
        return self.path == MEMORY

    async def write(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """`work` in a write transaction: committed when it returns, rolled back when it raises.

        Raises BusUnavailable that names the file when the lock does not come in time or the disk is full.
        """
        result = await self._call(
            self._write_thread, lambda: self._transaction(self._writer, "IMMEDIATE", work)
        )
        self._commits += 1
        if self._waiting:
            self._wake()
        return result

    async def read(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """`work` on one consistent snapshot of everything committed."""
        return await self._call(self._read_thread, lambda: self._transaction(self._reader, "DEFERRED", work))

    def heads(self) -> Heads:
        """As of the last commit of any process."""
        with self._named_errors():
            version = (
                self._commits
                if self.in_memory
                else self._watcher.execute("PRAGMA data_version").fetchone()[0]
            )
            if version != self._heads.version:
                ends = self._watcher.execute("SELECT topic, partition, next FROM partitions").fetchall()
                generations = self._watcher.execute("SELECT name, generation FROM groups").fetchall()
                self._heads = Heads(version, {(t, p): end for t, p, end in ends}, dict(generations))
        return self._heads

    async def wait(self, moved: Callable[[Heads], bool], deadline_s: float) -> bool:
        """True as soon as `moved(heads())`, False at `deadline_s` of the loop's clock.

        One look serves all who wait in this process: often at first and after a change, rarely later; a
        commit of this process wakes at once. Raises as `heads`.
        """
        heads = self.heads()
        if moved(heads):
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        alarm = loop.call_at(deadline_s, _answer, waiter, False)
        self._waiting[waiter] = moved
        self._nap_ms = POLL_MS_MIN
        if self._look is None and not self.in_memory:
            self._look = loop.call_later(self._nap_ms / 1000, self._watch, heads.version)
        try:
            return await waiter
        finally:
            alarm.cancel()
            del self._waiting[waiter]
            if self._look is not None and not self._waiting:
                self._look.cancel()
                self._look = None

    def _watch(self, seen: int) -> None:
        """Looks, and again after a nap."""
        version = self._wake()
        self._nap_ms = min(self._nap_ms * 1.5, POLL_MS_MAX) if version == seen else POLL_MS_MIN
        loop = asyncio.get_running_loop()
        self._look = loop.call_later(self._nap_ms / 1000, self._watch, version)

    def _wake(self) -> int:
        """Tells those who wait for what is there; the version looked at."""
        try:
            heads = self.heads()
        except BusError as error:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_exception(error)
            return self._heads.version
        for waiter, moved in self._waiting.items():
            if moved(heads):
                _answer(waiter, True)
        return heads.version

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._write_thread.shutdown()
        self._read_thread.shutdown()
        self._close_connections()

    def _close_connections(self) -> None:
        while self._opened:
            self._opened.pop().close()

    async def _call(self, thread: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
        if self.in_memory:
            return call()
        return await asyncio.get_running_loop().run_in_executor(thread, call)

    def _transaction(self, db: sqlite3.Connection, mode: str, work: Callable[[sqlite3.Connection], _T]) -> _T:
        with self._named_errors():
            db.execute(f"BEGIN {mode}")
            try:
                result = work(db)
                db.execute("COMMIT")
                return result
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self.path,
            timeout=self._lock_wait_ms / 1000,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
        )
        self._opened.append(db)
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
        db.execute(f"PRAGMA journal_size_limit={WAL_BYTES_KEPT}")
        return db

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _named(error, self.path, self._lock_wait_ms) from error


def _answer(waiter: "asyncio.Future[bool]", moved: bool) -> None:
    if not waiter.done():
        waiter.set_result(moved)


def _create_schema(db: sqlite3.Connection, path: str, lock_wait_ms: int) -> None:
    deadline_s = time.monotonic() + lock_wait_ms / 1000
    while (
        True
    ):  # the change of mode fails at once, without SQLite's own wait, when another process does the same
        try:
            db.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
    db.execute("BEGIN IMMEDIATE")
    try:
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found == 0 and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in _SCHEMA.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        elif found != SCHEMA_VERSION:
            raise BusError(
                f"{path}: expected a log of version {SCHEMA_VERSION}, got a database of version {found}"
            )
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _named(error: sqlite3.Error, path: str, lock_wait_ms: int) -> BusError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return BusUnavailable(
            f"{path}: expected the lock within {lock_wait_ms} ms, another process holds it ({error})"
        )
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return BusUnavailable(f"{path}: expected room to write, the disk is full or failing ({error})")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return BusUnavailable(f"{path}: expected a file that can be opened and written ({error})")
    return BusError(f"{path}: expected a log, SQLite says: {error}")

"""What an editor has reported and no gateway has acknowledged yet: a bounded queue in a file that survives
kill -9.

SQLite with a write-ahead log; one row an event, in order. Removed is exactly what a reply names. A full queue
lets its oldest events go, counts them, and says so: late feedback is worth less than new. The counts are in
the file too. Safe from several threads; several processes may share a file (each sends what is there, the
gateway drops what comes twice).
"""

import logging
import os
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from headrace.errors import FeedbackUnavailable
from headrace.rpc.feedback import Event

LOCK_WAIT_S: Final = 5.0
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT, event_id TEXT UNIQUE, body BLOB);
CREATE TABLE IF NOT EXISTS counts (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
"""
_decoder = msgspec.json.Decoder(Event)
_logger = logging.getLogger(__name__)


class Waiting(NamedTuple):
    number: int
    """Of the row: grows with time."""
    event: Event


class Buffer:
    """The file at `path`, at most `events_max` events. Raises FeedbackUnavailable when it can't be opened."""

    def __init__(self, path: Path, *, events_max: int) -> None:
        self._events_max = events_max
        self._lock = threading.Lock()
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # who it is and what they write is theirs
            self._db = sqlite3.connect(
                path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA secure_delete = ON")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise FeedbackUnavailable(f"{path}: expected a buffer for feedback: {error}") from error

    def append(self, event: Event) -> list[Event]:
        """Puts `event` at the end; an id that waits already stays where it is. Returns what was dropped to
        keep the bound. Raises FeedbackUnavailable (a full disk, a locked file): nothing is kept then."""
        body = msgspec.json.encode(event)
        with self._transaction("append") as db:
            db.execute("INSERT OR IGNORE INTO events (event_id, body) VALUES (?, ?)", (event.event_id, body))
            (count,) = db.execute("SELECT count(*) FROM events").fetchone()
            if count <= self._events_max:
                return []
            gone = db.execute(
                "DELETE FROM events WHERE number IN (SELECT number FROM events ORDER BY number LIMIT ?)"
                " RETURNING body",
                (count - self._events_max,),
            ).fetchall()
            _count(db, "dropped", len(gone))
        return [kept for (body,) in gone if (kept := _event(body)) is not None]

    def head(self, *, events_max: int, bytes_max: int) -> list[Waiting]:
        """The oldest events, at least one if there is any. Those that the disk has spoiled are let go, and
        counted as dropped."""
        with self._transaction("read") as db:
            rows = db.execute("SELECT number, body FROM events ORDER BY number LIMIT ?", (events_max,))
            found: list[Waiting] = []
            spoiled: list[int] = []
            size = 0
            for number, body in rows.fetchall():
                kept = _event(body)
                if kept is None:
                    spoiled.append(number)
                    continue
                size += len(body)
                if found and size > bytes_max:
                    break
                found.append(Waiting(number, kept))
            if spoiled:
                _logger.error("feedback buffer %s: spoiled events: dropped=%d", self._path, len(spoiled))
                db.executemany("DELETE FROM events WHERE number = ?", [(number,) for number in spoiled])
                _count(db, "dropped", len(spoiled))
        if spoiled and not found:
            return self.head(events_max=events_max, bytes_max=bytes_max)
        return found

    def remove(self, numbers: Sequence[int], *, sent: int, refused: int) -> None:
        """Takes out what was answered: of them `sent` are durable, `refused` are not taken."""
        with self._transaction("remove") as db:
            db.executemany("DELETE FROM events WHERE number = ?", [(number,) for number in numbers])
            _count(db, "sent", sent)
            _count(db, "refused", refused)

    def counts(self) -> dict[str, int]:
        """`waiting` now; `sent`, `refused` and `dropped` since the file was made."""
        with self._transaction("count") as db:
            kept = dict(db.execute("SELECT name, value FROM counts").fetchall())
            (waiting,) = db.execute("SELECT count(*) FROM events").fetchone()
        return {"sent": 0, "refused": 0, "dropped": 0, **kept, "waiting": waiting}

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _transaction(self, what: str) -> "_Transaction":
        return _Transaction(self._db, self._lock, f"{self._path}: {what}")


class _Transaction:
    """One transaction of one thread; errors get the file's name."""

    def __init__(self, db: sqlite3.Connection, lock: threading.Lock, place: str) -> None:
        self._db = db
        self._lock = lock
        self._place = place

    def __enter__(self) -> sqlite3.Connection:
        self._lock.acquire()
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            self._lock.release()
            raise FeedbackUnavailable(f"{self._place}: {error}") from error
        return self._db

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._db.execute("COMMIT")
        except sqlite3.Error as failed:
            error = failed
        finally:
            if self._db.in_transaction:  # a full disk has ended some by itself
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            self._lock.release()
        if isinstance(error, sqlite3.Error):
            raise FeedbackUnavailable(f"{self._place}: {error}") from error


def _event(body: object) -> Event | None:
    """None for a row that is none any more."""
    try:
        return _decoder.decode(body) if isinstance(body, bytes | str) else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _count(db: sqlite3.Connection, name: str, more: int) -> None:
    db.execute(
        "INSERT INTO counts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
        (name, more),
    )

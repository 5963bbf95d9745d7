"""One key for each user who lets code be stored, kept beside the gateway and never in the log: destroying it
makes all that the user's events ever stored unreadable, in every copy of the log (crypto-shredding).

AES-256-GCM; the event id and the pseudonym are authenticated with the text, so that a ciphertext cannot be
moved to another event. Keys are read from the file each time: what another process has destroyed is gone at
once.
"""

import os
import secrets
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.errors import ConfigError, FeedbackError, FeedbackUnavailable
from headrace.wire.records import Feedback

FORMAT: Final = b"\x01"
NONCE_BYTES: Final = 12
LOCK_WAIT_S: Final = 5.0


class Text(NamedTuple):
    """Code of an event."""

    text: str
    user: str
    """A pseudonym."""
    event_id: str


class TextKeys:
    """The key file at `path`, made when it is not there. Raises ConfigError without the package
    `cryptography`."""

    def __init__(self, path: Path) -> None:
        self._cipher = _cipher()
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        with self._opened() as db:
            db.execute("CREATE TABLE IF NOT EXISTS keys (user TEXT PRIMARY KEY, key BLOB) WITHOUT ROWID")

    def sealed(self, texts: Sequence[Text]) -> list[bytes]:
        """Each of `texts` encrypted under the key of its user, which is made when there is none: one look at
        the file for all of them. Raises FeedbackUnavailable."""
        keys = self._keys_of({text.user for text in texts}) if texts else {}
        return [self._sealed(text, keys[text.user]) for text in texts]

    def _sealed(self, text: Text, key: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        body = text.text.encode(errors="replace")
        return bytes(
            FORMAT + nonce + self._cipher(key).encrypt(nonce, body, _context(text.user, text.event_id))
        )

    def opened(self, record: Feedback) -> str:
        """The text of `record`. Raises FeedbackError when its user was forgotten, or it was changed."""
        place = f"feedback {record.event_id}: text"
        key = self._key_of(record.user)
        if key is None:
            raise FeedbackError(f"{place}: expected the key of {record.user}, it was destroyed")
        sealed = record.text
        if sealed[:1] != FORMAT:
            raise FeedbackError(f"{place}: expected format 1, got {sealed[:1]!r}")
        nonce, body = sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        try:
            return str(
                self._cipher(key).decrypt(nonce, body, _context(record.user, record.event_id)).decode()
            )
        except Exception as error:  # of `cryptography`, which is imported late
            raise FeedbackError(f"{place}: does not fit its key: {type(error).__name__}") from error

    def forget(self, user: str) -> bool:
        """Destroys the key of `user`, overwriting it in the file. False when there was none."""
        with self._opened() as db:
            return db.execute("DELETE FROM keys WHERE user = ?", (user,)).rowcount > 0

    def rotations(self) -> list[str]:
        """Of the secrets under whose pseudonyms there are keys."""
        with self._opened() as db:
            return [
                rotation
                for (rotation,) in db.execute(
                    "SELECT DISTINCT substr(user, 1, instr(user, '-') - 1) FROM keys ORDER BY 1"
                )
            ]

    def _key_of(self, user: str) -> bytes | None:
        with self._opened() as db:
            found = db.execute("SELECT key FROM keys WHERE user = ?", (user,)).fetchone()
        return None if found is None else bytes(found[0])

    def _keys_of(self, users: Collection[str]) -> dict[str, bytes]:
        with self._opened() as db:
            db.executemany(
                "INSERT OR IGNORE INTO keys VALUES (?, ?)", [(u, secrets.token_bytes(32)) for u in users]
            )
            look = "SELECT key FROM keys WHERE user = ?"
            return {user: bytes(db.execute(look, (user,)).fetchone()[0]) for user in users}

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            db = sqlite3.connect(self._path, timeout=LOCK_WAIT_S)
        except sqlite3.Error as error:
            raise FeedbackUnavailable(f"{self._path}: users' keys cannot be opened: {error}") from error
        try:
            # No write-ahead log: a deleted key must not live on beside the file.
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("PRAGMA secure_delete = ON")
            with db:
                yield db
        except sqlite3.Error as error:
            raise FeedbackUnavailable(f"{self._path}: users' keys: {error}") from error
        finally:
            db.close()


def _context(user: str, event_id: str) -> bytes:
    return f"{user} {event_id}".encode()


def _cipher() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError(
            "gateway.store_text: expected the package `cryptography`, which is not installed"
        ) from error
    return AESGCM

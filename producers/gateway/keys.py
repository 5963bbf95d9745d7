"""Who may publish, and how much: named tokens, and a token bucket for each name.

A token is kept as its SHA-256 alone and compared in constant time. Not here: transport, pseudonyms.
"""

import hashlib
import hmac
import os
import re
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError, FeedbackOverloaded, FeedbackUnauthenticated

VARIABLE: Final = "HEADRACE_FEEDBACK_TOKENS"
"""`NAME TOKEN`, several separated by commas, instead of a file of such lines."""
TOKEN_CHARS_MIN: Final = 16
BURST_S: Final = 2.0
"""A key that was quiet may send so many seconds' worth at once."""
_LINE: Final = re.compile(rf"([A-Za-z0-9._@-]{{1,64}})\s+(\S{{{TOKEN_CHARS_MIN},}})")


class Bucket:
    """Events that one key may still send; refills with time."""

    def __init__(self, events_per_s: float, now_s: float) -> None:
        self._rate = events_per_s
        self._size = events_per_s * BURST_S
        self._left = self._size
        self._at_s = now_s

    def take(self, events: int, now_s: float) -> None:
        """Raises FeedbackOverloaded that says when `events` will be there. A batch larger than the bucket
        passes when the bucket is full, and is owed."""
        self._left = min(self._size, self._left + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        lacking = min(events, self._size) - self._left
        if lacking > 0:
            raise FeedbackOverloaded(
                f"rate: expected at most {self._rate:g} events a second, got more",
                retry_after_ms=1 + int(1000 * lacking / self._rate),
            )
        self._left -= events


class Key:
    """One name that may publish."""

    def __init__(self, name: str, digest: bytes, bucket: Bucket) -> None:
        self.name = name
        self.digest = digest
        self.bucket = bucket


class Keys:
    """All of them. Without any, everybody is `local`: for a gateway that only this machine reaches."""

    def __init__(self, tokens: dict[str, str], *, events_per_s: float) -> None:
        self._keys = [Key(name, _digest(token), Bucket(events_per_s, 0.0)) for name, token in tokens.items()]
        self._nobody = None if self._keys else Key("local", b"", Bucket(events_per_s, 0.0))

    @property
    def open(self) -> bool:
        """Nobody needs a token."""
        return self._nobody is not None

    def of(self, authorization: str) -> Key:
        """The key of an `Authorization` header. Raises FeedbackUnauthenticated, which never shows the
        token."""
        if self._nobody is not None:
            return self._nobody
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise FeedbackUnauthenticated("authorization: expected 'Bearer TOKEN', got none")
        digest = _digest(token.strip())
        found = None
        for key in self._keys:  # all of them, whichever fits
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise FeedbackUnauthenticated("authorization: expected a token of this gateway, got another")
        return found


def load(path: str, *, events_per_s: float) -> Keys:
    """The keys of the file at `path`, or of the environment. Raises ConfigError with the line."""
    place, lines = path or VARIABLE, os.environ.get(VARIABLE, "").split(",")
    if path:
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: tokens cannot be read: {error}") from error
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None or found[1] in tokens:
            raise ConfigError(
                f"{place}:{number}: expected 'NAME TOKEN' with a new name and at least {TOKEN_CHARS_MIN} "
                "characters of token"
            )
        tokens[found[1]] = found[2]
    if path and not tokens:
        raise ConfigError(f"{path}: expected at least one token, got none")
    return Keys(tokens, events_per_s=events_per_s)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()

"""Who may publish, and how much: named tokens, and a token bucket for each name.

A token is kept as its SHA-256 alone and found by it: how long that takes tells nothing of a token, and is the
same for ten names and for ten thousand. Not here: transport, pseudonyms.
"""

import hashlib
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError, FeedbackOverloaded, FeedbackUnauthenticated

VARIABLE: Final = "HEADRACE_FEEDBACK_TOKENS"
"""`NAME TOKEN` or `NAME TOKEN own`, several separated by commas, instead of a file of such lines."""
TOKEN_CHARS_MIN: Final = 16
BURST_S: Final = 2.0
"""A key that was quiet may send so many seconds' worth at once."""
_LINE: Final = re.compile(rf"([A-Za-z0-9._@-]{{1,64}})\s+(\S{{{TOKEN_CHARS_MIN},}})(\s+own)?")


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
    """One name that may publish. `own`: for itself alone, whatever user its events claim."""

    def __init__(self, name: str, bucket: Bucket, *, own: bool = False) -> None:
        self.name = name
        self.own = own
        self.bucket = bucket


class Keys:
    """All of them, by token. Without any, everybody is `local`: for a gateway that only this machine
    reaches. `own`: names of which no token vouches for others."""

    def __init__(self, tokens: dict[str, str], *, events_per_s: float, own: Collection[str] = ()) -> None:
        self._keys = {
            _digest(token): Key(name, Bucket(events_per_s, 0.0), own=name in own)
            for name, token in tokens.items()
        }
        self._nobody = None if self._keys else Key("local", Bucket(events_per_s, 0.0))

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
        found = self._keys.get(_digest(token.strip()))
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
    taken, own = set(), set()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None or found[1] in tokens or found[2] in taken:
            raise ConfigError(
                f"{place}:{number}: expected 'NAME TOKEN' or 'NAME TOKEN own' with a new name and a new "
                f"token of at least {TOKEN_CHARS_MIN} characters"
            )
        tokens[found[1]] = found[2]
        taken.add(found[2])
        if found[3]:
            own.add(found[1])
    if path and not tokens:
        raise ConfigError(f"{path}: expected at least one token, got none")
    return Keys(tokens, events_per_s=events_per_s, own=own)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()

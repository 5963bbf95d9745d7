"""A region's hot cache in front of its store, in Redis: a blob of weights crosses the ocean once.

`CachedBlobs.get` answers as `Blobs.get` does, checked against the SHA-256 whatever the source. Redis is never
needed: away, full or wrong, or `timeout_s` late with an answer, and the store gives the blob. Of several
relays that miss the same blob at once, one fetches and the others wait for it, within bounds. Not for
writers; it holds no truth and may be emptied at any time.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final, Self

from headrace import log
from headrace.errors import ConfigError
from headrace.store.blobs import BlobReader

if TYPE_CHECKING:
    from redis.asyncio import Redis

_logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 0.25
"""For each answer of Redis, the connection included."""
BLOB_BYTES_MAX: Final = 64 << 20
"""Larger blobs are not cached: a quarter of the memory that docker-compose.yml gives Redis."""
KEPT_MS: Final = 3_600_000
"""An hour: a relay that restarts wants the newest snapshot and the deltas after it."""
LOCK_MS: Final = 5_000
"""Renewed while its holder fetches, so this is how long the others wait for a holder that died."""
WAIT_S: Final = 60.0
"""For another relay's fetch; then each fetches for itself."""
POLL_S: Final = 0.05
PIECE_BYTES: Final = 4 << 20
"""Values travel in pieces, each within `timeout_s`: 16 MiB/s is enough."""
TOO_LARGE: Final = b"\0"
"""Stands for a blob over the bound, so that nobody waits for it."""


class _StoreAlone(Exception):
    """The store has to answer: Redis does not, or the blob is over the bound."""


class CachedBlobs:
    """Blobs as one region reads them. Make one with `CachedBlobs.open`; it is an async context manager."""

    def __init__(
        self,
        blobs: BlobReader,
        redis: "Redis",
        *,
        blob_bytes_max: int,
        kept_ms: int,
        lock_ms: int,
        wait_s: float,
        timeout_s: float,
    ) -> None:
        self._blobs = blobs
        self._redis = redis
        self._blob_bytes_max = blob_bytes_max
        self._kept_ms = kept_ms
        self._lock_ms = lock_ms
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._name = secrets.token_hex(8)
        self._away = False

    @classmethod
    def open(
        cls,
        blobs: BlobReader,
        address: str,
        *,
        blob_bytes_max: int = BLOB_BYTES_MAX,
        kept_ms: int = KEPT_MS,
        lock_ms: int = LOCK_MS,
        wait_s: float = WAIT_S,
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """`blobs` behind the Redis at `address` (`redis://HOST:PORT/DB`, `rediss://`, `unix://`), which need
        not be there. Raises ConfigError."""
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        try:  # one retry: a connection that Redis closed meanwhile is no fault
            # `timeout_s` is ours: the client's own goes through `asyncio.wait_for`, which loses a cancel
            # that comes together with the answer (bpo-37658, mended in Python 3.12)
            redis = Redis.from_url(
                address, retry=Retry(NoBackoff(), 1), socket_timeout=None, socket_connect_timeout=None
            )
        except ValueError as error:
            raise ConfigError(f"relay.cache: expected redis://HOST:PORT/DB or the like: {error}") from error
        return cls(
            blobs,
            redis,
            blob_bytes_max=blob_bytes_max,
            kept_ms=kept_ms,
            lock_ms=lock_ms,
            wait_s=wait_s,
            timeout_s=timeout_s,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._redis.aclose()

    async def get(self, uri: str, sha256: str) -> bytes:
        """The bytes at `uri`, whose SHA-256 is `sha256`. Raises StoreError and StoreUnavailable as
        `Blobs.get` does; a fault of Redis is a warning when it begins, no more."""
        deadline_s = time.monotonic() + self._wait_s
        with contextlib.suppress(_StoreAlone):
            while time.monotonic() < deadline_s:
                data = await self._read(sha256)
                if data is not None:
                    return data
                if await self._ask(self._redis.set(_lock(sha256), b"", nx=True, px=self._lock_ms)):
                    return await self._fetch(uri, sha256)
                await asyncio.sleep(POLL_S)
        return await self._blobs.get(uri, sha256)

    async def _fetch(self, uri: str, sha256: str) -> bytes:
        """With the lock held. Losing it would only mean that another relay fetches too."""
        fetched = asyncio.Event()
        renewal = asyncio.create_task(self._renew(sha256, fetched))
        try:
            data = await self._read(sha256, locked=True)  # filled between our look and our lock
            if data is None:
                data = await self._blobs.get(uri, sha256)
                with contextlib.suppress(_StoreAlone):
                    await self._fill(sha256, data)
            return data
        finally:
            fetched.set()
            await renewal
            with contextlib.suppress(_StoreAlone):
                await self._ask(self._redis.delete(_lock(sha256)))

    async def _renew(self, sha256: str, fetched: asyncio.Event) -> None:
        """Never cancelled in the middle of a command: a client that loses the cancellation would renew for
        ever."""
        with contextlib.suppress(_StoreAlone):
            while not await _within(self._lock_ms / 3_000, fetched):
                await self._ask(self._redis.pexpire(_lock(sha256), self._lock_ms))

    async def _read(self, sha256: str, *, locked: bool = False) -> bytes | None:
        """The cached bytes if they are right. Wrong ones are deleted by the holder of the lock alone: anyone
        else might delete what it has put right meanwhile."""
        key = _key(sha256)
        size: int = await self._ask(self._redis.strlen(key))
        if not size:
            return None
        if size <= self._blob_bytes_max:
            pieces = [
                await self._ask(self._redis.getrange(key, start, start + PIECE_BYTES - 1))
                for start in range(0, size, PIECE_BYTES)
            ]
            data = b"".join(pieces)
            if await asyncio.to_thread(_sha256, data) == sha256:
                return data
            if data == TOO_LARGE:
                raise _StoreAlone
        if locked:
            log.event(_logger, "cache_corrupt", level=logging.WARNING, sha256=sha256, bytes=size)
            await self._ask(self._redis.delete(key))
        return None

    async def _fill(self, sha256: str, data: bytes) -> None:
        """Whole or not at all: the pieces are put together under a name of this relay's own."""
        kept = data if len(data) <= self._blob_bytes_max else TOO_LARGE
        staged = f"{_key(sha256)}:{self._name}"
        await self._ask(self._redis.set(staged, kept[:PIECE_BYTES], px=self._kept_ms))
        for start in range(PIECE_BYTES, len(kept), PIECE_BYTES):
            await self._ask(self._redis.append(staged, kept[start : start + PIECE_BYTES]))
        await self._ask(self._redis.rename(staged, _key(sha256)))  # keeps the time that is left

    async def _ask(self, command: Awaitable[Any]) -> Any:
        """Redis's answer. Raises _StoreAlone when there is none in time."""
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await command
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            if not self._away:
                reason = f"{type(error).__name__} {error}".strip()
                log.event(_logger, "cache_away", level=logging.WARNING, reason=reason)
            self._away = True
            raise _StoreAlone from error
        if self._away:
            log.event(_logger, "cache_back")
        self._away = False
        return answer


def _key(sha256: str) -> str:
    return f"headrace:blob:{sha256}"


def _lock(sha256: str) -> str:
    return f"headrace:fetch:{sha256}"


async def _within(seconds: float, event: asyncio.Event) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

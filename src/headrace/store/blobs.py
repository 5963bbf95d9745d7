"""Content-addressed blobs in an object store (obstore: `file://`, `memory://`, `s3://`, `gs://`, `az://` …).

A blob's `uri` is its path inside the store (`blobs/ab/<sha256>`), relative on purpose: a run directory may be
moved and a region may hold a copy, the log stays right. A blob never changes; what its bytes mean is the
business of whoever wrote it (weights, checkpoints, claims). Marks (`marks/…`) are small objects beside them
that say what a store is for. Not here: which blobs are needed (`consumers.sweep`), locks, caches.

Durable against the death of a process (whole objects only: obstore writes a file beside and renames it); on
`file://` the machine's own crash is covered as far as its file system orders renames.
"""

import asyncio
import functools
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from headrace.errors import ConfigError, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

BLOB_BYTES_MAX: Final = 4 << 30
DEADLINE_S: Final = 120.0
"""For one try of one call; a full snapshot over a slow line fits."""
TRIES_MAX: Final = 4
BACKOFF_S: Final = 0.2
"""Before the second try; doubles."""

GRACE_MS: Final = 3_600_000
"""An hour: who puts a blob has to have named it by then, or a sweep takes it."""

_SHA256: Final = re.compile("[0-9a-f]{64}")
_UNFINISHED: Final = re.compile(r"[0-9a-f]{64}#\d+")
"""How obstore names a file before it has its own name."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Blob:
    """Where a blob lies and what it holds. `sha256` is hex."""

    uri: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as the store lists it. `modified_ms` is by the store's own clock."""

    uri: str
    bytes: int
    modified_ms: int


class BlobReader(Protocol):
    """What a reader of blobs needs: `Blobs`, or `store.cache.CachedBlobs` in front of it."""

    async def get(self, uri: str, sha256: str) -> bytes: ...


class Blobs:
    """A store of blobs. Make one with `Blobs.open`."""

    def __init__(
        self, store: "ObjectStore", address: str, *, blob_bytes_max: int, deadline_s: float, backoff_s: float
    ) -> None:
        self._store = store
        self.address = address
        self._blob_bytes_max = blob_bytes_max
        self._deadline_s = deadline_s
        self._backoff_s = backoff_s

    @classmethod
    def open(
        cls,
        address: str,
        *,
        blob_bytes_max: int = BLOB_BYTES_MAX,
        deadline_s: float = DEADLINE_S,
        backoff_s: float = BACKOFF_S,
    ) -> Self:
        """The store at `address`; a `file://` directory is made when missing. Raises ConfigError."""
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url

        try:
            if address.startswith("file://"):
                store: ObjectStore = LocalStore.from_url(address, mkdir=True)
            else:
                store = from_url(address)
        except (BaseError, ValueError, OSError) as error:
            raise ConfigError(
                f"store {address!r}: expected file://DIR, s3://… or the like: {error}"
            ) from error
        return cls(store, address, blob_bytes_max=blob_bytes_max, deadline_s=deadline_s, backoff_s=backoff_s)

    async def put(self, data: bytes, *, halfway: Callable[[], None] | None = None) -> Blob:
        """The blob of `data`, once it was read back and found right. Safe to call twice.

        `halfway` is called when half of it was handed to the store. Raises StoreError (too large, read back
        wrong) and StoreUnavailable.
        """
        sha256 = await asyncio.to_thread(_sha256, data)
        blob = Blob(_uri(sha256), sha256, len(data))
        if len(data) > self._blob_bytes_max:
            raise StoreError(f"{blob.uri}: expected at most {self._blob_bytes_max} bytes, got {len(data)}")
        # Written even when it is there already: a sweep goes by how long ago that was, and its writer has yet
        # to name it.
        await self._try(blob.uri, lambda: self._write(blob.uri, data, halfway))
        if not await self._holds(blob):
            raise StoreError(f"{self.address}: {blob.uri}: written, but not read back as it was")
        return blob

    async def get(self, uri: str, sha256: str) -> bytes:
        """The bytes at `uri`, whose SHA-256 is `sha256`. Raises StoreError (no name of a blob, missing, too
        large, of another hash) and StoreUnavailable."""
        # Both come out of records: a path that the store chokes on must not look like a store that is away.
        if not _SHA256.fullmatch(sha256) or uri != _uri(sha256):
            raise StoreError(
                f"{self.address}: expected blobs/XX/SHA256 and SHA256, got {uri[:80]!r} and {sha256[:80]!r}"
            )
        data = await self._try(uri, lambda: self._read(uri))
        found = await asyncio.to_thread(_sha256, data)
        if found != sha256:
            raise StoreError(
                f"{self.address}: {uri}: expected SHA-256 {sha256}, got {found} ({len(data)} bytes)"
            )
        return data

    async def delete(self, uri: str) -> None:
        """Forgets the blob at `uri`; no error when there is none."""

        async def forget() -> None:
            from obstore import delete_async
            from obstore.exceptions import NotFoundError

            try:
                await delete_async(self._store, uri)
            except (NotFoundError, FileNotFoundError):
                return

        await self._try(uri, forget)

    async def listing(self) -> AsyncIterator[Stored]:
        """Every blob of the store, in no order; none that is still being written, and nothing that lies there
        under another kind of name: that is not ours. Raises StoreUnavailable."""
        from obstore import list as list_objects
        from obstore.exceptions import BaseError

        try:
            async for objects in list_objects(self._store, "blobs"):
                for found in objects:
                    name = found["path"].rpartition("/")[2]
                    if _SHA256.fullmatch(name) and found["path"] == _uri(name):
                        yield _stored(found)
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"{self.address}: expected a listing: {error}") from error

    async def look(self, uri: str) -> Stored:
        """What the store says of one object now. Raises StoreError when there is none."""
        from obstore import head_async

        return _stored(await self._try(uri, lambda: head_async(self._store, uri)))

    async def mark(self, name: str, data: bytes) -> Stored:
        """Writes the small object `marks/<name>`, which unlike a blob may change, and gives what the store
        says of it: its time is the store's now."""
        uri = f"marks/{name}"
        await self._try(uri, lambda: self._write(uri, data, None))
        return await self.look(uri)

    async def marks(self, prefix: str) -> dict[str, bytes]:
        """The marks whose names begin with the folder `prefix`, by what follows it."""
        from obstore import list as list_objects
        from obstore.exceptions import BaseError

        try:
            uris = [
                found["path"] async for some in list_objects(self._store, f"marks/{prefix}") for found in some
            ]
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"{self.address}: expected a listing: {error}") from error
        return {
            uri.removeprefix(f"marks/{prefix}/"): await self._try(uri, functools.partial(self._read, uri))
            for uri in uris
        }

    def unfinished(self, before_ms: int) -> list[Path]:
        """Files that a killed writer left beside its blob, last written before `before_ms` (file:// only; an
        object store drops what was never completed by its own lifecycle rules)."""
        if not self.address.startswith("file://"):
            return []
        root = Path(url2pathname(urlsplit(self.address).path)) / "blobs"
        found = [path for path in root.glob("*/*#*") if _UNFINISHED.fullmatch(path.name)]
        return [path for path in found if _written_ms(path, gone=before_ms) < before_ms]

    async def _holds(self, blob: Blob) -> bool:
        try:
            await self.get(blob.uri, blob.sha256)
        except StoreUnavailable:
            raise
        except StoreError:
            return False
        return True

    async def _write(self, uri: str, data: bytes, halfway: Callable[[], None] | None) -> None:
        from obstore import put_async

        await put_async(self._store, uri, data if halfway is None else _halves(data, halfway))

    async def _read(self, uri: str) -> bytes:
        from obstore import get_async

        answer = await get_async(self._store, uri)
        size = answer.meta["size"]
        if size > self._blob_bytes_max:
            raise StoreError(
                f"{self.address}: {uri}: expected at most {self._blob_bytes_max} bytes, got {size}"
            )
        return bytes(await answer.bytes_async())

    async def _try(self, uri: str, call: Callable[[], Awaitable[_T]]) -> _T:
        """What `call` gives, tried `TRIES_MAX` times, each within the deadline."""
        from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError

        for remaining in reversed(range(TRIES_MAX)):
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await call()
            except (NotFoundError, FileNotFoundError) as error:
                raise StoreError(f"{self.address}: {uri}: expected a blob, found none") from error
            except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
                raise StoreError(f"{self.address}: {uri}: not allowed: {error}") from error
            except (BaseError, OSError) as error:  # TimeoutError is an OSError
                if not remaining:
                    reason = f"{type(error).__name__} {error}".strip()
                    raise StoreUnavailable(
                        f"{self.address}: {uri}: {TRIES_MAX} tries failed, the last with {reason}"
                    ) from error
            await asyncio.sleep(self._backoff_s * 2 ** (TRIES_MAX - 1 - remaining))
        raise AssertionError("the last try returns or raises")


async def _halves(data: bytes, between: Callable[[], None]) -> AsyncIterator[bytes]:
    middle = len(data) // 2
    yield data[:middle]
    between()
    yield data[middle:]


def _stored(found: "ObjectMeta") -> Stored:
    modified_ms = int(found["last_modified"].timestamp() * 1000)
    return Stored(found["path"], found["size"], modified_ms)


def _written_ms(path: Path, *, gone: int) -> int:
    """When the file was last written; `gone` of one that its writer has finished, and named, meanwhile."""
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return gone


def _uri(sha256: str) -> str:
    return f"blobs/{sha256[:2]}/{sha256}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

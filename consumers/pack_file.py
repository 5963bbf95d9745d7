"""The container of a pack: named parts in one file, each hashed, the whole sealed. It knows no step.

    {"format": "headrace.pack", "version": 1}
    {"part": name, "bytes": n, "encoding": "zstd" or "plain", "stored": m, "sha256": of the stored bytes}
    bin bin bin ...
    {"part": ...
    {"seal": SHA-256 of everything before it}

A stream of MessagePack objects that any MessagePack reader can walk. A part's stored bytes, one zstandard
frame as a rule, are cut into `CHUNK_BYTES`. Who changes a byte is found out; who writes a whole pack anew is
not, for nothing is signed. Here: writing. Reading: `consumers.pack_reader`; what the parts mean:
`consumers.pack`.
"""

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Literal, Self

import msgpack  # type: ignore[import-untyped]
import msgspec
import zstandard

from headrace.errors import ConfigError, StoreError

FORMAT: Final = "headrace.pack"
VERSION: Final = 1
CHUNK_BYTES: Final = 1 << 20
"""What is in memory of a part while a file is walked."""
PART_BYTES_MAX: Final = 4 << 30
"""Of one part, decompressed: as large as a blob may be."""
RATIO_MAX: Final = 16
RATIO_FREE_BYTES: Final = 4 << 20
"""A part decompresses to at most `RATIO_MAX` times its stored bytes, and so much on top. Float32 weights
shrink by less than 4 even with fresh moments, and records are compressed already."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,255}")
_SEAL_HEAD: Final[bytes] = msgpack.packb({"seal": bytes(32)})[:-32]
SEAL_BYTES: Final = len(_SEAL_HEAD) + 32
_LEVEL: Final = 3


class Head(msgspec.Struct, frozen=True):
    """In front of each part's chunks."""

    part: str
    bytes: int
    encoding: Literal["zstd", "plain"]
    stored: int
    sha256: str


def bytes_max(stored: int) -> int:
    """Bytes that so many stored ones may decompress to."""
    return min(PART_BYTES_MAX, RATIO_MAX * stored + RATIO_FREE_BYTES)


class PackWriter:
    """Writes beside `path` and takes its place when sealed: the file is whole or not there.

    Use as `with PackWriter(path) as pack`; leaving without an error seals it. Raises ConfigError when `path`
    exists, unless `force`.
    """

    def __init__(self, path: Path, *, force: bool = False) -> None:
        self._path = path
        self._force = force
        self._staged = path.with_name(f".{path.name}.{os.getpid()}.staged")
        self._names: set[str] = set()
        self._hash = hashlib.sha256()
        self.bytes = SEAL_BYTES
        """Of the file, so far, when it is sealed."""

    def __enter__(self) -> Self:
        self._refuse_existing()
        try:
            self._file: BinaryIO = self._staged.open("wb")
        except OSError as error:
            raise ConfigError(f"{self._path}: expected a place to write to: {error.strerror}") from error
        self._write(msgpack.packb({"format": FORMAT, "version": VERSION}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._seal()
        finally:
            with suppress(OSError):  # a full disk has been reported by the write before
                self._file.close()
            self._staged.unlink(missing_ok=True)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str, content: bytes) -> None:
        """One part. A name is given once. Raises StoreError when it is too large."""
        assert NAME.fullmatch(name) and name not in self._names, name
        if len(content) > PART_BYTES_MAX:
            raise StoreError(
                f"{self._path}: part {name!r}: expected at most {PART_BYTES_MAX} bytes, got {len(content)}"
            )
        encoding: Literal["zstd", "plain"] = "zstd"
        stored = zstandard.ZstdCompressor(level=_LEVEL).compress(content)
        if len(content) > bytes_max(len(stored)):  # a reader would take it for a bomb
            stored, encoding = content, "plain"
        sha256 = hashlib.sha256(stored).hexdigest()
        self._write(msgspec.msgpack.encode(Head(name, len(content), encoding, len(stored), sha256)))
        for start in range(0, len(stored), CHUNK_BYTES):
            self._write(msgpack.packb(stored[start : start + CHUNK_BYTES]))
        self._names.add(name)

    def _seal(self) -> None:
        try:
            self._file.write(_SEAL_HEAD + self._hash.digest())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._refuse_existing()
            self._staged.replace(self._path)
        except OSError as error:
            raise StoreError(f"{self._path}: can't be written: {error.strerror}") from error

    def _refuse_existing(self) -> None:
        if self._path.exists() and not self._force:
            raise ConfigError(f"{self._path}: exists already; give --force to write it anew")

    def _write(self, content: bytes) -> None:
        self._hash.update(content)
        self.bytes += len(content)
        try:
            self._file.write(content)
        except OSError as error:
            raise StoreError(f"{self._path}: can't be written: {error.strerror}") from error

"""Reading a pack's container, whoever wrote it.

The file is walked once before any use, in bounded memory, and every byte of it is covered by a hash. What is
stored is hashed before it is decompressed, and decompresses to what it declares or not at all. Names are only
looked up, never paths; unknown parts are passed over; nothing is unpickled. Errors name the file and the part
or byte. The format: `consumers.pack_file`.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self

import msgpack  # type: ignore[import-untyped]
import msgspec
import zstandard

from headrace.consumers.pack_file import (
    CHUNK_BYTES,
    FORMAT,
    NAME,
    PART_BYTES_MAX,
    SEAL_BYTES,
    VERSION,
    Head,
    bytes_max,
)
from headrace.errors import ConfigError, StoreError

PARTS_MAX: Final = 200_000
_TEXT_MAX: Final = 80
"""Of a foreign file's content in a message."""


class _Place(NamedTuple):
    """A part, and the byte at which its chunks begin."""

    head: Head
    at: int


class PackReader:
    """The parts of a pack that was found whole. Use as `with PackReader(path) as pack`.

    Raises StoreError when the file is not a pack or was changed, ConfigError when there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts: dict[str, _Place] = {}

    def __enter__(self) -> Self:
        try:
            self._file: BinaryIO = self.path.open("rb")
        except OSError as error:
            raise ConfigError(f"{self.path}: expected a pack: {error.strerror}") from error
        try:
            self._walk()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @property
    def names(self) -> list[str]:
        """In the order of the file."""
        return list(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def stored(self, name: str) -> int:
        """Bytes that a part takes in the file, without its head."""
        return self._parts[name].head.stored

    def read(self, name: str) -> bytes:
        """The content of a part, hashed again. Raises StoreError."""
        if name not in self._parts:
            raise StoreError(f"{self.path}: expected a part {name!r}, found none")
        head, at = self._parts[name]
        self._file.seek(at)
        stored = b"".join(self._chunks(_Objects(self._file, at), head))
        return stored if head.encoding == "plain" else self._decompressed(head, stored)

    def _decompressed(self, head: Head, stored: bytes) -> bytes:
        where = f"part {head.part!r}"
        try:
            declared = zstandard.frame_content_size(stored)
            if declared != head.bytes:  # what the frame declares is allocated, whatever the head says
                raise self._fault(where, f"a frame of {head.bytes} bytes", f"one that declares {declared}")
            content: bytes = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self._fault(where, "one zstandard frame", str(error)) from error
        return content

    def _walk(self) -> None:
        """Fills `_parts`, checking every byte of the file on the way."""
        objects = _Objects(self._file, 0)
        self._check_format(objects)
        while True:
            at = objects.at
            found = self._next(objects, "a part or the seal")
            if isinstance(found, dict) and "seal" in found:
                break
            head = self._head(found, f"byte {at}")
            start = objects.at
            for _ in self._chunks(objects, head):
                pass
            self._parts[head.part] = _Place(head, start)
        rest = os.fstat(self._file.fileno()).st_size - at - SEAL_BYTES
        if rest:
            raise self._fault(
                f"byte {at + SEAL_BYTES}", "the end of the file after its seal", f"{rest} bytes more"
            )
        if found["seal"] != self._sha256(at):
            raise self._fault(
                f"bytes 0 to {at}", "the content that the seal names", "another: it was changed"
            )

    def _check_format(self, objects: "_Objects") -> None:
        found = self._next(objects, f"the head of a {FORMAT}")
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise self._fault("byte 0", f"the head of a {FORMAT}", repr(found)[:_TEXT_MAX])
        if found.get("version") != VERSION:
            version = repr(found.get("version"))[:_TEXT_MAX]
            raise self._fault(
                "byte 0", f"version {VERSION} of {FORMAT}", f"{version}: another Headrace wrote it"
            )

    def _head(self, found: Any, where: str) -> Head:
        """The head of a part, within bounds."""
        try:
            head = msgspec.convert(found, Head)
        except msgspec.ValidationError as error:
            raise self._fault(where, "the head of a part", str(error)) from error
        if not NAME.fullmatch(head.part):
            raise self._fault(where, "the name of a part", repr(head.part[:_TEXT_MAX]))
        where = f"part {head.part!r}: {where}"
        if head.part in self._parts:
            raise self._fault(where, "it once", "it again")
        if len(self._parts) >= PARTS_MAX:
            raise self._fault(where, f"at most {PARTS_MAX} parts", "more")
        if not 0 <= head.stored <= PART_BYTES_MAX:
            raise self._fault(where, f"at most {PART_BYTES_MAX} bytes", f"{head.stored}")
        if head.encoding == "plain" and head.bytes != head.stored:
            raise self._fault(where, f"{head.stored} bytes, as stored", f"{head.bytes}")
        if not 0 <= head.bytes <= max(head.stored, bytes_max(head.stored)):
            most = bytes_max(head.stored)
            raise self._fault(where, f"at most {most} bytes out of {head.stored}", f"{head.bytes}")
        return head

    def _chunks(self, objects: "_Objects", head: Head) -> Iterator[bytes]:
        """The stored bytes of a part, checked against their hash at the end."""
        found = hashlib.sha256()
        missing = head.stored
        while missing:
            where = f"part {head.part!r}: byte {objects.at}"
            expected = f"{min(missing, CHUNK_BYTES)} bytes"
            chunk = self._next(objects, f"{expected} of part {head.part!r}")
            if not isinstance(chunk, bytes) or len(chunk) != min(missing, CHUNK_BYTES):
                got = f"{len(chunk)}" if isinstance(chunk, bytes) else repr(chunk)[:_TEXT_MAX]
                raise self._fault(where, expected, got)
            found.update(chunk)
            missing -= len(chunk)
            yield chunk
        if found.hexdigest() != head.sha256:
            raise self._fault(
                f"part {head.part!r}", f"SHA-256 {head.sha256[:64]}", f"{found.hexdigest()}: it was changed"
            )

    def _next(self, objects: "_Objects", expected: str) -> Any:
        where = f"byte {objects.at}"
        try:
            return objects.next()
        except msgpack.OutOfData as error:
            raise self._fault(where, expected, "the end of the file") from error
        except (ValueError, msgpack.UnpackException) as error:
            raise self._fault(where, expected, f"{type(error).__name__} {error}".strip()) from error

    def _sha256(self, end: int) -> bytes:
        """Of the file's first `end` bytes."""
        total = hashlib.sha256()
        self._file.seek(0)
        while end and (block := self._file.read(min(end, CHUNK_BYTES))):
            total.update(block)
            end -= len(block)
        return total.digest()

    def _fault(self, where: str, expected: str, got: str) -> StoreError:
        return StoreError(f"{self.path}: {where}: expected {expected}, got {got}")


class _Objects:
    """MessagePack objects from a file, small ones only; `start`: the byte where the file stands now."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self._start = start
        self._unpacker = msgpack.Unpacker(
            file,
            read_size=1 << 16,
            max_buffer_size=CHUNK_BYTES + (1 << 17),
            max_bin_len=CHUNK_BYTES,
            max_str_len=1 << 12,
            max_map_len=32,
            max_array_len=0,
            max_ext_len=0,
        )

    @property
    def at(self) -> int:
        """The byte at which the next object begins."""
        return self._start + int(self._unpacker.tell())

    def next(self) -> Any:
        """Raises ValueError, msgpack.UnpackException (OutOfData at the end)."""
        return self._unpacker.unpack()

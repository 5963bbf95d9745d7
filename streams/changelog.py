"""States of a processor as records of a compacted topic, and back. Pure: bytes in, bytes out.

A key has a *head*: its state, its timer, and the newest items of its `log`. Once the head passes `HEAD_BYTES`
the items move into a *segment*, written once and never touched again, so that a group of a thousand steps
costs about its own size in writes and not its square. A segment too large for one record is cut into chunks.

    group-7            head: state, timer, chunks of each segment, the newest items
    group-7 \\0 0.0     segment 0, chunk 0
    group-7 \\0 1.0     segment 1, chunk 0
    group-7 \\0 1.1     segment 1, chunk 1

Segments are written before the head that names them: a host without transactions may crash between the two.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import zstandard

from headrace.errors import WireError
from headrace.streams.processor import Processor

HEAD_BYTES = 64 << 10
"""A head larger than this sheds its items: at most this much is written again for each batch that touches a
key."""
CHUNK_BYTES = 900_000
"""Of one record: the limit of a value (`wire.topics.RECORD_BYTES_MAX`) less some room."""
COMPRESS_BYTES_MIN = 512
STATE_BYTES_MAX = 1 << 30
"""Decompressed, of one segment: far above what a processor may hold for one key."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # no MessagePack map or array begins with 0x28

S = TypeVar("S")
Entry = tuple[bytes, bytes | None]
"""Key and value of a changelog record; None forgets the key."""


class Head(msgspec.Struct, Generic[S], array_like=True, frozen=True):
    state: S
    timer_ms: int | None
    chunks: tuple[int, ...]
    """Number of chunks of each segment."""


@dataclass(slots=True)
class Cell:
    """The state of a key in memory, and how much of its log already lies in segments."""

    state: Any
    timer_ms: int | None = None
    chunks: tuple[int, ...] = ()
    sealed: int = 0
    """Items of `state.log` in those segments."""
    weight: int = 0
    """What the state weighed when it was last looked at."""


@dataclass(slots=True)
class Restored:
    cells: dict[str, Cell] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Keys whose segments are not all there, and what is missing; their cells hold what is left."""
    stray: list[bytes] = field(default_factory=list)
    """Keys of segments that no head names."""


class Changelog:
    """Encodes and decodes the cells of one processor."""

    def __init__(self, processor: Processor) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        head_type: Any = Head.__class_getitem__(processor.state_type)  # type: ignore[attr-defined]
        self._heads: msgspec.msgpack.Decoder[Head[Any]] = msgspec.msgpack.Decoder(head_type)
        item_type: Any = list.__class_getitem__(processor.item_type)
        self._items: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(item_type)

    def write(self, key: str, cell: Cell, before: tuple[int, ...]) -> list[Entry]:
        """The records that bring the changelog to `cell`; `before` are the chunks it names now. Seals items
        in `cell`."""
        entries: list[Entry] = []
        log = getattr(cell.state, "log", None)
        if log is None:
            cell.chunks, cell.sealed = (), 0
            head = self._head(cell, cell.state)
        else:
            head = self._head(cell, msgspec.structs.replace(cell.state, log=log[cell.sealed :]))
            if len(head) > HEAD_BYTES:
                entries += self._seal(key, cell, log)
                head = self._head(cell, msgspec.structs.replace(cell.state, log=[]))
        if before:
            now = set(_chunk_keys(key, cell.chunks))
            entries += [(name, None) for name in _chunk_keys(key, before) if name not in now]
        entries.append((key.encode(), _compressed(head)))
        return entries

    def forget(self, key: str, before: tuple[int, ...]) -> list[Entry]:
        return [*((name, None) for name in _chunk_keys(key, before)), (key.encode(), None)]

    def restore(self, entries: Iterable[Entry]) -> Restored:
        """The cells behind a changelog read from its oldest record to its end. Raises WireError that names
        the key."""
        values = latest(entries)
        restored = Restored()
        segments = {entry_key for entry_key in values if b"\0" in entry_key}
        for entry_key, value in values.items():
            if entry_key in segments:
                continue
            key = entry_key.decode()
            head = self._decoded(self._heads, key, value)
            cell = Cell(head.state, head.timer_ms, head.chunks)
            restored.cells[key] = cell
            for number, count in enumerate(head.chunks):
                names = [_chunk_key(key, number, chunk) for chunk in range(count)]
                segments.difference_update(names)
                absent = [name for name in names if name not in values]
                if absent:
                    restored.lost[key] = f"state: {absent[0]!r} is no longer in the changelog"
                    continue
                items = self._decoded(self._items, key, b"".join(values[name] for name in names))
                cell.state.log[cell.sealed : cell.sealed] = items
                cell.sealed += len(items)
        restored.stray = sorted(segments)
        return restored

    def thawed(self, key: str, value: bytes) -> Cell:
        """The cell in a head that names no segments. Raises WireError."""
        head = self._decoded(self._heads, key, value)
        assert not head.chunks, key
        return Cell(head.state, head.timer_ms)

    def _head(self, cell: Cell, state: Any) -> bytes:
        return self._encoder.encode(Head(state, cell.timer_ms, cell.chunks))

    def _seal(self, key: str, cell: Cell, log: list[Any]) -> list[Entry]:
        value = _compressed(self._encoder.encode(log[cell.sealed :]))
        chunks = [value[start : start + CHUNK_BYTES] for start in range(0, len(value), CHUNK_BYTES)]
        number = len(cell.chunks)
        cell.chunks = (*cell.chunks, len(chunks))
        cell.sealed = len(log)
        return [(_chunk_key(key, number, index), chunk) for index, chunk in enumerate(chunks)]

    def _decoded(self, decoder: msgspec.msgpack.Decoder[S], key: str, value: bytes) -> S:
        try:
            return decoder.decode(_decompressed(value))
        except (msgspec.DecodeError, zstandard.ZstdError) as error:
            raise WireError(f"state of {key!r}: {error}") from error


def latest(entries: Iterable[Entry]) -> dict[bytes, bytes]:
    """What compaction keeps: the newest value of each key, in their order."""
    values: dict[bytes, bytes] = {}
    for key, value in entries:
        values.pop(key, None)
        if value is not None:
            values[key] = value
    return values


def _chunk_key(key: str, segment: int, chunk: int) -> bytes:
    return f"{key}\0{segment}.{chunk}".encode()


def _chunk_keys(key: str, chunks: tuple[int, ...]) -> list[bytes]:
    return [_chunk_key(key, number, chunk) for number, count in enumerate(chunks) for chunk in range(count)]


def _compressed(value: bytes) -> bytes:
    return value if len(value) < COMPRESS_BYTES_MIN else zstandard.ZstdCompressor(level=1).compress(value)


def _decompressed(value: bytes) -> bytes:
    if not value.startswith(_ZSTD_MAGIC):
        return value
    return zstandard.ZstdDecompressor().decompress(value, max_output_size=STATE_BYTES_MAX)

"""Records to bytes and back: MessagePack value, CloudEvents binary-mode headers, W3C `traceparent`.

Values from 512 bytes on are compressed with zstd, here and not in the broker, so that both buses carry the
same bytes and the limit is checked on what is really sent. `content-encoding: zstd-1` is a zstd frame over
the dictionary `zstd-1.dict`: the field names and usual values of the records, which weigh more in a short
step than its tokens do. That file is part of the format and never changes; a better one would be `zstd-2`.
Readers take plain `zstd` too.

Decoding is bounded: input size, decompressed size and, in msgspec, depth. The value limit is
`topics.RECORD_BYTES_MAX`; a decoded record may be `DECODED_BYTES_MAX` large.
"""

import os
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec
import zstandard

from headrace.errors import RecordTooLarge, WireError
from headrace.wire.records import Record
from headrace.wire.topics import RECORD_BYTES_MAX, TOPICS

Headers = tuple[tuple[str, bytes], ...]

COMPRESS_BYTES_MIN = 512
DECODED_BYTES_MAX = 16 * RECORD_BYTES_MAX
CONTENT_TYPE = b"application/msgpack"
ENCODING = b"zstd-1"

_T = TypeVar("_T", bound=Record)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Record], msgspec.msgpack.Decoder[Record]] = {}
_dictionary = zstandard.ZstdCompressionDict(
    Path(__file__).with_name("zstd-1.dict").read_bytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT
)
_dictionary.precompute_compress(level=1)


def type_name(record_type: type[Record]) -> str:
    """`headrace.RolloutStep.v1`: the CloudEvents type of a record."""
    return f"headrace.{record_type.__name__}.v{record_type.VERSION}"


def traceparent(parent: bytes | None = None) -> bytes:
    """A W3C trace context of a new span: in the trace of `parent` if that is one, in a new trace
    otherwise."""
    trace_id = parent[3:35] if parent is not None and len(parent) == 55 else os.urandom(16).hex().encode()
    return b"00-" + trace_id + b"-" + os.urandom(8).hex().encode() + b"-01"


def encode(
    record: Record, *, source: str, now_ms: int, event_id: str | None = None, parent: bytes | None = None
) -> tuple[bytes, Headers]:
    """Value and headers of `record`.

    `event_id` (CloudEvents `id`) is stable for records that may be sent twice, random otherwise. Raises
    RecordTooLarge.
    """
    [encoded] = encode_batch(
        [record], [event_id or uuid.uuid4().hex], source=source, now_ms=now_ms, parent=parent
    )
    return encoded


def encode_batch(
    records: Sequence[Record],
    event_ids: Sequence[str],
    *,
    source: str,
    now_ms: int,
    parent: bytes | None = None,
) -> list[tuple[bytes, Headers]]:
    """Value and headers of each of `records`, as `encode`: what they share is computed once. They belong to
    one trace. Raises RecordTooLarge."""
    specversion, content_type = ("ce_specversion", b"1.0"), ("content-type", CONTENT_TYPE)
    came_from, when = ("ce_source", source.encode()), ("ce_time", _rfc3339(now_ms))
    types = {kind: ("ce_type", type_name(kind).encode()) for kind in set(map(type, records))}
    trace = traceparent(parent)[:36]
    spans = os.urandom(8 * len(records)).hex().encode()
    encoded = []
    for index, (record, event_id) in enumerate(zip(records, event_ids, strict=True)):
        value = _encoder.encode(record)
        headers: Headers = (
            specversion,
            ("ce_id", event_id.encode()),
            types[type(record)],
            came_from,
            when,
            content_type,
            ("traceparent", trace + spans[16 * index : 16 * index + 16] + b"-01"),
        )
        if len(value) >= COMPRESS_BYTES_MIN:
            value = zstandard.ZstdCompressor(level=1, dict_data=_dictionary).compress(value)
            headers = (*headers, ("content-encoding", ENCODING))
        if len(value) > RECORD_BYTES_MAX:
            name = type(record).__name__
            raise RecordTooLarge(
                f"{name}: expected at most {RECORD_BYTES_MAX} bytes encoded, got {len(value)}"
            )
        encoded.append((value, headers))
    return encoded


def decode(topic: str, value: bytes, headers: Iterable[tuple[str, bytes]]) -> Record:
    """The record in `value`, by its `ce_type`; any type that `topic` carries.

    Raises WireError that says what was expected and what came; the caller puts the position in front (`at`).
    """
    known = dict(headers)
    name = known.get("ce_type", b"").decode(errors="replace")
    types = {type_name(t): t for t in TOPICS[topic].records} if topic in TOPICS else {}
    if name not in types:
        raise WireError(f"ce_type: expected one of {sorted(types)}, got {name!r}")
    return decode_as(types[name], value, known.get("content-encoding"))


def decode_as(record_type: type[_T], value: bytes, encoding: bytes | None = None) -> _T:
    """`value` as `record_type`. Raises WireError."""
    try:
        return _decoder(record_type).decode(_inflate(value, encoding))
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"{record_type.__name__}: {error}") from error


def encode_plain(record: msgspec.Struct) -> bytes:
    """The MessagePack bytes alone, uncompressed: state of processors, sizes, tests."""
    return _encoder.encode(record)


def at(topic: str, partition: int, offset: int) -> str:
    """How a position is written in messages: `rollout.steps[3]@1042`."""
    return f"{topic}[{partition}]@{offset}"


def _rfc3339(now_ms: int) -> bytes:
    moment = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z").encode()


def _decoder(record_type: type[_T]) -> msgspec.msgpack.Decoder[_T]:
    if record_type not in _decoders:
        _decoders[record_type] = msgspec.msgpack.Decoder(record_type)
    return _decoders[record_type]  # type: ignore[return-value]


def _inflate(value: bytes, encoding: bytes | None) -> bytes:
    if len(value) > RECORD_BYTES_MAX:
        raise RecordTooLarge(f"value: expected at most {RECORD_BYTES_MAX} bytes, got {len(value)}")
    if encoding is None:
        return value
    if encoding not in (ENCODING, b"zstd"):
        raise WireError(f"content-encoding: expected {ENCODING.decode()} or zstd, got {encoding!r}")
    dictionary = _dictionary if encoding == ENCODING else None
    try:
        size = zstandard.frame_content_size(value)
        if not 0 <= size <= DECODED_BYTES_MAX:
            raise RecordTooLarge(
                f"value: expected at most {DECODED_BYTES_MAX} bytes decompressed, announced {size}"
            )
        decompressor = zstandard.ZstdDecompressor(dict_data=dictionary)
        return decompressor.decompress(value, max_output_size=DECODED_BYTES_MAX)
    except zstandard.ZstdError as error:
        raise WireError(f"value: not zstd: {error}") from error

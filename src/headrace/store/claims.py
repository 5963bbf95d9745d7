"""Claim checks: an `Experience` too large for the log travels as a name of a blob that holds it.

`check_in` is the writer's half (`streams.hosts`), `check_out` the reader's (`consumers.training`, replay).
The blob is the MessagePack of the whole record, compressed, under its content hash: writing it twice is
writing it once.
"""

import asyncio

import msgspec
import zstandard

from headrace.errors import RecordTooLarge, StoreError
from headrace.store.blobs import BlobReader, Blobs
from headrace.wire.codec import Headers, encode, encode_plain
from headrace.wire.records import Claim, Experience, Record
from headrace.wire.topics import CLAIM_BYTES

CLAIMED_BYTES_MAX = 256 << 20
"""Decompressed: four times what the join keeps of one group."""


async def check_in(
    record: Record,
    blobs: Blobs,
    *,
    source: str,
    now_ms: int,
    event_id: str | None = None,
    parent: bytes | None = None,
) -> tuple[bytes, Headers]:
    """Value and headers as of `wire.codec.encode`; an `Experience` above `CLAIM_BYTES` is put into `blobs`
    first and only its claim goes into the value.

    The blob is durable when this returns. Safe to call twice. Raises RecordTooLarge (any other record),
    StoreError and StoreUnavailable.
    """
    try:
        value, headers = encode(record, source=source, now_ms=now_ms, event_id=event_id, parent=parent)
    except RecordTooLarge:
        if not isinstance(record, Experience):
            raise
    else:
        if len(value) <= CLAIM_BYTES or not isinstance(record, Experience):
            return value, headers
    blob = await blobs.put(await asyncio.to_thread(_packed, record))
    claim = Claim(uri=blob.uri, sha256=blob.sha256, bytes=blob.bytes)
    light = msgspec.structs.replace(record, rollouts=(), claim=claim)
    return encode(light, source=source, now_ms=now_ms, event_id=event_id, parent=parent)


async def check_out(experience: Experience, blobs: BlobReader) -> Experience:
    """`experience` with its rollouts, fetched if it carries a claim; `claim` is None in what returns.

    Raises StoreError (missing, of another hash, not the experience it should be) and StoreUnavailable.
    """
    claim = experience.claim
    if claim is None:
        return experience
    packed = await blobs.get(claim.uri, claim.sha256)
    whole = await asyncio.to_thread(_unpacked, packed, claim.uri)
    if msgspec.structs.replace(whole, rollouts=(), claim=claim) != experience:
        raise StoreError(
            f"{claim.uri}: expected the rollouts of {experience.group_id!r}, got {whole.group_id!r}"
        )
    return whole


def _packed(record: Experience) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(encode_plain(record))


def _unpacked(packed: bytes, uri: str) -> Experience:
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= CLAIMED_BYTES_MAX:
            raise StoreError(
                f"{uri}: expected at most {CLAIMED_BYTES_MAX} bytes decompressed, announced {size}"
            )
        value = zstandard.ZstdDecompressor().decompress(packed, max_output_size=CLAIMED_BYTES_MAX)
        return msgspec.msgpack.decode(value, type=Experience)
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise StoreError(f"{uri}: expected an Experience: {error}") from error

"""A pack: steps of a run in one file, for somebody without its log and its store.

    manifest                     run, steps, model, what wrote it (JSON)
    ledger/<step>                the ledger's record, as it lies on its topic: place, key, headers, bytes
    record/<topic>/<p>/<offset>  each record that was consumed, the same
    weights/<version>            the announcement of what the step made, the same
    blob/<sha256>                what the records claim, and the deltas of the announcements
    state                        the checkpoint before the first step

Here: what is in one, and `export`. Replaying one: `consumers.pack_source`; the container and its hashes:
`consumers.pack_file`.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from headrace.bus.protocol import Delivery
from headrace.consumers.batches import fetch
from headrace.consumers.pack_file import PackWriter
from headrace.consumers.replay import Source, state_before
from headrace.errors import StoreError, StoreUnavailable, WireError
from headrace.policy.model import ModelConfig
from headrace.trainer import checkpoint
from headrace.trainer.provenance import Provenance
from headrace.wire.codec import Headers, decode
from headrace.wire.records import Encoding, Experience, Record, TrainStep, WeightsPublished
from headrace.wire.topics import TRAIN_STEPS, WEIGHTS

MANIFEST: Final = "manifest"
STATE: Final = "state"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader must know before the rest. `first` to `last`: steps."""

    run: str
    first: int
    last: int
    model: ModelConfig
    written_by: Provenance


class Lying(msgspec.Struct, frozen=True, array_like=True):
    """A record as it lies on its topic."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. `without_delta`: versions whose delta is no longer in the store: should their step
    differ, the tensor can't be named."""

    path: Path
    bytes: int
    records: int
    without_delta: list[int]


async def export(
    source: Source,
    first: int,
    last: int,
    path: Path,
    *,
    now: Provenance,
    force: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
    written: Callable[[int], None] = lambda step: None,
) -> Exported:
    """Steps `first` to `last` of `source` as a pack in `path`, whole or not at all. `written` is told of each
    step. Raises ConfigError (`path` exists), TrainingError (the state before `first` can't be had),
    StoreError (records or claims that are gone)."""
    steps = [source.recorded(step) for step in range(first, last + 1)]
    with PackWriter(path, force=force) as pack:
        state = await state_before(source, first, now=now, cancelled=cancelled)
        manifest = Manifest(run=source.run_name, first=first, last=last, model=source.model, written_by=now)
        pack.add(MANIFEST, msgspec.json.encode(manifest))
        pack.add(STATE, await source.compute(lambda: checkpoint.encode(state, source.run_name)))
        async for delivery, record in _of_run(source, (TRAIN_STEPS.name, WEIGHTS.name)):
            if isinstance(record, TrainStep) and first <= record.step <= last:
                pack.add(f"ledger/{record.step}", _lying(delivery))
            elif isinstance(record, WeightsPublished) and first <= record.version <= last:
                pack.add(f"weights/{record.version}", _lying(delivery))
        records, without_delta = 0, []
        for step in steps:
            records += await _add_records(pack, source, step)
            if not await _add_delta(pack, source, step.version_to):
                without_delta.append(step.version_to)
            written(step.step)
    return Exported(path, pack.bytes, records, without_delta)


async def _of_run(source: Source, topics: tuple[str, ...]) -> AsyncIterator[tuple[Delivery, Record]]:
    """The run's records on topics that `read_ledger` has found readable."""
    begins, ends = await source.bus.begins(topics), await source.bus.ends(topics)
    for tp, end in ends.items():
        async for delivery in source.bus.read_range(tp, begins[tp], end):
            if delivery.key == source.run_name.encode():
                yield delivery, decode(delivery.topic, delivery.value or b"", delivery.headers)


async def _add_records(pack: PackWriter, source: Source, step: TrainStep) -> int:
    """The records of `step`, with what they claim."""
    malformed = {drop.group_id for drop in step.drops if drop.reason == "malformed"}
    found = await fetch(source.bus, step)
    for consumed, delivery in found.items():
        name = record_name(delivery.topic, delivery.partition, delivery.offset)
        if name not in pack:
            pack.add(name, _lying(delivery))
        try:
            record = decode(delivery.topic, delivery.value or b"", delivery.headers)
        except WireError:
            continue  # judged malformed by its bytes
        claim = record.claim if isinstance(record, Experience) else None
        if claim is None or blob_name(claim.sha256) in pack:
            continue
        try:
            pack.add(blob_name(claim.sha256), await source.blobs.get(claim.uri, claim.sha256))
        except StoreUnavailable:
            raise
        except StoreError as error:
            if consumed.group_id not in malformed:
                raise StoreError(f"{delivery.place}: claim: {error}") from error
    return len(found)


async def _add_delta(pack: PackWriter, source: Source, version: int) -> bool:
    """The delta that made `version`; False when the store no longer has it."""
    announced = source.ledger.published.get(version)
    encoding = delta_of(announced) if announced else None
    if encoding is None:
        return False
    if blob_name(encoding.sha256) in pack:
        return True
    try:
        pack.add(blob_name(encoding.sha256), await source.blobs.get(encoding.uri, encoding.sha256))
    except StoreUnavailable:
        raise
    except StoreError:
        return False
    return True


def delta_of(record: WeightsPublished) -> Encoding | None:
    return next((encoding for encoding in record.encodings if encoding.kind == "delta"), None)


def _lying(delivery: Delivery) -> bytes:
    return msgspec.msgpack.encode(
        Lying(
            delivery.topic,
            delivery.partition,
            delivery.offset,
            delivery.timestamp_ms,
            delivery.key,
            delivery.value,
            delivery.headers,
        )
    )


def record_name(topic: str, partition: int, offset: int) -> str:
    return f"record/{topic}/{partition}/{offset}"


def blob_name(sha256: str) -> str:
    return f"blob/{sha256}"

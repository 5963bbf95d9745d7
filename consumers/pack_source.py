"""A pack as a source to replay from: the same walk and the same answers as on the log it came from.

Opening one checks that it is whole and agrees with itself. Not here: its hashes (`consumers.pack_reader`),
what is in one, and writing one (`consumers.pack`).
"""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Self, TypeVar, cast

import msgspec

from headrace.bus.protocol import Bus, Delivery, TopicPartition
from headrace.consumers.ledger import Ledger
from headrace.consumers.pack import MANIFEST, STATE, Lying, Manifest, blob_name, record_name
from headrace.consumers.pack_reader import PackReader
from headrace.consumers.replay import Compute, Source, in_place
from headrace.consumers.start import check_state
from headrace.errors import PolicyError, StoreError, TrainingError, WireError
from headrace.policy.checkpoint import to_bf16, to_bytes
from headrace.trainer import checkpoint
from headrace.trainer.state import State, published
from headrace.wire.codec import at, decode
from headrace.wire.records import Encoding, Record, TrainStep, WeightsPublished

LAYERS_MAX: Final = 4096
_T = TypeVar("_T", bound=Record)


@dataclass(frozen=True, kw_only=True)
class PackedSource(Source):
    """The steps of a pack, as a source to replay from. Made by `open`."""

    first_step: int
    state: State

    @staticmethod
    def threads(pack: PackReader) -> int:
        """As the newest step was computed with. Raises StoreError."""
        manifest = _manifest(pack)
        return _step(pack, manifest, manifest.last).threads

    @classmethod
    async def open(cls, pack: PackReader, compute: Compute = in_place) -> Self:
        """Raises StoreError that names the pack and the part that is missing, of another run, or contradicts
        another."""
        manifest = _manifest(pack)
        steps = [_step(pack, manifest, number) for number in range(manifest.first, manifest.last + 1)]
        state: State = await compute(lambda: _state(pack, manifest))
        _check_chain(pack, state, steps)
        blobs = _PackedBlobs(pack)
        base = await compute(lambda: to_bytes(to_bf16(state.masters)))
        announced = _announcements(pack, manifest, state, blobs.hold(base))
        log = _PackedLog(pack)
        log.check_holds(steps)
        return cls(
            bus=cast(Bus, log),  # of a bus, the replay needs ranges only
            blobs=blobs,
            ledger=_PackedLedger(steps, announced),
            run_name=manifest.run,
            group="",
            seed=(manifest.model, published(state.masters)),
            compute=compute,
            first_step=manifest.first,
            state=state,
        )

    @property
    def begin(self) -> int:
        return self.first_step

    def recorded(self, step: int) -> TrainStep:
        last = self.ledger.version
        if not self.first_step <= step <= last:
            raise TrainingError(
                f"run {self.run_name!r}: expected a step of the pack, {self.first_step} to {last}, got {step}"
            )
        return self.ledger.steps[step - self.first_step]

    async def first(self) -> State:
        """The state before the pack's first step."""
        return self.state


class _PackedLedger(Ledger):
    """`steps[0]` is the pack's first."""

    @property
    def version(self) -> int:
        return self.steps[-1].step


class _PackedBlobs:
    """The blobs of a pack, by their hash."""

    def __init__(self, pack: PackReader) -> None:
        self._pack = pack
        self._held: dict[str, bytes] = {}

    def hold(self, content: bytes) -> Encoding:
        """Makes `content` one of them, as a full encoding."""
        sha256 = hashlib.sha256(content).hexdigest()
        self._held[sha256] = content
        return Encoding(kind="full", uri=blob_name(sha256), sha256=sha256, bytes=len(content))

    async def get(self, uri: str, sha256: str) -> bytes:
        """Raises StoreError."""
        if sha256 in self._held:
            return self._held[sha256]
        content = self._pack.read(blob_name(sha256))
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise StoreError(f"{self._pack.path}: {blob_name(sha256)}: expected its SHA-256, got {found}")
        return content


class _PackedLog:
    """The consumed records of a pack, by their place."""

    def __init__(self, pack: PackReader) -> None:
        self._pack = pack
        self._offsets: dict[tuple[str, str], list[int]] = {}
        for name in pack.names:
            kind, *place = name.split("/")
            if kind == "record" and len(place) == 3 and place[2].isdecimal():
                self._offsets.setdefault((place[0], place[1]), []).append(int(place[2]))

    def check_holds(self, steps: list[TrainStep]) -> None:
        for step in steps:
            for c in step.consumed:
                if record_name(c.topic, c.partition, c.offset) not in self._pack:
                    place = at(c.topic, c.partition, c.offset)
                    raise StoreError(
                        f"{self._pack.path}: {place}: expected the record, consumed by step {step.step},"
                        " found none"
                    )

    async def read_range(self, tp: TopicPartition, start: int, end: int) -> AsyncIterator[Delivery]:
        for offset in sorted(self._offsets.get((tp.topic, str(tp.partition)), [])):
            if start <= offset < end:
                yield _delivery(self._pack, record_name(*tp, offset), (*tp, offset))


def _manifest(pack: PackReader) -> Manifest:
    try:
        manifest = msgspec.json.decode(pack.read(MANIFEST), type=Manifest)
    except (msgspec.MsgspecError, PolicyError) as error:
        raise StoreError(f"{pack.path}: part {MANIFEST!r}: {error}") from error
    if not 1 <= manifest.model.layers <= LAYERS_MAX:  # the names of their tensors are listed
        raise StoreError(
            f"{pack.path}: part {MANIFEST!r}: expected up to {LAYERS_MAX} layers, got {manifest.model.layers}"
        )
    if not 1 <= manifest.first <= manifest.last:
        raise StoreError(
            f"{pack.path}: part {MANIFEST!r}: expected steps from 1, got {manifest.first} to {manifest.last}"
        )
    return manifest


def _state(pack: PackReader, manifest: Manifest) -> State:
    place = f"{pack.path}: part {STATE!r}"
    state = checkpoint.decode(pack.read(STATE), manifest.run, place)
    check_state(state, manifest.model, place)
    if state.step != manifest.first - 1:
        raise StoreError(f"{place}: expected the state after step {manifest.first - 1}, got {state.step}")
    return state


def _step(pack: PackReader, manifest: Manifest, number: int) -> TrainStep:
    """A ledger record; the checkpoint that it names is elsewhere."""
    record = _record(pack, f"ledger/{number}", TrainStep)
    if (record.run, record.step) != (manifest.run, number):
        raise StoreError(
            f"{pack.path}: part 'ledger/{number}': expected step {number} of run {manifest.run!r}, got step"
            f" {record.step} of {record.run!r}"
        )
    return msgspec.structs.replace(record, checkpoint=None, checkpoints_pruned=())


def _check_chain(pack: PackReader, state: State, steps: list[TrainStep]) -> None:
    root = state.root
    for step in steps:
        if step.root_before != root:
            raise StoreError(
                f"{pack.path}: part 'ledger/{step.step}': expected to begin with root {root}, got"
                f" {step.root_before}"
            )
        root = step.root_after


def _announcements(
    pack: PackReader, manifest: Manifest, state: State, base: Encoding
) -> dict[int, WeightsPublished]:
    """Those that the pack has, and one for `state`, whose weights are `base`: what the deltas start from."""
    found = {
        state.version: WeightsPublished(
            run=manifest.run,
            version=state.version,
            root=state.root,
            step=state.step,
            manifest_uri="",
            manifest_sha256="",
            encodings=(base,),
            published_ms=0,
        )
    }
    for version in range(manifest.first, manifest.last + 1):
        if f"weights/{version}" in pack:
            record = _record(pack, f"weights/{version}", WeightsPublished)
            found[version] = msgspec.structs.replace(
                record, version=version, encodings=tuple(e for e in record.encodings if e.kind == "delta")
            )
    return found


def _record(pack: PackReader, name: str, kind: type[_T]) -> _T:
    delivery = _delivery(pack, name)
    try:
        record = decode(delivery.topic, delivery.value or b"", delivery.headers)
    except WireError as error:
        raise StoreError(f"{pack.path}: part {name!r}: {delivery.place}: {error}") from error
    if not isinstance(record, kind):
        raise StoreError(f"{pack.path}: part {name!r}: expected {kind.__name__}, got {type(record).__name__}")
    return record


def _delivery(pack: PackReader, name: str, place: tuple[str, int, int] | None = None) -> Delivery:
    """The record in a part, which lay at `place`."""
    try:
        lying = msgspec.msgpack.decode(pack.read(name), type=Lying)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{pack.path}: part {name!r}: expected a record as it lies: {error}") from error
    if place is not None and (lying.topic, lying.partition, lying.offset) != place:
        got = at(lying.topic, lying.partition, lying.offset)
        raise StoreError(f"{pack.path}: part {name!r}: expected the record of that place, got {got}")
    return Delivery(**msgspec.structs.asdict(lying))

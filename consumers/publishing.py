"""A weights version into the blob store: what a replica anywhere needs to have it, before anyone is told.

Version N goes out as a delta against version N - 1, and every `full_every` versions (and at 0) as a whole
snapshot too. The announcement it returns is sent by the trainer, in the transaction of the step. Who reads
it: `consumers.weights`.
"""

from dataclasses import dataclass

import msgspec

from headrace.kernels import delta
from headrace.policy.checkpoint import to_bf16, to_bytes, weights_root
from headrace.store.blobs import Blobs
from headrace.trainer.state import State
from headrace.wire.records import Encoding, WeightsPublished


@dataclass(frozen=True, slots=True)
class Packed:
    """A version as bytes. `base` is the version that `delta` starts from."""

    version: int
    root: str
    full: bytes | None
    delta: bytes | None
    base: tuple[int, str] | None


def pack(state: State, previous: State | None, *, full_every: int) -> Packed:
    """The encodings of `state`'s weights that go out. Compute only."""
    weights = to_bf16(state.masters)
    full = previous is None or state.version % full_every == 0
    return Packed(
        version=state.version,
        root=state.root,
        full=to_bytes(weights) if full else None,
        delta=delta.encode(to_bf16(previous.masters), weights, weights_root)
        if previous is not None
        else None,
        base=(previous.version, previous.root) if previous is not None else None,
    )


async def store(blobs: Blobs, packed: Packed, *, run_name: str, now_ms: int) -> WeightsPublished:
    """Puts the encodings, then the manifest that lists them; the announcement to send. Safe to call twice.
    Raises StoreError, StoreUnavailable."""
    encodings = []
    if packed.full is not None:
        blob = await blobs.put(packed.full)
        encodings.append(Encoding(kind="full", uri=blob.uri, sha256=blob.sha256, bytes=blob.bytes))
    if packed.delta is not None and packed.base is not None:
        blob = await blobs.put(packed.delta)
        version, root = packed.base
        encodings.append(
            Encoding(
                kind="delta",
                uri=blob.uri,
                sha256=blob.sha256,
                bytes=blob.bytes,
                base_version=version,
                base_root=root,
            )
        )
    manifest = msgspec.json.encode(
        {"run": run_name, "version": packed.version, "root": packed.root, "encodings": encodings}
    )
    blob = await blobs.put(manifest)
    return WeightsPublished(
        run=run_name,
        version=packed.version,
        root=packed.root,
        step=packed.version,
        manifest_uri=blob.uri,
        manifest_sha256=blob.sha256,
        encodings=tuple(encodings),
        published_ms=now_ms,
    )

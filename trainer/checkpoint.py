"""A trainer's whole state as bytes and back: tensors as safetensors, the rest as JSON in their header.

Nothing here is unpickled. Where the bytes lie, under which hash, and which checkpoint is the newest is said
by the ledger and the blob store.
"""

import json
from typing import Any, Final

import msgspec

from headrace.errors import StoreError
from headrace.policy.model import Weights
from headrace.trainer.state import State

FORMAT: Final = 1
_PARTS: Final = ("masters", "moment1", "moment2")


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    run: str
    step: int
    updates: int
    positions: dict[str, int]
    seen: list[tuple[str, int]]
    root: str
    baselines: dict[str, float] = {}


def encode(state: State, run: str) -> bytes:
    """Equal states give equal bytes."""
    from safetensors.torch import save

    head = _Head(
        format=FORMAT,
        run=run,
        step=state.step,
        updates=state.updates,
        positions=dict(sorted(state.positions.items())),
        seen=list(state.seen.items()),
        root=state.root,
        baselines=dict(sorted(state.baselines.items())),
    )
    tensors = {
        f"{part}.{name}": tensor.contiguous()
        for part in _PARTS
        for name, tensor in sorted(getattr(state, part).items())
    }
    # One entry: safetensors writes several in no fixed order.
    return bytes(save(tensors, metadata={"headrace": msgspec.json.encode(head).decode()}))


def decode(data: bytes, run: str | None, place: str) -> State:
    """The state in `data`. Raises StoreError, beginning with `place`, if it is none of this run (of any run
    if None)."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        head = msgspec.json.decode(_metadata(data)["headrace"], type=_Head)
    except (SafetensorError, msgspec.MsgspecError, ValueError, KeyError) as error:
        raise StoreError(f"{place}: expected a checkpoint, got {len(data)} bytes: {error!r}") from error
    if (head.format, head.run) != (FORMAT, run or head.run):
        raise StoreError(
            f"{place}: expected a checkpoint of run {run or head.run!r} in format {FORMAT},"
            f" got run {head.run!r} in format {head.format}"
        )
    parts: dict[str, Weights] = {part: {} for part in _PARTS}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part not in parts:
            raise StoreError(f"{place}: expected tensors of {', '.join(_PARTS)}, got {name!r}")
        parts[part][rest] = tensor
    if not parts["masters"].keys() == parts["moment1"].keys() == parts["moment2"].keys():
        raise StoreError(f"{place}: expected two moments for every weight")
    return State(
        step=head.step,
        **parts,
        updates=head.updates,
        positions=head.positions,
        seen=dict(head.seen),
        root=head.root,
        baselines=head.baselines,
    )


def _metadata(data: bytes) -> dict[str, Any]:
    """safetensors: 8 bytes of length, then a JSON header (its `load` from bytes gives no metadata)."""
    length = int.from_bytes(data[:8], "little")
    metadata: dict[str, Any] = json.loads(data[8 : 8 + length])["__metadata__"]
    return metadata

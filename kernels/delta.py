"""Lossless delta of bf16 weights against a base: which elements changed, and by how many steps of the last
place.

A reinforcement-learning step moves few bf16 values, most of them by one step; so a delta is much smaller than
the weights. Elements are compared and added as 16-bit integers, never as floats: -0, infinities and NaN
payloads survive. It knows no versions, store or topic.

Form: MessagePack header (length-prefixed), then one zstandard frame: for each tensor in the order of the
names, gaps between changed elements as unsigned bytes (255 = no change here, go on 255), then the differences
modulo 2^16 as two planes of bytes.
"""

import hashlib
import struct
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import PolicyError

MAGIC: Final = b"HRD1"
_LEVEL: Final = 1  # higher levels gain nothing on this form


class TensorDelta(msgspec.Struct, frozen=True, array_like=True):
    """One tensor's part of the frame: how many gap bytes, how many changed elements."""

    name: str
    shape: list[int]
    gaps: int
    changes: int


class DeltaHeader(msgspec.Struct, frozen=True):
    """Both roots, the tensors, and SHA-256 of the compressed frame."""

    base_root: str
    root: str
    tensors: list[TensorDelta]
    frame_sha256: str


Root = Callable[[dict[str, Tensor]], str]


def encode(base: dict[str, Tensor], new: dict[str, Tensor], root: Root) -> bytes:
    """The delta that turns `base` into `new` (names and shapes must be equal; values are taken as bf16).

    `root` names weights (`policy.checkpoint.weights_root`). Raises PolicyError if the tensors don't match.
    """
    if {n: t.shape for n, t in base.items()} != {n: t.shape for n, t in new.items()}:
        raise PolicyError("delta: expected weights of the base's names and shapes")
    parts: list[bytes] = []
    tensors: list[TensorDelta] = []
    for name in sorted(new):
        step = _integers(new[name]) - _integers(base[name])
        places = np.flatnonzero(step)
        gaps = _gaps(places)
        changed = step[places]
        parts += [
            gaps.tobytes(),
            (changed & 255).astype(np.uint8).tobytes(),
            (changed >> 8).astype(np.uint8).tobytes(),
        ]
        tensors.append(TensorDelta(name, list(new[name].shape), gaps.size, places.size))
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(parts))
    header = msgspec.msgpack.encode(
        DeltaHeader(root(base), root(new), tensors, hashlib.sha256(frame).hexdigest())
    )
    return MAGIC + struct.pack("<I", len(header)) + header + frame


def read_header(blob: bytes) -> DeltaHeader:
    """The header of a delta. Raises PolicyError if the bytes are none, or damaged."""
    return _open(blob)[0]


def apply(base: dict[str, Tensor], blob: bytes, root: Root) -> dict[str, Tensor]:
    """The new weights in bf16; `base` is untouched.

    Raises PolicyError if the delta is damaged, was made for another base, or does not lead to the root that
    it names.
    """
    header, frame = _open(blob)
    got = root(base)
    if got != header.base_root:
        raise PolicyError(f"delta: expected base {header.base_root}, got {got}")
    _check_fits(header, base)
    content = _content(frame, sum(tensor.gaps + 2 * tensor.changes for tensor in header.tensors))
    result = {}
    at = 0
    for tensor in header.tensors:
        gaps = np.frombuffer(content, np.uint8, tensor.gaps, at)
        low = np.frombuffer(content, np.uint8, tensor.changes, at + tensor.gaps)
        high = np.frombuffer(content, np.uint8, tensor.changes, at + tensor.gaps + tensor.changes)
        at += tensor.gaps + 2 * tensor.changes
        values = _integers(base[tensor.name]).copy()
        places = _places(gaps)
        if len(places) != tensor.changes or (len(places) and places[-1] >= values.size):
            raise PolicyError(
                f"delta: {tensor.name}: expected {tensor.changes} places below {values.size},"
                f" got {len(places)}, the last {places[-1:].tolist()}"
            )
        values[places] += low.astype(np.uint16) | high.astype(np.uint16) << 8
        result[tensor.name] = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).view(tensor.shape)
    got = root(result)
    if got != header.root:
        raise PolicyError(f"delta: expected to reach root {header.root}, got {got}")
    return result


def _check_fits(header: DeltaHeader, base: dict[str, Tensor]) -> None:
    """The base's names and shapes, and no more content than its elements can need."""
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if shapes != {name: list(tensor.shape) for name, tensor in base.items()} or len(header.tensors) != len(
        base
    ):
        raise PolicyError("delta: expected tensors of the base's names and shapes")
    for tensor in header.tensors:
        elements = base[tensor.name].numel()
        if not 0 <= tensor.changes <= tensor.gaps <= elements:
            raise PolicyError(
                f"delta: {tensor.name}: expected changes up to gaps up to {elements} elements,"
                f" got {tensor.changes} and {tensor.gaps}"
            )


def _content(frame: bytes, size: int) -> bytes:
    if not size:
        return b""
    try:
        announced = zstandard.frame_content_size(frame)
        if announced != size:  # what the frame announces is allocated, whatever max_output_size says
            raise PolicyError(f"delta: expected {size} bytes of content, announced {announced}")
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise PolicyError(f"delta: expected a zstandard frame: {error}") from error


def _open(blob: bytes) -> tuple[DeltaHeader, bytes]:
    if blob[: len(MAGIC)] != MAGIC or len(blob) < len(MAGIC) + 4:
        raise PolicyError(f"delta: expected {MAGIC!r} at the start, got {blob[:4]!r} ({len(blob)} bytes)")
    start = len(MAGIC) + 4
    length = struct.unpack("<I", blob[len(MAGIC) : start])[0]
    try:
        header = msgspec.msgpack.decode(blob[start : start + length], type=DeltaHeader)
    except msgspec.MsgspecError as error:
        raise PolicyError(f"delta: expected a header of {length} bytes: {error}") from error
    frame = blob[start + length :]
    got = hashlib.sha256(frame).hexdigest()
    if got != header.frame_sha256:
        raise PolicyError(f"delta: expected a frame of SHA-256 {header.frame_sha256}, got {got}")
    return header, frame


def _integers(tensor: Tensor) -> NDArray[np.uint16]:
    flat = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).flatten()
    return flat.numpy().view(np.uint16)


def _gaps(places: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Distances between neighbours (the first from -1, less one) in bytes; 255 says: 255 further, and no
    change there.
    """
    distance = np.diff(places, prepend=-1) - 1
    runs = distance // 255
    ends = np.cumsum(runs + 1)
    gaps = np.full(int(ends[-1]) if len(ends) else 0, 255, np.uint8)
    gaps[ends - 1] = distance % 255
    return gaps


def _places(gaps: NDArray[np.uint8]) -> NDArray[np.int64]:
    last = gaps != 255
    places: NDArray[np.int64] = (np.cumsum(gaps, dtype=np.int64) + np.cumsum(last) - 1)[last]
    return places

"""The delta of weights is lossless on bit patterns, and refuses what it was not made for."""

import hashlib
import random
import struct

import msgspec
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import PolicyError
from headrace.kernels import delta
from headrace.policy.checkpoint import weights_root

Weights = dict[str, torch.Tensor]


def _bits(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def _pattern(weights: Weights) -> dict[str, list[int]]:
    return {name: tensor.view(torch.int16).flatten().tolist() for name, tensor in weights.items()}


def test_minus_zero_infinities_and_nan_payloads_survive() -> None:
    """Every bit pattern arrives: +0 to -0, to infinity, and to two different NaNs."""
    base = {"w": _bits([0x0000, 0x8000, 0x3F80, 0x3F80, 0x3F80])}
    new = {"w": _bits([0x8000, 0x0000, 0x7F80, 0x7FC1, -1])}
    assert _pattern(delta.apply(base, delta.encode(base, new, weights_root), weights_root)) == _pattern(new)


@settings(max_examples=60)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    """Any weights from any base, sparse or dense, with gaps around 255."""
    size = data.draw(st.sampled_from([0, 1, 254, 255, 256, 511, 1500]))
    draw = random.Random(data.draw(st.integers(0, 1000)))
    base_bits = [draw.randrange(-(2**15), 2**15) for _ in range(size)]
    places = data.draw(st.lists(st.integers(0, max(size - 1, 0)), max_size=8)) if size else []
    new_bits = list(base_bits)
    for place in places:
        new_bits[place] = data.draw(st.integers(-(2**15), 2**15 - 1))
    base, new = ({"a": _bits(bits), "b": _bits([1, 2]).view(2, 1)} for bits in (base_bits, new_bits))
    blob = delta.encode(base, new, weights_root)
    result = delta.apply(base, blob, weights_root)
    assert _pattern(result) == _pattern(new)
    assert result["b"].shape == (2, 1)


def test_a_sparse_step_is_small() -> None:
    """One element in a hundred moved by one last place: more than 40 times smaller than the weights."""
    base = {"w": _bits(list(range(1000, 21000)))}
    moved = base["w"].view(torch.int16).clone()
    moved[::100] += 1
    blob = delta.encode(base, {"w": moved.view(torch.bfloat16)}, weights_root)
    assert len(blob) * 40 < 2 * 20000


def test_refusals_begin_with_the_place() -> None:
    """A wrong base, other shapes, flipped and missing bytes are refused; nothing is half applied."""
    base = {"w": _bits([1, 2, 3, 4])}
    new = {"w": _bits([1, 2, 3, 9])}
    other = {"w": _bits([1, 2, 3, 5])}
    blob = delta.encode(base, new, weights_root)
    with pytest.raises(PolicyError, match=r"delta: expected base"):
        delta.apply(other, blob, weights_root)
    with pytest.raises(PolicyError, match=r"delta: expected weights"):
        delta.encode(base, {"w": _bits([1])}, weights_root)
    for broken in (blob[:-1], blob[:-1] + bytes([blob[-1] ^ 1]), blob[:6], b"", b"HRD1" + bytes(9)):
        with pytest.raises(PolicyError, match=r"^delta: expected"):
            delta.apply(base, broken, weights_root)
    assert base["w"].view(torch.int16).tolist() == [1, 2, 3, 4]


def test_a_delta_that_leads_elsewhere_is_refused() -> None:
    """The root is checked after applying: a header that names another result does not pass."""
    base, new = {"w": _bits([1, 2])}, {"w": _bits([1, 3])}
    blob = delta.encode(
        base, new, lambda weights: hashlib.sha256(repr(_pattern(weights)).encode()).hexdigest()
    )
    header = delta.read_header(blob)
    assert header.root != weights_root(new)
    with pytest.raises(PolicyError, match=r"delta: expected to reach root"):
        delta.apply(base, blob, lambda weights: header.base_root)


def _forged(tensor: delta.TensorDelta, frame: bytes) -> bytes:
    root = weights_root({"w": _bits([0] * 4)})
    sha256 = hashlib.sha256(frame).hexdigest()
    header = msgspec.msgpack.encode(delta.DeltaHeader(root, root, [tensor], sha256))
    return delta.MAGIC + struct.pack("<I", len(header)) + header + frame


BOMB = struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1 << 40) + b"\1\0\0"  # announces a TiB


@pytest.mark.parametrize(
    ("name", "shape", "gaps", "changes", "frame"),
    [
        ("v", [4], 1, 1, zstandard.compress(b"\0\1\0")),
        ("w", [5], 1, 1, zstandard.compress(b"\0\1\0")),
        ("w", [4], 1, 1, zstandard.compress(b"\4\1\0")),
        ("w", [4], -1, 2, zstandard.compress(b"\0\1\0")),
        ("w", [4], 2, 1, zstandard.compress(b"\0\0\1\0")),
        ("w", [4], 9, 1, zstandard.compress(b"\xff" * 8 + b"\0\1\0")),
        ("w", [4], 1, 1, b"no frame"),
        ("w", [4], 1, 1, BOMB),
    ],
)
def test_a_header_that_lies_is_refused(
    name: str, shape: list[int], gaps: int, changes: int, frame: bytes
) -> None:
    """Names, shapes, counts, places and sizes come from outside: each lie is a PolicyError, nothing else."""
    blob = _forged(delta.TensorDelta(name, shape, gaps, changes), frame)
    with pytest.raises(PolicyError, match=r"^delta: "):
        delta.apply({"w": _bits([0] * 4)}, blob, weights_root)

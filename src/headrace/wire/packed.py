"""Arrays of numbers as little-endian bytes, without numpy.

Readers with numpy use `numpy.frombuffer(value, "<u4")` and the like on the same bytes.
"""

import sys
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4
"""Of a packed token id."""
_SWAP = sys.byteorder == "big"


def _pack(code: str, values: Iterable[float]) -> bytes:
    packed = array(code, values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, value: bytes) -> array:  # type: ignore[type-arg]
    unpacked: array = array(code)  # type: ignore[type-arg]
    unpacked.frombytes(value)
    if _SWAP:
        unpacked.byteswap()
    return unpacked


def pack_u32(values: Iterable[int]) -> bytes:
    """Each value in [0, 2^32)."""
    return _pack("I", values)


def unpack_u32(value: bytes) -> list[int]:
    """Raises ValueError when the length is not a multiple of 4."""
    return list(_unpack("I", value))


def pack_f32(values: Iterable[float]) -> bytes:
    return _pack("f", values)


def unpack_f32(value: bytes) -> list[float]:
    """Raises ValueError when the length is not a multiple of 4."""
    return list(_unpack("f", value))

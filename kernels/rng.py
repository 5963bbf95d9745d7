"""Random numbers as a function of a key and a counter: the same ones whatever the batch, the order or the
number of threads.

Integer mixing in 64 bits (the finaliser of SplitMix64, Steele et al. 2014); no state and no seed to carry
along. It draws no tokens: the sampler takes argmax(logits / T + gumbel). Not for secrets.

R rows  V vocabulary
"""

import functools
import hashlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_LANES = (
    16  # columns are computed in multiples of this, so that no element falls into a vector function's tail
)
_ROWS = 16  # rows at a time: the integers of one block stay in the cache


def key(*parts: str | int) -> int:
    """A 64-bit key (signed) for a purpose, e.g. `key(run, group, member)`; different parts give different
    keys.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def uniform_bits(keys: Tensor | int, counters: Tensor) -> Tensor:
    """64 random bits as int64 for each counter (int64); `keys` (int64) broadcasts against `counters`."""
    return _mix(_mix((counters + 1) * _GOLDEN) + keys)  # + 1: zero would mix to zero


def uniform(keys: Tensor | int, counters: Tensor) -> Tensor:
    """float64 in [0, 1), multiples of 2^-53, exact on every machine."""
    return _shift(uniform_bits(keys, counters), 11).to(torch.float64) * 2.0**-53


@torch.inference_mode()
def gumbel(key_R: Tensor, position_R: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise, float32 `[R, V]`: row r depends on `key_R[r]`, `position_R[r]` (int64) alone."""
    row_R1 = uniform_bits(key_R, position_R).unsqueeze(1)
    columns_V = _columns(-(-vocabulary // _LANES) * _LANES)
    noise_RV = torch.empty(len(key_R), len(columns_V))
    for start in range(0, len(key_R), _ROWS):
        bits_RV = _shift(_mix(columns_V + row_R1[start : start + _ROWS]), 32)
        # v in (0, 1): in -log1p(-v) the smallest v, which make the largest noise, keep full precision.
        v_RV = bits_RV.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
        noise_RV[start : start + _ROWS] = v_RV.neg_().log1p_().neg_().log_().neg_()
    return noise_RV[:, :vocabulary]


@functools.cache
def _columns(count: int) -> Tensor:
    return _mix((torch.arange(count) + 1) * _GOLDEN)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser; int64 products wrap as they should."""
    z = (z ^ _shift(z, 30)).mul_(_MIX_1)
    z ^= _shift(z, 27)
    z *= _MIX_2
    return z.bitwise_xor_(_shift(z, 31))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right (torch's own copies the sign)."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)

"""Operations whose result for a row has the same bits whatever stands beside it: batch size, padding,
chunking, thread count.

Rules (measured in benchmarks/batch_invariance.md): float32 only; no matrix product with fewer than 16 rows;
attention in key blocks of 64, aligned at the start of the prefix and again at the start of the sequence's own
part, with one maximum over all visible keys and the blocks' partial sums added in order, so that a masked
block adds an exact zero; x / (1 + exp(-x)) for SiLU. Everything is plain torch, so gradients flow. It knows
no model and no weights' names. Used by policy; the readable truth is `kernels.reference`.

B batch  M query rows  S keys (a multiple of 64)  K keys of a block  D head width  N rows  I inputs  O outputs
C channels  V vocabulary
"""

import hashlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 16  # rows of a matrix product are padded to this: below it the BLAS picks other kernels
KEY_BLOCK = 64  # keys per partial sum of attention


def padded(count: int, tile: int) -> int:
    """The smallest multiple of `tile` that is not below `count`."""
    return -(-count // tile) * tile


def pad_rows(x_NI: Tensor) -> Tensor:
    """`x` with zero rows appended up to a multiple of `ROW_TILE`."""
    missing = -x_NI.shape[0] % ROW_TILE
    return F.pad(x_NI, (0, 0, 0, missing)) if missing else x_NI


def linear(x_NI: Tensor, w_OI: Tensor) -> Tensor:
    """`x @ w.T`, float32 `[N, O]`; outputs are padded to the tile as well (a router has few)."""
    if w_OI.shape[0] % ROW_TILE:
        return linear(x_NI, pad_rows(w_OI))[:, : w_OI.shape[0]]
    return torch.mm(pad_rows(x_NI), w_OI.t())[: x_NI.shape[0]]


def unit_rms(x_NC: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps)`, row by row."""
    return x_NC * torch.rsqrt(x_NC.square().mean(-1, keepdim=True) + eps)


def rms_norm(x_NC: Tensor, w_C: Tensor, eps: float) -> Tensor:
    """`unit_rms(x) * w` (Zhang & Sennrich 2019)."""
    return unit_rms(x_NC, eps) * w_C


def silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))`: torch's own SiLU differs between its vector body and its scalar tail."""
    return x / (1 + torch.exp(-x))


class Carry(NamedTuple):
    """What attention has summed so far: weighted values `[B, M, D]` and weights `[B, M, 1]`, relative to one
    maximum."""

    values_BMD: Tensor
    weight_BM1: Tensor


def scores(q_BMD: Tensor, k_BSD: Tensor, hidden_BMS: Tensor | None) -> Tensor:
    """Scaled dot products `[B, M, S]`, minus infinity where `hidden` (bool, broadcastable) is true. S is a
    multiple of 64."""
    assert k_BSD.shape[1] % KEY_BLOCK == 0, k_BSD.shape
    rows, width = q_BMD.shape[1:]
    scale: float = width**-0.5
    s_BMS = torch.bmm(_pad_middle(q_BMD), k_BSD.transpose(1, 2))[:, :rows] * scale
    return s_BMS if hidden_BMS is None else s_BMS.masked_fill(hidden_BMS, -torch.inf)


def accumulate(s_BMS: Tensor, v_BSD: Tensor, peak_BM1: Tensor, carry: Carry | None) -> Carry:
    """`carry` plus the blocks of `s`, one after the other. `peak` is the maximum over all visible keys of all
    pieces."""
    rows = s_BMS.shape[1]
    p_BMS = _pad_middle(torch.exp(s_BMS - peak_BM1))
    for start in range(0, s_BMS.shape[2], KEY_BLOCK):
        block_BMK = p_BMS[:, :, start : start + KEY_BLOCK]
        values_BMD = torch.bmm(block_BMK, v_BSD[:, start : start + KEY_BLOCK])[:, :rows]
        weight_BM1 = block_BMK[:, :rows].sum(-1, keepdim=True)
        carry = Carry(values_BMD, weight_BM1) if carry is None else _add(carry, values_BMD, weight_BM1)
    assert carry is not None
    return carry


def _add(carry: Carry, values_BMD: Tensor, weight_BM1: Tensor) -> Carry:
    return Carry(carry.values_BMD + values_BMD, carry.weight_BM1 + weight_BM1)


def _pad_middle(x_BMD: Tensor) -> Tensor:
    missing = -x_BMD.shape[1] % ROW_TILE
    return F.pad(x_BMD, (0, 0, 0, missing)) if missing else x_BMD


def log_probs(logits_NV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities `[N, V]` at the sampling temperature: log_softmax(logits / temperature)."""
    return torch.log_softmax(logits_NV / temperature, -1)


def warm_up() -> None:
    """Calls each vector function once, before threads exist: oneMKL may answer the very first concurrent call
    with low accuracy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.linspace(-4, 4, 256)
    for function in (torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.cos, torch.sin):
        function(x.abs() + 1)
    torch.log_softmax(x.view(4, 64), -1)
    torch.set_num_threads(threads)


def probe() -> str:
    """SHA-256 (hex) of a fixed computation with every operation of this file: two hosts that agree on it
    compute alike."""
    grid = torch.arange(64 * 128, dtype=torch.int64)
    x_NC = ((grid * 2654435761 % 65521).to(torch.float32) / 65521 - 0.5).view(64, 128)
    w_OI = ((grid * 40503 % 65521).to(torch.float32) / 65521 - 0.5).view(64, 128)
    h_NO = silu(linear(rms_norm(x_NC, x_NC[0] + 1, 1e-6), w_OI))
    heads_BMD = h_NO.view(64, 2, 32).transpose(0, 1).contiguous()
    s_BMS = scores(heads_BMD, heads_BMD.flip(1), None)
    values, weight = accumulate(s_BMS, heads_BMD, s_BMS.amax(-1, keepdim=True), None)
    logp_NV = log_probs((values / weight).reshape(64, 64), 0.7)
    return hashlib.sha256(logp_NV.numpy().tobytes()).hexdigest()

"""Attention of a sequence made of a shared prefix and its own part, for any layout of tokens in memory.

Keys stand in blocks of 64 that begin at 0 of the prefix and again at 0 of the own part; a query's sum runs
over the prefix's blocks, then over its own (`kernels.invariant`). Where a query stands in a matrix product is
the layout's business and leaves no trace in the bits: so prefill, decode, chunks and the trainer's packed
tree agree. It keeps no cache and has no weights.

X packed rows: one for each (token, query head)  B products  M query rows of a product  S keys  D head width
H query heads  G key-value heads
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.invariant import KEY_BLOCK, accumulate, scores
from headrace.kernels.invariant import Carry as Sums


@dataclass(frozen=True, slots=True)
class Layout:
    """Where packed rows stand in a batch of products `[B, M]`: row x at the flat place `place_X[x]`; no two
    at one."""

    place_X: Tensor
    products: int
    rows: int

    def spread(self, x_XD: Tensor) -> Tensor:
        """`[B, M, D]` with the packed rows at their places, zero elsewhere."""
        flat = x_XD.new_zeros(self.products * self.rows, x_XD.shape[1]).index_copy(0, self.place_X, x_XD)
        return flat.view(self.products, self.rows, -1)

    def collect(self, x_BMD: Tensor) -> Tensor:
        """The packed rows again, `[X, D]`."""
        return x_BMD.reshape(self.products * self.rows, -1).index_select(0, self.place_X)


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values `[B, S, D]` of one piece of context, the queries' layout over them, and which keys are
    hidden from which query row (bool, broadcastable to `[B, M, S]`).
    """

    k_BSD: Tensor
    v_BSD: Tensor
    hidden_BMS: Tensor
    layout: Layout


def layout(
    unit_N: Tensor, row_N: Tensor, units: int, tokens_max: int, groups: int, query_rows: int
) -> Layout:
    """The layout in which token n is the `row_N[n]`-th of unit `unit_N[n]` (a prefix, a slot, a sequence); a
    unit has one product for each key-value head, and a token one row for each query head that shares it.
    Packed rows go by token, then head.
    """
    rows = tokens_max * query_rows
    product_NG1 = (unit_N.view(-1, 1, 1) * groups + torch.arange(groups).view(1, -1, 1)) * rows
    place_NGR = product_NG1 + row_N.view(-1, 1, 1) * query_rows + torch.arange(query_rows)
    return Layout(place_NGR.flatten(), units * groups, rows)


def causal(query_rows: int, tokens_max: int, keys: int, start_U: Tensor, groups: int) -> Tensor:
    """Hidden keys `[U*G, M, S]` of units whose first query token stands at key `start_U`: those after the
    query's own."""
    last_UM = start_U.view(-1, 1) + torch.arange(tokens_max * query_rows) // query_rows
    hidden_UMS = torch.arange(keys) > last_UM.unsqueeze(-1)
    return hidden_UMS.repeat_interleave(groups, 0) if len(start_U) > 1 else hidden_UMS


def beyond(length_U: Tensor, keys: int, groups: int) -> Tensor:
    """Hidden keys `[U*G, 1, S]` of prefixes of these lengths: the padding of their last block."""
    return (torch.arange(keys) >= length_U.view(-1, 1, 1)).repeat_interleave(groups, 0)


def key_rows(x_TGD: Tensor) -> Tensor:
    """Keys or values of one sequence by token as `[G, S, D]`, padded with zeros to whole blocks."""
    missing = -x_TGD.shape[0] % KEY_BLOCK
    return torch.nn.functional.pad(x_TGD.transpose(0, 1), (0, 0, 0, missing)).contiguous()


def attend(q_XD: Tensor, prefix: Keys | None, own: list[tuple[int, Keys]]) -> Tensor:
    """Attention's output `[X, D]`: over the prefix (if any), then over the own keys.

    `own` cuts the packed rows into consecutive runs: (how many, their keys).
    """
    runs = torch.split(q_XD, [count for count, _ in own])
    own_scores = [
        scores(keys.layout.spread(run), keys.k_BSD, keys.hidden_BMS)
        for run, (_, keys) in zip(runs, own, strict=True)
    ]
    peak_X1 = torch.cat([keys.layout.collect(_peak(s)) for s, (_, keys) in zip(own_scores, own, strict=True)])
    values_XD = weight_X1 = None
    if prefix is not None:
        prefix_scores = scores(prefix.layout.spread(q_XD), prefix.k_BSD, prefix.hidden_BMS)
        peak_X1 = torch.maximum(peak_X1, prefix.layout.collect(_peak(prefix_scores)))
        sums = accumulate(prefix_scores, prefix.v_BSD, prefix.layout.spread(peak_X1), None)
        values_XD, weight_X1 = prefix.layout.collect(sums.values_BMD), prefix.layout.collect(sums.weight_BM1)
    parts = []
    start = 0
    for s_BMS, (count, keys) in zip(own_scores, own, strict=True):
        run = slice(start, start + count)
        carry = None
        if values_XD is not None and weight_X1 is not None:
            carry = Sums(keys.layout.spread(values_XD[run]), keys.layout.spread(weight_X1[run]))
        sums = accumulate(s_BMS, keys.v_BSD, keys.layout.spread(peak_X1[run]), carry)
        parts.append(keys.layout.collect(sums.values_BMD) / keys.layout.collect(sums.weight_BM1))
        start += count
    return torch.cat(parts)


def _peak(s_BMS: Tensor) -> Tensor:
    """The greatest score of each row. The softmax does not depend on it, so no gradient goes through it."""
    return s_BMS.detach().amax(-1, keepdim=True)

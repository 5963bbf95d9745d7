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

from headrace.kernels.invariant import KEY_BLOCK, Carry, accumulate, scores


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


def attend(q_XD: Tensor, prefix: Keys | None, own: Keys) -> Tensor:
    """Attention's output `[X, D]` of packed rows: over the prefix (if any), then over the own keys."""
    own_scores = scores(own.layout.spread(q_XD), own.k_BSD, own.hidden_BMS)
    peak_X1 = own.layout.collect(_peak(own_scores))
    carry = None
    if prefix is not None:
        prefix_scores = scores(prefix.layout.spread(q_XD), prefix.k_BSD, prefix.hidden_BMS)
        peak_X1 = torch.maximum(peak_X1, prefix.layout.collect(_peak(prefix_scores)))
        sums = accumulate(prefix_scores, prefix.v_BSD, prefix.layout.spread(peak_X1), None)
        carry = Carry(*(own.layout.spread(prefix.layout.collect(part)) for part in sums))
    sums = accumulate(own_scores, own.v_BSD, own.layout.spread(peak_X1), carry)
    return own.layout.collect(sums.values_BMD) / own.layout.collect(sums.weight_BM1)


def _peak(s_BMS: Tensor) -> Tensor:
    """The greatest score of each row. The softmax does not depend on it, so no gradient goes through it."""
    return s_BMS.detach().amax(-1, keepdim=True)

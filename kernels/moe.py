"""Mixture of experts: which experts a token goes to, and the experts' work grouped by expert.

A row's result has the same bits whatever the batch: each expert's rows are padded to the tile of
`kernels.invariant`, and a row's expert outputs are added in the order of its routes. Routes may come from a
record (router replay): then only the gate is recomputed, so that gradients still reach the router. It knows
no layer and no weights' names.

N rows  C channels  E experts  K experts per row  W expert width  P padded pairs of row and expert
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.invariant import ROW_TILE, silu


def choose(scores_NE: Tensor, active: int) -> Tensor:
    """The `active` best experts of each row, best first, int64 `[N, K]`; of equal scores the lower expert."""
    left_NE = scores_NE.detach()
    chosen = []
    for _ in range(active):
        best_N1 = left_NE.argmax(-1, keepdim=True)
        chosen.append(best_N1)
        left_NE = left_NE.scatter(1, best_N1, -torch.inf)
    return torch.cat(chosen, 1)


def gate(scores_NE: Tensor, routes_NK: Tensor) -> Tensor:
    """Weights `[N, K]` of the chosen experts: the softmax of their scores over the chosen alone, in the order
    of the routes."""
    return torch.softmax(scores_NE.gather(1, routes_NK), -1)


Tapped = Callable[[int, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]], None]
"""Told of an expert's work: its number, the source rows (ascending; padding left out), inputs and outputs of
its two products (the rows beyond are padding)."""


def experts(
    x_NC: Tensor,
    routes_NK: Tensor,
    gates_NK: Tensor,
    up_EWC: Tensor,
    down_ECW: Tensor,
    tapped: Tapped | None = None,
) -> Tensor:
    """`sum_k gate_k * expert_k(x)`, float32 `[N, C]`; expert(x) = down(silu(a) * b) with a, b the halves of
    up(x).

    `up` is `[E, 2W, C]`, `down` `[E, C, W]`. Equals `kernels.reference.experts` to rounding; the sum runs
    over k in order.
    """
    rows, active = routes_NK.shape
    source_P, place_NK, counts_E, wide_E = _group(routes_NK, up_EWC.shape[0])
    outputs = []
    sources = torch.split(source_P, wide_E)
    for expert, part_PC in enumerate(torch.split(x_NC.index_select(0, source_P), wide_E)):
        if part_PC.shape[0]:
            both_PW = torch.mm(part_PC, up_EWC[expert].t())
            a_PW, b_PW = both_PW.chunk(2, -1)
            hidden_PW = silu(a_PW) * b_PW
            output_PC = torch.mm(hidden_PW, down_ECW[expert].t())
            outputs.append(output_PC)
            if tapped is not None:
                real = sources[expert][: counts_E[expert]]
                tapped(expert, real, (part_PC, both_PW), (hidden_PW, output_PC))
    y_NKC = torch.cat(outputs).index_select(0, place_NK.flatten()).view(rows, active, -1)
    weighted_NKC = y_NKC * gates_NK.unsqueeze(-1)
    total_NC = weighted_NKC[:, 0]
    for k in range(1, active):
        total_NC = total_NC + weighted_NKC[:, k]
    return total_NC


def _group(routes_NK: Tensor, experts_total: int) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Rows sorted by expert, each expert's share padded to the tile (with row 0): the source row of each
    padded place, the place of each pair, and the count of each expert, without and with padding.
    """
    active = routes_NK.shape[1]
    flat = routes_NK.numpy().ravel()
    counts = np.bincount(flat, minlength=experts_total)
    wide = -(-counts // ROW_TILE) * ROW_TILE
    order = np.argsort(flat, kind="stable")
    shift = (np.cumsum(wide) - wide) - (np.cumsum(counts) - counts)
    sorted_place = np.arange(flat.size) + np.repeat(shift, counts)
    source = np.zeros(int(wide.sum()), np.int64)
    source[sorted_place] = order // active
    place = np.empty(flat.size, np.int64)
    place[order] = sorted_place
    return torch.from_numpy(source), torch.from_numpy(place), counts.tolist(), wide.tolist()


def balance_loss(scores_NE: Tensor, routes_NK: Tensor) -> Tensor:
    """1 when the experts share the rows evenly, up to E when one takes all (Switch Transformer, Fedus et al.
    2021, eq. 4)."""
    experts_total = scores_NE.shape[1]
    share_E = F.one_hot(routes_NK, experts_total).sum(1).float().mean(0) / routes_NK.shape[1]
    return experts_total * (share_E * torch.softmax(scores_NE, -1).mean(0)).sum()

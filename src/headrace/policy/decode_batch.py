"""How the rows of one decoding step stand in attention's products: over the stacked prefixes, and over each
slot's own keys.

Only layout: none of it shows in the bits. It owns the stack of prefixes in use, but neither the slots' cache
nor any arithmetic (`policy.decode`, `policy.attention`).

N tokens  U units of a batch  L layers  K experts per token  V vocabulary  G key-value heads  S keys  D head
width
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headrace.kernels.invariant import KEY_BLOCK, ROW_TILE, padded
from headrace.policy import attention
from headrace.policy.attention import Keys
from headrace.policy.model import ModelConfig

RUN_ROWS = 64  # rows whose products are computed together, so that their scores stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A prompt after prefill: keys and values `[L, G, S, D]`, scores `[V]` of the next token, routes uint8
    `[T, L, K]`."""

    tokens: list[int]
    k_LGSD: Tensor
    v_LGSD: Tensor
    logits_V: Tensor
    routes_TLK: Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens (one or many) to append to a slot that continues `prefix`."""

    slot: int
    prefix: Prefix
    tokens: list[int]


class OwnBatch:
    """The queries of some `rows` over their own keys: the same for every layer of one step. `count` packed
    query rows.
    """

    @staticmethod
    def order(config: ModelConfig, rows: Sequence[Row]) -> list[int]:
        """Indices of `rows` as `cut` wants them: short rows first, then long ones, each by slot."""
        return sorted(range(len(rows)), key=lambda index: (_is_long(config, rows[index]), rows[index].slot))

    @classmethod
    def cut(cls, config: ModelConfig, rows: list[Row], starts: list[int]) -> list["OwnBatch"]:
        """Batches of neighbours. A long row (a tool's result) would make a whole batch as tall, so it never
        joins short ones.
        """
        short = sum(not _is_long(config, row) for row in rows)
        edges = [*range(0, short, RUN_ROWS), *range(short, len(rows), RUN_ROWS), len(rows)]
        return [cls(config, rows[a:b], starts[a:b]) for a, b in pairwise(edges)]

    def __init__(self, config: ModelConfig, rows: list[Row], starts: list[int]) -> None:
        self.rows = rows
        slots = [row.slot for row in rows]
        self._first = slots[0]
        used = slots[-1] + 1 - self._first
        # Most slots of the range in use: the cache itself is the batch, no copy. Else the used ones are
        # gathered.
        dense = 2 * len(rows) >= used
        self._slot_U = None if dense else torch.tensor(slots)
        self._units = used if dense else len(rows)
        units = [slot - self._first for slot in slots] if dense else list(range(len(rows)))
        tokens_max = max(len(row.tokens) for row in rows)
        ends = [start + len(row.tokens) for row, start in zip(rows, starts, strict=True)]
        self._keys = padded(max(ends), KEY_BLOCK)
        start_U = torch.full((self._units,), -1)
        start_U[torch.tensor(units)] = torch.tensor(starts)
        unit_N = torch.tensor([unit for unit, row in zip(units, rows, strict=True) for _ in row.tokens])
        row_N = torch.tensor([i for row in rows for i in range(len(row.tokens))])
        self._layout = attention.layout(
            unit_N, row_N, self._units, tokens_max, config.heads_kv, config.query_rows
        )
        self._hidden = attention.causal(config.query_rows, tokens_max, self._keys, start_U, config.heads_kv)
        self.count = len(self._layout.place_X)

    def keys(self, k: Tensor, v: Tensor) -> Keys:
        """Own keys of a layer from its cache `[slots, G, S, D]`."""
        return Keys(self._view(k), self._view(v), self._hidden, self._layout)

    def _view(self, cache: Tensor) -> Tensor:
        if self._slot_U is None:
            return cache[self._first : self._first + self._units].flatten(0, 1)[:, : self._keys]
        return cache[:, :, : self._keys][self._slot_U].flatten(0, 1)


def _is_long(config: ModelConfig, row: Row) -> bool:
    """Whether its queries fill more than one row tile."""
    return len(row.tokens) * config.query_rows > ROW_TILE


class PrefixStack:
    """The prefixes in use side by side in one tensor per layer, so that one product serves all of them.

    A prefix is copied in when it first appears, and its place is used again when it is no longer asked for.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._held: list[Prefix | None] = []
        shape = (0, config.heads_kv, 0, config.head_width)
        self._k = [torch.zeros(shape) for _ in range(config.layers)]
        self._v = [torch.zeros(shape) for _ in range(config.layers)]

    def plan(self, runs: list[list[Row]]) -> list["PrefixBatch"]:
        """The queries of each run over the prefixes of its rows."""
        needed = {id(row.prefix): row.prefix for rows in runs for row in rows}
        place = {id(held): index for index, held in enumerate(self._held) if held and id(held) in needed}
        free = [index for index, held in enumerate(self._held) if held is None or id(held) not in needed]
        new = [prefix for key, prefix in needed.items() if key not in place]
        self._reserve(len(place) + len(new), max(prefix.k_LGSD.shape[2] for prefix in needed.values()))
        free += range(len(self._held), self._k[0].shape[0])
        self._held += [None] * (self._k[0].shape[0] - len(self._held))
        for prefix, index in zip(new, free, strict=False):
            self._held[index] = prefix
            place[id(prefix)] = index
            for layer in range(self._config.layers):
                self._k[layer][index, :, : prefix.k_LGSD.shape[2]] = prefix.k_LGSD[layer]
                self._v[layer][index, :, : prefix.v_LGSD.shape[2]] = prefix.v_LGSD[layer]
        return [PrefixBatch(self._config, self._k, self._v, place, rows) for rows in runs]

    def _reserve(self, prefixes: int, keys: int) -> None:
        have, _, have_keys, _ = self._k[0].shape
        if prefixes <= have and keys <= have_keys:
            return
        more = (
            padded(max(prefixes, have), 8),
            self._config.heads_kv,
            max(keys, have_keys),
            self._config.head_width,
        )
        for stack in (self._k, self._v):
            for layer, old in enumerate(stack):
                stack[layer] = torch.zeros(more)
                stack[layer][:have, :, :have_keys] = old


class PrefixBatch:
    """The queries of some rows over their prefixes in the stack.

    The product of each prefix is as tall as the one with the most queries, which is why long rows come in
    batches of their own.
    """

    def __init__(
        self, config: ModelConfig, k: list[Tensor], v: list[Tensor], place: dict[int, int], rows: list[Row]
    ) -> None:
        self._k, self._v = k, v
        used = sorted({place[id(row.prefix)] for row in rows})
        # As with the slots: a view when most of the stack is in use, a copy of the used ones else.
        dense = 2 * len(used) > used[-1]
        self._used_U = None if dense else torch.tensor(used)
        self._units = used[-1] + 1 if dense else len(used)
        unit_of = {at: at if dense else index for index, at in enumerate(used)}
        lengths = [0] * self._units
        filled = [0] * self._units
        unit_N, row_N = [], []
        for row in rows:
            unit = unit_of[place[id(row.prefix)]]
            lengths[unit] = len(row.prefix.tokens)
            for _ in row.tokens:
                unit_N.append(unit)
                row_N.append(filled[unit])
                filled[unit] += 1
        self._keys = padded(max(lengths), KEY_BLOCK)
        self._hidden = attention.beyond(torch.tensor(lengths), self._keys, config.heads_kv)
        self._layout = attention.layout(
            torch.tensor(unit_N),
            torch.tensor(row_N),
            self._units,
            max(filled),
            config.heads_kv,
            config.query_rows,
        )

    def keys(self, layer: int) -> Keys:
        """The prefixes' keys of a layer."""
        return Keys(self._view(self._k[layer]), self._view(self._v[layer]), self._hidden, self._layout)

    def _view(self, stack: Tensor) -> Tensor:
        if self._used_U is None:
            return stack[: self._units].flatten(0, 1)[:, : self._keys]
        return stack[:, :, : self._keys][self._used_U].flatten(0, 1)

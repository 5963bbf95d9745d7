"""The policy as a generator: prefill of prompts, then decoding and chunks over a cache of slots. No
gradients.

A prompt's keys and values are computed once (`Prefix`) and shared by all slots that continue it; a slot holds
only its own part. It neither samples nor schedules (`inference` does) and gives, for the same weights and
tokens, the bits of `policy.tree`.

N tokens  R rows  L layers  K experts per token  C width  V vocabulary  G key-value heads  S keys  D head
width
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headrace.errors import PolicyError
from headrace.kernels.invariant import KEY_BLOCK, ROW_TILE, padded
from headrace.policy import attention, model
from headrace.policy.attention import Keys
from headrace.policy.decode_batch import OwnBatch, Prefix, PrefixStack, Row
from headrace.policy.model import ModelConfig, Weights

__all__ = ["Decoder", "Extension", "Prefix", "Row"]


@dataclass(frozen=True, slots=True)
class Extension:
    """Scores `[R, V]` of what follows each row's last token, and the routes uint8 `[T, L, K]` of each row's
    new tokens."""

    logits_RV: Tensor
    routes: list[Tensor]


class Decoder:
    """`slots` sequences at most, each with an own part of at most `own_tokens_max` tokens beside its prefix.

    Not thread-safe. Memory: 2 * layers * slots * heads_kv * own_tokens_max * head_width float32.
    """

    def __init__(self, config: ModelConfig, slots: int, own_tokens_max: int) -> None:
        self._config = config
        self._own_tokens_max = own_tokens_max
        shape = (slots, config.heads_kv, padded(own_tokens_max, KEY_BLOCK), config.head_width)
        self._own_k = [torch.zeros(shape) for _ in range(config.layers)]
        self._own_v = [torch.zeros(shape) for _ in range(config.layers)]
        self._lengths = [0] * slots
        self._prefixes = PrefixStack(config)

    def length(self, slot: int) -> int:
        """Tokens in the slot's own part."""
        return self._lengths[slot]

    def release(self, slot: int) -> None:
        """Empties the slot; doing so twice is harmless."""
        self._lengths[slot] = 0

    @torch.inference_mode()
    def prefill(self, weights: Weights, prompts: list[list[int]]) -> list[Prefix]:
        """Each prompt's `Prefix`, independent of the others. Raises PolicyError for an empty or over-long
        one."""
        config = self._config
        longest = config.context_max - 1
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= longest:
                raise PolicyError(
                    f"prefill: prompts[{index}]: expected 1..{longest} tokens, got {len(prompt)}"
                )
        if not prompts:
            return []
        ends = torch.tensor([0] + [len(prompt) for prompt in prompts]).cumsum(0).tolist()
        spans = [slice(start, end) for start, end in pairwise(ends)]
        tokens_N, position_N = _tile(
            [t for p in prompts for t in p], [i for p in prompts for i in range(len(p))]
        )
        rope = model.rope_at(config, position_N)
        x_NC = model.embed(weights, tokens_N)
        own = [_whole(config, len(prompt)) for prompt in prompts]
        k_layers, v_layers, routes = [], [], []
        for layer in range(config.layers):
            q, k, v = model.attention_inputs(config, weights, layer, x_NC, rope)
            k_layers.append([attention.key_rows(k[span]) for span in spans])
            v_layers.append([attention.key_rows(v[span]) for span in spans])
            attended_NC = x_NC.new_zeros(len(x_NC), config.heads * config.head_width)
            for index, span in enumerate(spans):
                place, hidden = own[index]
                keys = Keys(k_layers[-1][index], v_layers[-1][index], hidden, place)
                q_XD = q[span].reshape(-1, config.head_width)
                attended = attention.attend(q_XD, None, keys)
                attended_NC[span] = attended.view(len(q_XD) // config.heads, -1)
            x_NC, routing = model.after_attention(config, weights, layer, x_NC, attended_NC, None)
            routes.append(routing.used_NK.to(torch.uint8))
        routes_NLK = torch.stack(routes, 1)
        last_R = torch.tensor([end - 1 for end in ends[1:]])
        logits_RV = model.logits(config, weights, x_NC.index_select(0, last_R))
        return [
            Prefix(
                list(prompt),
                torch.stack([layer[index] for layer in k_layers]),
                torch.stack([layer[index] for layer in v_layers]),
                logits_RV[index],
                routes_NLK[spans[index]].clone(),
            )
            for index, prompt in enumerate(prompts)
        ]

    @torch.inference_mode()
    def extend(self, weights: Weights, rows: list[Row]) -> Extension:
        """Appends every row's tokens to its slot. Rows of one token and of many mix freely; each row's
        results depend on nothing but its own tokens and the weights. Raises PolicyError, and changes nothing,
        for a row that is empty or does not fit.
        """
        config = self._config
        self._check(rows)
        order = OwnBatch.order(config, rows)
        ordered = [rows[index] for index in order]
        starts = [self._lengths[row.slot] for row in ordered]
        positions = [
            len(row.prefix.tokens) + start + i
            for row, start in zip(ordered, starts, strict=True)
            for i in range(len(row.tokens))
        ]
        tokens_N, position_N = _tile([token for row in ordered for token in row.tokens], positions)
        rope = model.rope_at(config, position_N)
        runs = OwnBatch.cut(config, ordered, starts)
        shared = self._prefixes.plan([run.rows for run in runs])
        count = sum(len(row.tokens) for row in ordered)
        write_X = self._write_places(ordered, starts)
        x_NC = model.embed(weights, tokens_N)
        routes = []
        for layer in range(config.layers):
            q, k, v = model.attention_inputs(config, weights, layer, x_NC, rope)
            for cache, new in ((self._own_k[layer], k), (self._own_v[layer], v)):
                cache.view(-1, config.head_width)[write_X] = new[:count].reshape(-1, config.head_width)
            q_XD = q[:count].reshape(-1, config.head_width)
            attended = torch.cat(
                [
                    attention.attend(
                        part, prefix.keys(layer), run.keys(self._own_k[layer], self._own_v[layer])
                    )
                    for part, prefix, run in zip(
                        torch.split(q_XD, [run.count for run in runs]), shared, runs, strict=True
                    )
                ]
            ).view(count, -1)
            attended_NC = torch.nn.functional.pad(attended, (0, 0, 0, len(x_NC) - count))
            x_NC, routing = model.after_attention(config, weights, layer, x_NC, attended_NC, None)
            routes.append(routing.used_NK[:count].to(torch.uint8))
        lengths = [len(row.tokens) for row in ordered]
        last_R = torch.tensor(lengths).cumsum(0) - 1
        back = sorted(range(len(rows)), key=order.__getitem__)  # where the caller's rows went
        logits_RV = model.logits(config, weights, x_NC.index_select(0, last_R[torch.tensor(back)]))
        by_row = torch.split(torch.stack(routes, 1), lengths)
        for row, start in zip(ordered, starts, strict=True):
            self._lengths[row.slot] = start + len(row.tokens)
        return Extension(logits_RV, [by_row[index] for index in back])

    def _check(self, rows: list[Row]) -> None:
        slots = [row.slot for row in rows]
        if not rows or len(set(slots)) != len(slots):
            raise PolicyError(f"extend: expected rows of different slots, got slots {slots}")
        for row in rows:
            if not 0 <= row.slot < len(self._lengths):
                raise PolicyError(f"extend: expected a slot in 0..{len(self._lengths) - 1}, got {row.slot}")
            limit = min(self._own_tokens_max, self._config.context_max - len(row.prefix.tokens))
            left = limit - self._lengths[row.slot]
            if not 0 < len(row.tokens) <= left:
                raise PolicyError(
                    f"extend: slot {row.slot}: expected 1..{left} new tokens, got {len(row.tokens)}"
                )

    def _write_places(self, rows: list[Row], starts: list[int]) -> Tensor:
        """Flat places in a cache `[slots, G, S]` of each new (token, key-value head)."""
        groups, keys = self._own_k[0].shape[1:3]
        slot_N = torch.tensor([row.slot for row in rows for _ in row.tokens])
        at_N = torch.tensor(
            [start + i for row, start in zip(rows, starts, strict=True) for i in range(len(row.tokens))]
        )
        return ((slot_N.unsqueeze(1) * groups + torch.arange(groups)) * keys + at_N.unsqueeze(1)).flatten()


def _whole(config: ModelConfig, tokens: int) -> tuple[attention.Layout, Tensor]:
    """Layout and hidden keys of a prompt over itself."""
    at_N = torch.arange(tokens)
    place = attention.layout(torch.zeros_like(at_N), at_N, 1, tokens, config.heads_kv, config.query_rows)
    keys = padded(tokens, KEY_BLOCK)
    return place, attention.causal(
        config.query_rows, tokens, keys, torch.zeros(1, dtype=torch.int64), config.heads_kv
    )


def _tile(tokens: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
    """Both as tensors, padded with zeros to the row tile once, so that no layer has to."""
    missing = -len(tokens) % ROW_TILE
    return torch.tensor(tokens + [0] * missing), torch.tensor(positions + [0] * missing)

"""From scores to tokens: the same request gives the same tokens, whatever else is in the batch.

Gumbel sampling (Gumbel 1954; Maddison et al. 2014): the argmax of log-probabilities + noise is a sample of
their distribution. The noise is a function of (seed, group, member, position) alone, from a counter-based
generator.

R rows  V vocabulary
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels import rng
from headrace.kernels.invariant import log_probs


@dataclass(frozen=True, slots=True)
class Draw:
    """How the next token of one row is chosen. `position` is its absolute place in the sequence."""

    temperature: float
    greedy: bool
    key: int
    position: int


def sample(logits_RV: Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
    """Tokens, and their log-probabilities (float32 values) at the sampling temperature, one a row. Greedy
    rows take the likeliest token (of equals the lowest); temperature 0 is greedy at temperature 1."""
    tokens = [0] * len(draws)
    logp = [0.0] * len(draws)
    for (temperature, greedy), rows in _by_kind(draws).items():
        part_RV = logits_RV if len(rows) == len(draws) else logits_RV[rows]
        logp_RV = log_probs(part_RV, temperature)
        if greedy:
            token_R = part_RV.argmax(-1)
        else:
            keys_R = torch.tensor([draws[row].key for row in rows])
            positions_R = torch.tensor([draws[row].position for row in rows])
            token_R = (logp_RV + rng.gumbel(keys_R, positions_R, logits_RV.shape[1])).argmax(-1)
        logp_R = logp_RV.gather(1, token_R.unsqueeze(1)).squeeze(1)
        for row, token, value in zip(rows, token_R.tolist(), logp_R.tolist(), strict=True):
            tokens[row], logp[row] = token, value
    return tokens, logp


def _by_kind(draws: list[Draw]) -> dict[tuple[float, bool], list[int]]:
    """Rows that one call of each kernel can serve."""
    kinds: dict[tuple[float, bool], list[int]] = {}
    for row, draw in enumerate(draws):
        kind = (draw.temperature or 1.0, draw.greedy or draw.temperature == 0)
        kinds.setdefault(kind, []).append(row)
    return kinds

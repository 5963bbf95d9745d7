"""The policy-gradient loss over the trained tokens of some groups. Knows no model and no record.

    surrogate(r, A) = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    where A < 0, with dual_clip: at least dual_clip A

    ppo     surrogate(now / rollout, A)
    tis     min(old / rollout, tis_max) surrogate(now / old, A)
    icepop  (old / rollout where inside [icepop_low, icepop_high], else 0) surrogate(now / old, A)

Sources: the surrogate, Schulman et al. 2017 (PPO), eq. 7; clip_high > clip_low, Yu et al. 2025 (DAPO),
section 3.1; dual clip, Ye et al. 2020 ("Mastering Complex Control in MOBA Games"); tis, Yao et al. 2025
(truncated importance sampling between engine and trainer); icepop, Ling team 2025 (Ring-1T).

*rollout* is the policy that sampled, *old* the trainer's at the start of the step, *now* the one that is
differentiated; in the first pass over a batch old = now. Logarithms of ratios are bounded to ±20.

Sequence masks, each on old / rollout of a sequence's trained tokens: geometric mean outside
[sequence_low, sequence_high] (Zheng et al. 2025, GSPO, has the mean); any token's ratio below `veto`;
advantage negative and mean log(rollout / old) above `off_policy_delta` (DeepSeek-V3.2 report 2025, off-policy
sequence masking).

The loss is the mean over *all trained tokens of the step*, masked ones included (token mean: DAPO, section
3.3; masking takes a token out of the sum, not out of the count), so microbatches add up.

N trained tokens  Q sequences
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from headrace.trainer.config import LossConfig

LOG_RATIO_MAX: Final = 20.0


class Tokens(NamedTuple):
    """The trained tokens of a microbatch, float32 `[N]` but for `sequence` (int64, in [0, Q))."""

    old_N: Tensor
    rollout_N: Tensor
    advantage_N: Tensor
    sequence_N: Tensor


class Loss(NamedTuple):
    """`loss`: to be summed over the microbatches of a step; `kept`: each token's part of it, before the sign
    and the division (float32 `[N]`). The masks (bool `[N]`) tell what took part."""

    loss: Tensor
    kept_N: Tensor
    masked_N: Tensor
    clipped_N: Tensor


def ratio(log_a_N: Tensor, log_b_N: Tensor) -> Tensor:
    """exp(log_a - log_b), the exponent bounded to ±20."""
    return (log_a_N - log_b_N).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def policy_loss(config: LossConfig, now_N: Tensor, tokens: Tokens, *, tokens_total: int) -> Loss:
    """The loss of these tokens, a share of the mean over `tokens_total`. Gradients flow through `now`."""
    advantage_N = tokens.advantage_N
    behaviour_N = ratio(tokens.old_N, tokens.rollout_N)
    if config.correction == "ppo":
        ratio_N, weight_N = ratio(now_N, tokens.rollout_N), torch.ones_like(behaviour_N)
    else:
        ratio_N, weight_N = ratio(now_N, tokens.old_N), _weight(config, behaviour_N)
    plain_N = ratio_N * advantage_N
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage_N
    surrogate_N = torch.minimum(plain_N, clipped_N)
    if config.dual_clip is not None:
        bounded_N = torch.maximum(surrogate_N, config.dual_clip * advantage_N)
        surrogate_N = torch.where(advantage_N < 0, bounded_N, surrogate_N)
    masked_N = (weight_N == 0) | _masked_sequences(config, tokens, behaviour_N)
    kept_N = torch.where(masked_N, torch.zeros_like(surrogate_N), weight_N * surrogate_N)
    return Loss(-kept_N.sum() / tokens_total, kept_N, masked_N, (surrogate_N != plain_N).detach())


def _weight(config: LossConfig, behaviour_N: Tensor) -> Tensor:
    if config.correction == "tis":
        return behaviour_N.clamp(max=config.tis_max)
    inside_N = (behaviour_N >= config.icepop_low) & (behaviour_N <= config.icepop_high)
    return torch.where(inside_N, behaviour_N, torch.zeros_like(behaviour_N))


def _masked_sequences(config: LossConfig, tokens: Tokens, behaviour_N: Tensor) -> Tensor:
    """bool `[N]`: tokens of sequences that a sequence mask takes out."""
    sequences = int(tokens.sequence_N.max()) + 1 if tokens.sequence_N.numel() else 0
    mean_Q = _mean(tokens.old_N - tokens.rollout_N, tokens.sequence_N, sequences)
    masked_Q = torch.zeros(sequences, dtype=torch.bool)
    if config.sequence_low is not None:
        masked_Q |= mean_Q.exp() < config.sequence_low
    if config.sequence_high is not None:
        masked_Q |= mean_Q.exp() > config.sequence_high
    if config.veto is not None:
        masked_Q[tokens.sequence_N[behaviour_N < config.veto]] = True
    if config.off_policy_delta is not None:
        negative_Q = _mean(tokens.advantage_N, tokens.sequence_N, sequences) < 0
        masked_Q |= negative_Q & (-mean_Q > config.off_policy_delta)
    return masked_Q[tokens.sequence_N]


def _mean(value_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    total_Q = torch.zeros(sequences, dtype=value_N.dtype).index_add_(0, sequence_N, value_N)
    return total_Q / torch.bincount(sequence_N, minlength=sequences).clamp(min=1)

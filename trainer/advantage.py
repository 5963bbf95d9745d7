"""Advantages: of a group r - mean (Dr.GRPO) or (r - mean) / (std + 1e-6) (GRPO); of a single live unit
r - baseline, a running mean. Knows no tensors."""

import math
from collections.abc import Sequence
from typing import Final

EQUAL_RELATIVE: Final = 1e-9
"""Rewards closer than this (times the largest, at least 1) are equal: sums of weighted components that mean
the same number differ in their last bits."""
STD_EPS: Final = 1e-6


def rewards_equal(rewards: Sequence[float]) -> bool:
    """True for an empty group and a group of one too."""
    if len(rewards) < 2:
        return True
    scale = max(1.0, *(abs(reward) for reward in rewards))
    return max(rewards) - min(rewards) <= EQUAL_RELATIVE * scale


def advantages(rewards: Sequence[float], *, scale_std: bool = False) -> list[float]:
    """One advantage per reward, in float64; exactly 0.0 each when the rewards are equal.

    r - mean: Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2. Divided by the sample
    standard deviation + 1e-6 with `scale_std`: Shao et al. 2024, "DeepSeekMath", section 4.1. Equality is
    decided first: in float32 eight rewards of 0.35 leave a residue that a tiny std would blow up.
    """
    if rewards_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not scale_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + STD_EPS) for c in centred]


def baseline(before: float | None, rewards: Sequence[float], rate: float) -> float | None:
    """The running mean after a step that saw `rewards`: moved by `rate` of the way to their mean; their mean
    where there was none before; unchanged by none at all.

    A baseline that doesn't depend on the action leaves the policy gradient unbiased and takes variance away
    (Williams 1992, REINFORCE, section 4). A step's own units are measured against the mean from before it;
    the first ones against their own, a bias of one step.
    """
    if not rewards:
        return before
    mean = math.fsum(rewards) / len(rewards)
    return mean if before is None else before + rate * (mean - before)

"""Advantages of one group: r - mean (Dr.GRPO), or (r - mean) / (std + 1e-6) (GRPO). Knows no tensors."""

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

"""The numbers of a step, as they stand in the ledger: flat names, one meaning each (docs/training.md).

Mismatch compares the trainer's log-probabilities at the start of the step with those that the sampler
reported, over trained tokens: exactly 0 on policy, and by lag, to tell lag from numerics.

N trained tokens
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.trainer.loss import ratio
from headrace.wire.records import Drop


def mismatch(old_N: Tensor, rollout_N: Tensor, lag_N: Tensor) -> dict[str, float]:
    """k3 = ρ - log ρ - 1 with ρ = old / rollout (Schulman 2020, "Approximating KL divergence"); the
    effective sample size is a share of N."""
    if not old_N.numel():
        return {}
    difference_N = (old_N - rollout_N).double()
    ratio_N = ratio(old_N.double(), rollout_N.double())
    size_N = difference_N.abs()
    found = {
        "mismatch.k3_mean": float((ratio_N - 1 - difference_N).mean()),
        "mismatch.abs_mean": float(size_N.mean()),
        "mismatch.abs_p99": float(torch.quantile(size_N, 0.99)),
        "mismatch.abs_max": float(size_N.max()),
        "mismatch.ratio_above_2": float((ratio_N > 2).double().mean()),
        "mismatch.sample_size": float(ratio_N.sum().square() / (ratio_N.square().sum() * ratio_N.numel())),
        "lag.mean": float(lag_N.double().mean()),
        "lag.max": float(lag_N.max()),
    }
    for lag in sorted(set(lag_N.tolist())):
        at_lag = lag_N == lag
        found[f"mismatch.lag{lag}.abs_mean"] = float(size_N[at_lag].mean())
        found[f"mismatch.lag{lag}.abs_max"] = float(size_N[at_lag].max())
        found[f"mismatch.lag{lag}.tokens"] = float(at_lag.sum())
    return found


def drop_counts(drops: Sequence[Drop]) -> dict[str, float]:
    """`drops.<reason>`: whole groups; `withheld.<reason>`: members of trained ones; `.tokens`: theirs."""
    counts: Counter[str] = Counter()
    for drop in drops:
        kind = "drops" if drop.member is None else "withheld"
        counts[f"{kind}.{drop.reason}"] += 1
        counts[f"{kind}.{drop.reason}.tokens"] += drop.tokens
    return {name: float(count) for name, count in sorted(counts.items())}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, least and most of `values`; nothing when there are none."""
    if not values:
        return {}
    return {
        f"{name}.mean": sum(values) / len(values),
        f"{name}.min": float(min(values)),
        f"{name}.max": float(max(values)),
    }

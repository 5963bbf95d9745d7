"""The numbers of a step, as they stand in the ledger: flat names, one meaning each (docs/training.md).

Mismatch compares the trainer's log-probabilities at the start of the step with those that the sampler
reported, over trained tokens: exactly 0 on policy, and by lag, to tell lag from numerics. The lag of a bucket
is that of the oldest weights that took part in a token: one sampled after a swap saw keys and values from
before it, and is not on policy.

N trained tokens
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.trainer.loss import ratio
from headrace.wire.records import Drop


def lag(lag_N: Tensor) -> dict[str, float]:
    """Versions between the weights that sampled a token and those of the step, as `lag_versions_max` counts
    them."""
    return {"lag.mean": float(lag_N.double().mean()), "lag.max": float(lag_N.max())} if lag_N.numel() else {}


def mismatch(old_N: Tensor, rollout_N: Tensor, context_lag_N: Tensor) -> dict[str, float]:
    """k3 = ρ - log ρ - 1 with ρ = old / rollout (Schulman 2020, "Approximating KL divergence"); the
    effective sample size is a share of N. `context_lag`: versions to the oldest weights behind a token."""
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
    }
    for behind in sorted(set(context_lag_N.tolist())):
        bucket_N = context_lag_N == behind
        found[f"mismatch.lag{behind}.abs_mean"] = float(size_N[bucket_N].mean())
        found[f"mismatch.lag{behind}.abs_max"] = float(size_N[bucket_N].max())
        found[f"mismatch.lag{behind}.tokens"] = float(bucket_N.sum())
    return found


def drop_counts(drops: Sequence[Drop]) -> dict[str, float]:
    """`drops.<reason>`: whole groups; `withheld.<reason>`: members of trained ones; `.tokens`: theirs."""
    counts: Counter[str] = Counter()
    for drop in drops:
        kind = "drops" if drop.member is None else "withheld"
        counts[f"{kind}.{drop.reason}"] += 1
        counts[f"{kind}.{drop.reason}.tokens"] += drop.tokens
    return {name: float(count) for name, count in sorted(counts.items())}


def live(rewards: Sequence[float], baseline: float | None) -> dict[str, float]:
    """Of single live units; nothing where there never was one."""
    if baseline is None:
        return {}
    return {"live.trained": float(len(rewards)), "live.baseline": baseline, **spread("live.reward", rewards)}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, least and most of `values`; nothing when there are none."""
    if not values:
        return {}
    return {
        f"{name}.mean": sum(values) / len(values),
        f"{name}.min": float(min(values)),
        f"{name}.max": float(max(values)),
    }

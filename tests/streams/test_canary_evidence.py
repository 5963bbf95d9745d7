"""The evidence: hand-worked e-values, peeking, a thousand releases without harm, and broken models."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the world is the benchmark's

from benchmarks.canary_world import GOOD, PLANTED, World, release

from headrace.streams.comparison import BUCKETS, Metric, Tally, bucket_of, log_e, log_mixture
from headrace.streams.release import CanaryConfig

RELEASES = 1000
SMALL = CanaryConfig(stages=(0.1, 0.5), exposures_min=200)
TOWN = World(users=2000)


def test_the_mixture_by_hand() -> None:
    """With r = effect^2 / V = 1 and no difference: 2 / sqrt(2) * Phi(0) = 0.7071. With z = 2: 2 / sqrt(2) *
    exp(2 * 0.5) * Phi(sqrt(2)) = 3.8442 * 0.92135 = 3.5419."""
    assert math.exp(log_mixture(0.0, 0.01, 0.1)) == pytest.approx(0.70711, abs=1e-5)
    assert math.exp(log_mixture(0.2, 0.01, 0.1)) == pytest.approx(3.5419, abs=1e-4)
    assert log_mixture(-100.0, 0.01, 0.1) < log_mixture(-4.0, 0.01, 0.1) < math.log(0.02)


def test_the_mixture_is_the_integral() -> None:
    """The closed form is that of exp(l S - l^2 I / 2) over a half-normal of l, by summing it."""
    harm, variance, effect = 0.13, 0.004, 0.1
    score, information = harm / variance, 1 / variance
    step = effect / 2000
    total = 0.0
    for number in range(20_000):
        size = (number + 0.5) * step
        density = 2 / (effect * math.sqrt(2 * math.pi)) * math.exp(-(size**2) / (2 * effect**2))
        total += math.exp(size * score - size**2 * information / 2) * density * step
    assert math.exp(log_mixture(harm, variance, effect)) == pytest.approx(total, rel=1e-6)


def test_variance_counts_users_not_exposures() -> None:
    """Ten users with one exposure each, half of them 1: 2.5 * 10/9 + 1 over 100, times 9/7. Each exposure ten
    times over changes the mean not at all, and the variance only by the exposure that is added."""
    once, often = Tally(), Tally()
    for user in range(10):
        once.add(user, user % 2)
        for _ in range(10):
            often.add(user, user % 2)
    assert once.variance() == pytest.approx((2.5 * 10 / 9 + 1) / 100 * 9 / 7)
    assert often.variance() == pytest.approx((250 * 10 / 9 + 1) / 10_000 * 9 / 7)
    assert (once.mean, often.mean, often.groups, often.exposures) == (0.5, 0.5, 10, 100)


def test_one_loud_user_is_no_evidence() -> None:
    """A user who rejects a thousand times weighs no more than one user can, whoever else there is a little
    of: the same from many users would be overwhelming."""
    metric = Metric("reward", 1.0, 0.01, 0.1)
    loud, many, stable = Tally(), Tally(), Tally()
    for number in range(1000):
        stable.add(number % BUCKETS, 0.75 if number // BUCKETS % 2 else -0.25)
        many.add(number % BUCKETS, -0.25)
        loud.add(0, -0.25)
    for bucket in range(1, 20):
        loud.add(bucket, 0.25)
    assert log_e(metric, many, stable) > 50
    assert log_e(metric, loud, stable) == 0.0
    assert loud.groups == pytest.approx(1019**2 / (1000**2 + 19))
    assert {bucket_of(f"u{number}") for number in range(1000)} == set(range(BUCKETS))


def test_a_thousand_releases_without_harm() -> None:
    """Looked at every 20 exposures through all stages, at most 5 % are taken back, though nothing at all is
    tolerated (any loss counts) and users differ, come back and repeat themselves. Five standard tests at 5 %,
    looked at as often, would take back most of them."""
    strict = CanaryConfig(
        stages=(0.1, 0.5),
        exposures_min=200,
        reward_lost_max=0.0,
        accepted_lost_max=0.0,
        habit_lost_max=0.0,
        slower_max=1.0,
    )
    rng = np.random.default_rng(20261130)
    revoked = sum(release(rng, TOWN, GOOD, strict).revoked for _ in range(RELEASES))
    print(f"false rollbacks: {revoked} of {RELEASES}")
    assert revoked <= 0.05 * RELEASES


@pytest.mark.parametrize("model", PLANTED[:5], ids=lambda model: model.name)
def test_a_broken_model_is_taken_back(model: object) -> None:
    """Forty times each, by the policy as it ships but for smaller stages: always, within 400 exposures."""
    rng = np.random.default_rng(7)
    outcomes = [release(rng, TOWN, model, SMALL) for _ in range(40)]  # type: ignore[arg-type]
    assert all(outcome.revoked for outcome in outcomes)
    assert max(outcome.exposures for outcome in outcomes) <= 400


def test_peeking_needs_the_e_value() -> None:
    """The same looks with a fixed 5 % threshold on z (1.645) take back far more than 5 % of good versions; by
    the e-value at 1 / 0.05 they stay below. One metric, one stage, 300 exposures, 300 times."""
    rng = np.random.default_rng(3)
    metric = Metric("reward", 1.0, 0.0, 0.1)
    fixed = anytime = 0
    for _ in range(300):
        canary, stable = Tally(), Tally()
        crossed, proven = False, False
        for _ in range(15):
            for tally in (canary, stable):
                for bucket, value in zip(rng.integers(0, BUCKETS, 20), rng.random(20) < 0.4, strict=True):
                    tally.add(int(bucket), float(value))
            z = (stable.mean - canary.mean) / math.sqrt(canary.variance() + stable.variance())
            crossed |= z > 1.645
            proven |= log_e(metric, canary, stable) >= math.log(20)
        fixed += crossed
        anytime += proven
    assert fixed > 0.10 * 300
    assert anytime <= 0.05 * 300

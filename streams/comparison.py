"""Is the canary worse than the stable version? Evidence that may be looked at after every exposure.

**The method.** Each metric compares means over the exposures of the two sides. Users come back, so exposures
are not independent: sums are kept by bucket of users (a hash), and the variance of a mean is that of sums
over buckets (the cluster-robust "sandwich": Liang & Zeger 1986). With `harm` how far the difference is beyond
what is tolerated and V its variance, the score harm / V behaves like a Brownian motion in the information 1 /
V, with a drift that is positive only under harm. Against it stands a bet: a mixture over effects, half-normal
of scale `effect` (Robbins 1970). The e-value

    E = 2 / sqrt(1 + r) * exp(z^2 / 2 * r / (1 + r)) * Phi(z * sqrt(r / (1 + r)))
    z = harm / sqrt(V),  r = effect^2 / V

is a supermartingale as long as there is no harm, so the probability that it *ever* reaches 1 / alpha is at
most alpha, however often one looks (Ville 1939; Howard, Ramdas, McAuliffe & Sekhon 2021, "Time-uniform,
nonparametric, nonasymptotic confidence sequences", Proposition 6). It is asymptotic in the number of buckets,
as V is estimated (Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas 2024, "Time-uniform central limit theory and
asymptotic confidence sequences"). An exact bet on single exposures (Waudby-Smith & Ramdas 2024) would be
exact only if no user came twice. benchmarks/canary.md has the measured false alarms.

Three guards for small numbers: one more exposure, a whole range off the mean, is added to each side's spread;
the canary counts as at least as noisy as the stable version, since without harm they are alike; and V grows
with (g - 1) / (g - 3) for g effective buckets, the mean of an inverse chi-square: with a handful of users, or
one who makes nearly all exposures, there is no evidence.

Not here: what follows from it (`streams.release`).
"""

import hashlib
import math
from collections.abc import Sequence
from operator import mul
from typing import Final, NamedTuple

import msgspec

from headrace.wire.records import Exposure

BUCKETS: Final = 64
"""Of users; a state of two sides and five metrics stays below 10 kB."""
GROUPS_MIN: Final = 5
"""Of users on each side, below which nothing can be said about users."""
SPREAD: Final = 1.0
"""Of the exposure that is added: the range of a reward, of a share, and an e-fold of latency."""


class Metric(NamedTuple):
    """`tolerated`: what the canary's mean may be below `kept` times the stable one's."""

    name: str
    kept: float
    tolerated: float
    effect: float
    """The size of harm that the bet looks for first, in units of the metric."""


class Tally(msgspec.Struct, kw_only=True):
    """Exposures of one side, by bucket of users."""

    count: list[int] = msgspec.field(default_factory=lambda: [0] * BUCKETS)
    total: list[float] = msgspec.field(default_factory=lambda: [0.0] * BUCKETS)

    def add(self, bucket: int, value: float) -> None:
        self.count[bucket] += 1
        self.total[bucket] += value

    @property
    def exposures(self) -> int:
        return sum(self.count)

    @property
    def mean(self) -> float:
        return sum(self.total) / max(1, self.exposures)

    @property
    def groups(self) -> float:
        """Buckets, as many as would count alike (Kish 1965): one that holds nearly all is hardly more than
        one, however many others hold a little."""
        return self.exposures**2 / max(1, _products(self.count, self.count))

    @property
    def users(self) -> float:
        """How many were seen, by the buckets that are still empty ("linear counting": Whang, Vander-Zanden &
        Taylor 1990); infinite when none is."""
        empty = self.count.count(0)
        return BUCKETS * math.log(BUCKETS / empty) if empty else math.inf

    def variance(self) -> float:
        """Of the mean. At least `GROUPS_MIN` groups."""
        mean, exposures, groups = self.mean, self.exposures, self.groups
        squares = _products(self.total, self.total) - 2 * mean * _products(self.total, self.count)
        squares = max(0.0, squares + mean**2 * _products(self.count, self.count))
        # squares * g / (g - 1) and the added exposure, over n^2, times (g - 1) / (g - 3)
        return (squares * groups + SPREAD**2 * (groups - 1)) / (exposures**2 * (groups - 3))


def _products(left: Sequence[float], right: Sequence[float]) -> float:
    return float(sum(map(mul, left, right)))


def bucket_of(user: str) -> int:
    """Of a user: a hash that has nothing to do with the cohort's."""
    return hashlib.blake2b(user.encode(), digest_size=1, person=b"headrace.bucket").digest()[0] % BUCKETS


def values_of(exposure: Exposure) -> dict[str, float]:
    """What one exposure says, by metric: larger is better. Reward counts requests that stayed silent too, so
    that a model which never shows anything is seen; the accepted share is of what was shown. An answer that
    is neither silence nor text, or that no user came to see, counts against `suggested` as silence does."""
    seen = exposure.shown and not exposure.silent
    values = {
        "reward": exposure.reward,
        "suggested": 1.0 if seen else 0.0,
        "silent": 1.0 if exposure.silent else 0.0,
        "speed": -math.log1p(max(0, exposure.latency_ms)),
    }
    if seen:
        values["accepted"] = exposure.accepted
    return values


def log_e(metric: Metric, canary: Tally, stable: Tally) -> float:
    """Logarithm of the e-value against "the canary is not worse than tolerated"; 0 with too few users."""
    if min(canary.groups, stable.groups) < GROUPS_MIN:
        return 0.0
    noise, calm = canary.variance(), stable.variance()
    noise = max(noise, calm * stable.exposures / canary.exposures)
    harm = metric.kept * stable.mean - metric.tolerated - canary.mean
    return log_mixture(harm, noise + metric.kept**2 * calm, metric.effect)


def log_mixture(harm: float, variance: float, effect: float) -> float:
    """The logarithm of E above, for a difference `harm` (positive is harm) with `variance`."""
    ratio = effect**2 / variance
    part = ratio / (1 + ratio)
    z = harm / math.sqrt(variance)
    return math.log(2.0) - 0.5 * math.log1p(ratio) + z * z / 2 * part + _log_normal_cdf(z * math.sqrt(part))


def _log_normal_cdf(z: float) -> float:
    """log Phi(z); by its tail series (Abramowitz & Stegun 26.2.12) where Phi itself would be 0."""
    if z > -30:
        return math.log(0.5 * math.erfc(-z / math.sqrt(2)))
    return -z * z / 2 - math.log(-z) - 0.5 * math.log(2 * math.pi)

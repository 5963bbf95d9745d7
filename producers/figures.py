"""What two versions' results on the same trials say, with intervals; and at which chance of an accept a
policy begins to show.

Intervals are of the paired bootstrap (Efron and Tibshirani 1993, chapter 6: percentiles): trials are drawn
again together with both of their results. Pure numbers: who measured them is `producers.measure`.

T trials  R resamples
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.producers.measure import Result

RESAMPLES: Final = 2000
COVERED: Final = (2.5, 97.5)
NEWTON_STEPS: Final = 50
STEEP_MAX: Final = 60.0
"""Slopes of a threshold curve above this are a step, to the last digit."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the 95 % interval around it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Version:
    """One version: suggestions shown per request, accepts per suggestion shown, reward per request."""

    shown: Interval
    accepted: Interval
    reward: Interval


@dataclass(frozen=True, slots=True)
class Change:
    """From before to after. `fewer`: 1 - shown after / before. `higher`: accept rate after / before - 1;
    infinite where nothing was accepted before. `reward`: the difference per request."""

    before: Version
    after: Version
    fewer: Interval
    higher: Interval
    reward: Interval


@dataclass(frozen=True, slots=True)
class Bin:
    """Trials whose chance of an accept lies in `[low, high)`: how many, their mean chance, and the mean share
    in which the policy shows."""

    low: float
    high: float
    trials: int
    accept: float
    show: float


def change(before: Sequence[Result], after: Sequence[Result], *, seed: int = 0) -> Change:
    """Raises ConfigError unless both are of the same trials, and show something."""
    if len(before) != len(after) or not any(r.shown for r in before) or not any(r.shown for r in after):
        raise ConfigError(
            f"change: expected results of the same trials that show something,"
            f" got {len(before)} and {len(after)}"
        )
    draw = np.random.default_rng(seed)
    rows_RT = draw.integers(0, len(before), (RESAMPLES, len(before)))
    old, new = _Sums(before, rows_RT), _Sums(after, rows_RT)
    return Change(
        old.version,
        new.version,
        _interval(1 - _ratio(new.shown, old.shown)),
        _interval(_ratio(new.rate, old.rate) - 1),
        _interval(new.reward - old.reward),
    )


def bins(accept: Sequence[float], show: Sequence[float], edges: Sequence[float]) -> list[Bin]:
    """Calibration: of each trial the chance of an accept if shown, and the share in which it is shown. Empty
    bins are left out; the last edge is inside."""
    accept_T, show_T = np.asarray(accept), np.asarray(show)
    place_T = np.clip(np.digitize(accept_T, edges) - 1, 0, len(edges) - 2)
    found = []
    for index in range(len(edges) - 1):
        here_T = place_T == index
        if here_T.any():
            means = float(accept_T[here_T].mean()), float(show_T[here_T].mean())
            found.append(Bin(edges[index], edges[index + 1], int(here_T.sum()), *means))
    return found


def threshold(accept: Sequence[float], show: Sequence[float], *, seed: int = 0) -> Interval:
    """The chance of an accept at which a trial is shown as often as not: where a logistic curve of the
    chance, fitted to the shares by least deviance, crosses 1/2. Infinite where it isn't."""
    accept_T, show_T = np.asarray(accept, float), np.asarray(show, float)
    draw = np.random.default_rng(seed)
    rows = [np.arange(len(accept_T))] + [
        draw.integers(0, len(accept_T), len(accept_T)) for _ in range(RESAMPLES // 10)
    ]
    return _interval(np.array([_crossing(accept_T[row], show_T[row]) for row in rows]))


class _Sums:
    """Of one version, first as they are, then of each resample: `[1 + R]`."""

    def __init__(self, results: Sequence[Result], rows_RT: NDArray[np.int64]) -> None:
        shown_T = np.array([float(r.shown) for r in results])
        accepted_T = np.array([r.accepted if r.shown else 0.0 for r in results])
        self.shown = _means(shown_T, rows_RT)
        self.rate = _means(accepted_T, rows_RT) / np.maximum(self.shown, 1e-12)
        self.reward = _means(np.array([r.reward for r in results]), rows_RT)

    @property
    def version(self) -> Version:
        return Version(_interval(self.shown), _interval(self.rate), _interval(self.reward))


def _ratio(after: Floats, before: Floats) -> Floats:
    """1 where neither has any, infinite where only the one after has."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((after == 0) & (before == 0), 1.0, after / before)


def _means(value_T: Floats, rows_RT: NDArray[np.int64]) -> Floats:
    return np.concatenate([[value_T.mean()], value_T[rows_RT].mean(1)])


def _interval(values: Floats) -> Interval:
    low, high = np.percentile(values[1:], COVERED, method="nearest")  # some may be infinite
    return Interval(float(values[0]), float(low), float(high))


def _crossing(accept_T: Floats, show_T: Floats) -> float:
    """Newton's method on the deviance, a little ridge on the slope."""
    x_T = np.stack([np.ones_like(accept_T), accept_T])
    found = np.zeros(2)
    ridge = np.diag([0.0, 1e-3])
    for _ in range(NEWTON_STEPS):
        mean_T = 1 / (1 + np.exp(-np.clip(found @ x_T, -30, 30)))
        gradient = x_T @ (show_T - mean_T) - ridge @ found
        curvature = (x_T * (mean_T * (1 - mean_T) + 1e-9)) @ x_T.T + ridge
        step = np.linalg.solve(curvature, gradient)
        found = np.clip(found + np.clip(step, -2, 2), -STEEP_MAX, STEEP_MAX)
        if np.abs(step).max() < 1e-9:
            break
    if found[1] <= 0:  # shown no more often where it is worth more: no threshold
        return float("inf") if found[0] < 0 else float("-inf")
    return float(-found[0] / found[1])

"""A world for the canary: users who differ, come back and are slow to please, and versions that are as good,
worse or broken. What they do is drawn here; every decision is the real code's (`streams.release`).

U users of a side  X exposures
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from headrace.streams.comparison import BUCKETS, Tally
from headrace.streams.release import Canary, CanaryConfig, Trial
from headrace.wire.records import Record, WeightsPromoted, WeightsPublished, WeightsRevoked

Floats = NDArray[np.float64]
BLOCK: Final = 20
"""Exposures of the canary between two looks."""
STABLE_FACTOR: Final = 10
PATIENCE: Final = 3
"""Times the exposures that a stage asks for, after which a release counts as stuck."""
ACCEPTED, REJECTED = 0.75, -0.25


@dataclass(frozen=True)
class Model:
    """How users take a version. Factors are on the user's own inclination."""

    name: str
    suggests: float = 0.6
    """Share of requests for which it shows something."""
    accepted: float = 1.0
    """Factor on the acceptance of what a good model would have shown."""
    of_the_rest: float = 0.15
    """The same for what a good model would have kept silent about."""
    latency: float = 1.0
    garbage: float = 0.0
    """Share of answers that are neither silence nor a text."""


GOOD: Final = Model("as good")
PLANTED: Final = (
    Model("random weights", suggests=0.9, accepted=0.02, of_the_rest=0.02),
    Model("random weights, hardly ever a text", suggests=0.9, accepted=0.02, of_the_rest=0.02, garbage=0.95),
    Model("always shows", suggests=1.0),
    Model("never shows", suggests=0.0),
    Model("twice as slow", latency=2.0),
    Model("accepted half as often", accepted=0.5),
    Model("accepted a fifth less", accepted=0.8),
)


@dataclass(frozen=True)
class World:
    """`spread`: standard deviation of the users' inclination to accept; activity is log-normal."""

    users: int = 20_000
    accept: float = 0.35
    spread: float = 0.15
    activity: float = 1.0


class Outcome(NamedTuple):
    """Of one release. `exposures`: how many the canary had had, all stages together. `stage`: its last share;
    below 1 for one that was not taken back, it was stuck there: too few users to say anything."""

    revoked: bool
    by: str
    exposures: int
    stage: float


class Side(NamedTuple):
    """Users of one side, drawn once a stage."""

    inclination_U: Floats
    pace_U: Floats
    chance_U: Floats
    """Cumulative share of the exposures."""
    bucket_U: NDArray[np.int64]


def release(rng: Generator, world: World, model: Model, config: CanaryConfig) -> Outcome:
    """One version from its first stage to its end, judged by the real state machine."""
    canary = Canary("world", config)
    _send(canary, [published(0)])
    _send(canary, canary.decide())
    _send(canary, [published(1)])
    decided = canary.decide()
    exposures = 0
    stage = config.stages[0]
    while True:
        _send(canary, decided)
        record = decided[0]
        if isinstance(record, WeightsRevoked):
            return Outcome(
                True, record.evidence.partition('"reason":"')[2].partition(":")[0], exposures, stage
            )
        assert isinstance(record, WeightsPromoted)
        trial = canary.state.trial
        if trial is None:
            return Outcome(False, "", exposures, 1.0)
        stage = trial.share
        sides = (_side(rng, world, trial.share), _side(rng, world, 1 - trial.share))
        decided = []
        patience = exposures + PATIENCE * config.exposures_min
        while not decided:
            if exposures >= patience:
                return Outcome(False, "", exposures, stage)
            expose(rng, sides, trial, model)
            exposures += BLOCK
            decided = canary.decide()


def expose(rng: Generator, sides: tuple[Side, Side], trial: Trial, model: Model) -> None:
    """`BLOCK` exposures of the canary, and as many of the stable side as its share has meanwhile, up to
    `STABLE_FACTOR` times as many: more would change little but the time it takes."""
    _tell(rng, sides[0], trial.canary_side, model, BLOCK)
    factor = min(STABLE_FACTOR, (1 - trial.share) / trial.share)
    _tell(rng, sides[1], trial.stable_side, GOOD, round(BLOCK * factor))


def _side(rng: Generator, world: World, share: float) -> Side:
    users = max(1, rng.binomial(world.users, share))
    a = world.accept * (world.accept * (1 - world.accept) / world.spread**2 - 1)
    weight_U = rng.lognormal(0, world.activity, users)
    return Side(
        inclination_U=rng.beta(a, a * (1 - world.accept) / world.accept, users),
        pace_U=rng.normal(0, 0.3, users),
        chance_U=np.cumsum(weight_U) / weight_U.sum(),
        bucket_U=rng.integers(0, BUCKETS, users),
    )


def _tell(rng: Generator, side: Side, tallies: dict[str, Tally], model: Model, exposures: int) -> None:
    user_X = np.minimum(np.searchsorted(side.chance_U, rng.random(exposures)), len(side.chance_U) - 1)
    bucket_X = side.bucket_U[user_X]
    wanted_X = rng.random(exposures) < GOOD.suggests  # where a good model has something to say
    rest = max(0.0, model.suggests - GOOD.suggests) / (1 - GOOD.suggests)
    said = min(1.0, model.suggests / GOOD.suggests)
    shown_X = rng.random(exposures) < np.where(wanted_X, said, rest)
    garbage_X = rng.random(exposures) < model.garbage
    silent_X = ~shown_X & ~garbage_X
    shown_X &= ~garbage_X
    factor_X = np.where(wanted_X, model.accepted, min(model.accepted, model.of_the_rest))
    accepted_X = shown_X & (rng.random(exposures) < side.inclination_U[user_X] * factor_X)
    reward_X = np.where(accepted_X, ACCEPTED, np.where(shown_X, REJECTED, 0.0))
    latency_X = 40 * model.latency * np.exp(side.pace_U[user_X] + rng.normal(0, 0.4, exposures))
    _add(tallies["reward"], bucket_X, reward_X)
    _add(tallies["suggested"], bucket_X, shown_X.astype(float))
    _add(tallies["silent"], bucket_X, silent_X.astype(float))
    _add(tallies["speed"], bucket_X, -np.log1p(latency_X))
    _add(tallies["accepted"], bucket_X[shown_X], accepted_X[shown_X].astype(float))


def _add(tally: Tally, bucket_X: NDArray[np.int64], value_X: NDArray[np.floating]) -> None:
    """What `Tally.add` does, for many at once."""
    count = np.bincount(bucket_X, minlength=BUCKETS)
    total = np.bincount(bucket_X, value_X, minlength=BUCKETS)
    tally.count = (np.asarray(tally.count) + count).tolist()
    tally.total = (np.asarray(tally.total) + total).tolist()


def published(version: int, run: str = "world") -> WeightsPublished:
    return WeightsPublished(
        run=run,
        version=version,
        root="",
        step=version,
        manifest_uri="",
        manifest_sha256="",
        encodings=(),
        published_ms=0,
    )


def _send(canary: Canary, records: list[Record]) -> None:
    """As the log would hand them back."""
    for record in records:
        canary.learn(record, 0)

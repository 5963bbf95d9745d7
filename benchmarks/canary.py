"""How often the canary takes a good version back, and how many exposures a bad one gets: simulated releases,
judged by the real state machine at every 20 exposures (`benchmarks.canary_world`).
"""

import argparse
from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks import canary_lag
from benchmarks.canary_world import GOOD, PLANTED, Model, Outcome, World, release
from benchmarks.page import header, table
from headrace.streams.release import CanaryConfig

RELEASES = 1000
PLANTED_RELEASES = 100
NOTHING_TOLERATED = {
    "reward_lost_max": 0.0,
    "accepted_lost_max": 0.0,
    "habit_lost_max": 0.0,
    "slower_max": 1.0,
}


class Place(NamedTuple):
    """Users, and the policy that fits their number."""

    name: str
    world: World
    config: CanaryConfig


ONLINE = CanaryConfig(stages=(0.5,), exposures_min=60)
"""As in configs/online.toml."""
PLACES = (
    Place("20,000 users, as shipped", World(), CanaryConfig()),
    Place("2,000 users, from 10 %", World(users=2_000), CanaryConfig(stages=(0.1, 0.5))),
    Place("200 users, from 10 %", World(users=200), CanaryConfig(stages=(0.1, 0.5), exposures_min=500)),
    Place("40 users alike, 50 %", World(users=40, spread=0.05, activity=0.3), ONLINE),
    Place("60 users, from 30 %", World(users=60), CanaryConfig(stages=(0.3,), exposures_min=500)),
)


def strict(config: CanaryConfig) -> CanaryConfig:
    """The same stages, with nothing tolerated: a version as good stands on the edge of harm."""
    return msgspec.structs.replace(config, **NOTHING_TOLERATED)


def outcomes(world: World, model: Model, config: CanaryConfig, releases: int, seed: int) -> list[Outcome]:
    rng = np.random.default_rng(seed)
    return [release(rng, world, model, config) for _ in range(releases)]


def row(place: Place, model: Model, found: list[Outcome]) -> list[object]:
    """Exposures until it was taken back: half of the releases, 95 % of them, the slowest."""
    back = sorted(outcome.exposures for outcome in found if outcome.revoked)
    by = Counter(outcome.by for outcome in found if outcome.revoked)
    quantiles = [int(np.quantile(back, q, method="higher")) for q in (0.5, 0.95, 1.0)] if back else ["-"] * 3
    return [
        place.name,
        model.name,
        len(found),
        f"{len(back) / len(found):.1%}",
        f"{sum(not o.revoked and o.stage < 1 for o in found) / len(found):.1%}",
        *quantiles,
        ", ".join(name for name, _ in by.most_common(2)),
    ]


COLUMNS = (
    "users",
    "version",
    "releases",
    "taken back",
    "stuck",
    "exposures: median",
    "95 %",
    "most",
    "first seen in",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--releases", type=int, default=RELEASES)
    parser.add_argument("--planted", type=int, default=PLANTED_RELEASES)
    args = parser.parse_args()
    print(header("The canary: false alarms and exposures to broken versions", "numpy"))
    good, planted = [], []
    for number, place in enumerate(PLACES):
        found = outcomes(place.world, GOOD, place.config, args.releases, number)
        good.append(row(place, GOOD, found))
        edge = outcomes(place.world, GOOD, strict(place.config), args.releases, number)
        good.append(row(place, Model("as good, nothing tolerated"), edge))
        planted += [
            row(place, model, outcomes(place.world, model, place.config, args.planted, number))
            for model in PLANTED
        ]
    print("## Versions as good as the stable one\n")
    print(table(COLUMNS, good))
    print("## Planted\n")
    print(table(COLUMNS, planted))
    print("## The age of live units\n")
    print(table(canary_lag.COLUMNS, [canary_lag.row(loop) for loop in canary_lag.LOOPS]))


if __name__ == "__main__":
    main()

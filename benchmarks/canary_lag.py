"""How old live units are when a step reads them, while weights are released by stages: users have the version
that has been judged, the trainer has gone on meanwhile. Time is simulated; every decision is the real code's
(`streams.release`).
"""

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

from benchmarks.canary_world import published
from headrace.streams.canary import POLL_MS
from headrace.streams.release import Canary, CanaryConfig
from headrace.wire.records import Exposure, Record, WeightsPromoted
from headrace.wire.release import Release, in_cohort

RUN: Final = "lag"
SILENT, ACCEPTED = 0.2, 0.4
"""Shares of requests answered by silence, and of what is shown that is accepted; all versions are as good."""

LOOKS_MAX: Final = 100
"""In the time of one step: more would change little but the time it takes."""


@dataclass(frozen=True)
class Loop:
    """One service, and a trainer that publishes every `step_s`. `config` None: released at once."""

    name: str
    users: int
    suggestions_per_s: float
    step_s: float
    lag_versions_max: int
    config: CanaryConfig | None
    live_per_step: int = 1 << 30
    judged_s: float = 1.0
    """From an answer that is shown to its judgement, on average; silence is judged at once."""
    served_s: float = 1.0
    """From a decision to the replicas that follow it."""
    hours: float = 0.5


class Lag(NamedTuple):
    """`release_s`: from a version's first stage to the last. Lags are in versions."""

    releases: int
    release_s: float
    mean: float
    most_95: int
    """What 95 % of units do not pass."""
    trainable: float
    """Share of units within the loop's `lag_versions_max`."""


@dataclass
class _Play:
    """The state of one simulated loop."""

    loop: Loop
    draw: random.Random
    canary: Canary
    served: Release = field(default_factory=Release)
    """What replicas have heard of."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Units to be trained: (version, number)."""
    lags: list[int] = field(default_factory=list)
    began: dict[int, float] = field(default_factory=dict)
    took: list[float] = field(default_factory=list)


def lag(loop: Loop, seed: int = 0) -> Lag:
    """Of all units that steps read in the second half of the time."""
    play = _Play(loop, random.Random(seed), Canary(RUN, loop.config or CanaryConfig()))
    numbers = count()
    events: list[tuple[float, int, str, object]] = []

    def at(time_s: float, what: str, about: object = None) -> None:
        heapq.heappush(events, (time_s, next(numbers), what, about))

    end_s = 3600 * loop.hours
    at(0.0, "step", 0)
    at(0.0, "decide")
    at(2 * loop.served_s, "ask")
    while events and events[0][0] < end_s:
        now_s, number, what, about = heapq.heappop(events)
        match what, about:
            case "step", int(version):
                _train(play, version, counts=now_s > end_s / 2)
                record = published(version, RUN)
                play.canary.learn(record, round(1000 * now_s))
                at(now_s + loop.served_s, "served", record)
                at(now_s + loop.step_s, "step", version + 1)
            case "decide", _:
                for decided in play.canary.decide() if loop.config else []:
                    play.canary.learn(decided, round(1000 * now_s))
                    _note(play, decided, now_s)
                    at(now_s + loop.served_s, "served", decided)
                at(now_s + max(POLL_MS / 1000, loop.step_s / LOOKS_MAX), "decide")
            case "served", Record() as record:
                play.served.learn(record)
            case "ask", _:
                exposure = _answer(play, number, now_s)
                delay_s = 0.05 if exposure.silent else play.draw.expovariate(1 / loop.judged_s)
                at(now_s + delay_s, "judged", exposure)
                at(now_s + play.draw.expovariate(loop.suggestions_per_s), "ask")
            case "judged", Exposure() as exposure:
                play.canary.learn(exposure, round(1000 * now_s))
                play.waiting.append((exposure.version, number))
    lags = sorted(play.lags)
    return Lag(
        len(play.took),
        sum(play.took) / max(1, len(play.took)),
        sum(lags) / len(lags),
        lags[int(0.95 * len(lags))],
        sum(lag <= loop.lag_versions_max for lag in lags) / len(lags),
    )


def _train(play: _Play, version: int, *, counts: bool) -> None:
    """The step that starts from `version` reads what is there, oldest first."""
    for _ in range(min(len(play.waiting), play.loop.live_per_step)):
        made_by, _ = play.waiting.popleft()
        if counts:
            play.lags.append(version - made_by)


def _note(play: _Play, record: Record, now_s: float) -> None:
    if isinstance(record, WeightsPromoted) and record.share < 1:
        play.began.setdefault(record.version, now_s)
    elif isinstance(record, WeightsPromoted) and record.version in play.began:
        play.took.append(now_s - play.began[record.version])


def _answer(play: _Play, number: int, now_s: float) -> Exposure:
    user = f"u{play.draw.randrange(play.loop.users)}"
    serving = play.served.serving("gradual" if play.loop.config else "immediate")
    version, cohort = serving.stable, "stable"
    if serving.canary is not None and in_cohort(RUN, serving.canary, user, serving.share):
        version, cohort = serving.canary, "canary"
    if version is None:
        version, cohort = play.served.newest or 0, ""
    silent = play.draw.random() < SILENT
    accepted = not silent and play.draw.random() < ACCEPTED
    return Exposure(
        run=RUN,
        group_id=f"s{number}",
        version=version,
        cohort=cohort,
        user=user,
        region="",
        silent=silent,
        shown=not silent,
        accepted=float(accepted),
        reward=0.0 if silent else 0.75 if accepted else -0.25,
        latency_ms=round(40 * play.draw.lognormvariate(0, 0.4)),
        opened_ms=round(1000 * now_s),
        closed_ms=round(1000 * now_s),
    )


DEMO: Final = CanaryConfig(stages=(0.5,), exposures_min=60)
TOWN: Final = CanaryConfig(stages=(0.1, 0.5))
LOOPS: Final = (
    Loop("online.toml, 7 s a step, at once", 40, 13, 7, 4, None, live_per_step=96, judged_s=1.5),
    Loop("online.toml, 7 s a step", 40, 13, 7, 4, DEMO, live_per_step=96, judged_s=1.5),
    Loop("online.toml, 5 s a step", 40, 13, 5, 4, DEMO, live_per_step=96, judged_s=1.5),
    Loop("online.toml, 5 s a step, lag of 8", 40, 13, 5, 8, DEMO, live_per_step=96, judged_s=1.5),
    Loop("2,000 users, 30 min a step, at once", 2_000, 5, 1800, 2, None, judged_s=720, hours=16),
    Loop("2,000 users, 30 min a step", 2_000, 5, 1800, 2, TOWN, judged_s=720, hours=16),
)
COLUMNS: Final = (
    "loop",
    "lag_versions_max",
    "releases",
    "a release takes, s",
    "lag: mean",
    "95 %",
    "trainable",
)


def row(loop: Loop) -> list[object]:
    found = lag(loop)
    took = round(found.release_s) if found.releases else "-"
    return [
        loop.name,
        loop.lag_versions_max,
        found.releases,
        took,
        found.mean,
        found.most_95,
        f"{found.trainable:.0%}",
    ]

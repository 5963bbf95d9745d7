"""Gradual release, the decisions: which version is tried on how many users, and when it goes on or back.

A pure state machine over the log: records in, records out. It folds what stands on `weights` (its own records
as they are read back, so that it, the relays and a person's commands agree on the order), the exposures of
both sides, and refusals of weights that no replica can serve. Not here: the statistics
(`streams.comparison`), reading and writing (`streams.canary`).

One version is under test at a time. It goes through the stages of `CanaryConfig.stages` and then serves
everybody; each stage compares anew, since the share, and so the mix of hours and users, has changed. Versions
that come meanwhile wait, and when the test has ended the newest of them is next: those between serve no live
user, and the evidence of that promotion names them. A version under test is not given up for a newer one, as
with fast publishing none would ever be judged, unless it is overdue: then its users decide nothing, and the
newest, whose cohort is another, is tried in its place.
"""

from math import ceil, exp, log
from typing import Annotated, Final

import msgspec

from headrace.streams.comparison import GROUPS_MIN, Metric, Tally, bucket_of, log_e, values_of
from headrace.wire.records import (
    Exposure,
    Record,
    WeightsAck,
    WeightsPromoted,
    WeightsPublished,
    WeightsRevoked,
)
from headrace.wire.release import Release

UNFIT_KEPT: Final = 64
DOUBT: Final = 1.0
"""Logarithm of the e-value above which a version is not promoted yet, however many exposures it has had: one
that harms gets there long before `log_e_max`, one that does not hardly ever (benchmarks/canary.md)."""
PATIENCE: Final = 3
"""Times the exposures that a stage asks for on its smaller side, after which it is overdue."""
RETURNS: Final = 4
"""Exposures for each user seen, after which there are hardly others to come."""
USERS_SIDE: Final = 40
"""With so many users on a side less than 1 % of releases are stuck, of 20 about 6 %: how often log-normal
activity (sigma 1) leaves fewer than `GROUPS_MIN` effective groups."""
Count = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)]
Tolerated = Annotated[float, msgspec.Meta(ge=0.0)]


class CanaryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The policy of gradual release."""

    auto: bool = True
    """False: compare and log, but leave promotions and revocations to people."""
    stages: Annotated[tuple[Share, ...], msgspec.Meta(min_length=1)] = (0.01, 0.1, 0.5)
    """Shares of the users, one after the other; then all. Choose the first so that it holds users."""
    exposures_min: Count = 1000
    """Of each side in a stage, before the next one; more while harm is suspected and not proven."""
    exposures_first: Count = 20
    """Of each side before anything is concluded."""
    alpha: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] = 0.05
    """Bound on the probability that a version without harm is ever revoked, all stages and metrics
    together."""
    reward_lost_max: Tolerated = 0.01
    """Reward per request that a version may lose."""
    accepted_lost_max: Tolerated = 0.05
    """Accepted share of what is shown that it may lose."""
    habit_lost_max: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    """Part of the stable version's suggestions, and of its silences, that it may give up: to learn when to be
    silent is wanted, always or never to show something is not."""
    slower_max: Annotated[float, msgspec.Meta(ge=1.0)] = 1.25
    """Ratio of (geometric) mean latencies."""

    def __post_init__(self) -> None:
        if list(self.stages) != sorted(set(self.stages)):
            raise ValueError(f"stages: expected growing shares, got {self.stages}")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("reward", 1.0, self.reward_lost_max, 0.1),
            Metric("accepted", 1.0, self.accepted_lost_max, 0.1),
            Metric("suggested", 1.0 - self.habit_lost_max, 0.0, 0.1),
            Metric("silent", 1.0 - self.habit_lost_max, 0.0, 0.1),
            Metric("speed", 1.0, log(self.slower_max), 0.3),
        )

    @property
    def log_e_max(self) -> float:
        """Where the evidence of one metric in one stage is enough: alpha is shared out evenly (a union
        bound)."""
        return log(len(self.metrics) * len(self.stages) / self.alpha)


class Trial(msgspec.Struct, kw_only=True):
    """One stage of one version: who is compared with whom, and what was seen."""

    stable: int
    candidate: int
    share: float
    began_ms: int
    canary_side: dict[str, Tally]
    stable_side: dict[str, Tally]


class State(msgspec.Struct, kw_only=True):
    """Everything the canary knows."""

    release: Release = msgspec.field(default_factory=Release)
    trial: Trial | None = None
    awaited: int = 0
    """Own records that were sent and not read back: no decision before."""
    unfit: list[int] = []


class Evidence(msgspec.Struct, kw_only=True):
    """Why: the text of a record's `evidence`, as JSON."""

    reason: str
    stable: int | None = None
    share: float | None = None
    exposures: tuple[int, int] | None = None
    """Of the canary, of the stable side."""
    means: dict[str, tuple[float, float]] = {}
    """By metric; `latency_ms` is a geometric mean."""
    e: dict[str, float] = {}
    """e-values; at `e_max` a version is revoked."""
    e_max: float | None = None
    skipped: list[int] = []
    """Versions that were published while another was under test, and serve no live user."""


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """A trial that its users will hardly ever end: a person's turn."""

    version: int
    share: float
    exposures: tuple[int, int]
    """Of the canary, of the stable side."""
    users_min: int
    """In all, at this share, that would be enough."""

    def __str__(self) -> str:
        canary, stable = self.exposures
        return (
            f"version {self.version} is stuck at {100 * self.share:g} % of users: {canary:,} exposures of it"
            f" and {stable:,} of the stable version decide nothing (too few users, one who makes nearly all"
            " of them, no replica that serves it, or harm that is suspected and not proven);"
            f" {self.users_min:,} users are enough for this share"
        )


def overdue(config: CanaryConfig, trial: Trial) -> bool:
    """Whether the sides have had several times the exposures that should have ended the stage."""
    exposures = trial.canary_side["reward"].exposures + trial.stable_side["reward"].exposures
    return exposures * min(trial.share, 1.0 - trial.share) >= PATIENCE * config.exposures_min


def stuck(config: CanaryConfig, trial: Trial | None) -> Stuck | None:
    """Of one that is overdue, or where those who are there show that the smaller side can't hold as many
    users as evidence needs. None: it is under way, or left to people anyway."""
    if trial is None or not config.auto:
        return None
    canary, stable = trial.canary_side["reward"], trial.stable_side["reward"]
    smaller = min(trial.share, 1.0 - trial.share)
    larger = canary if trial.share > 0.5 else stable
    all_seen = larger.exposures >= max(config.exposures_min, RETURNS * larger.users)
    too_few = all_seen and larger.users * smaller / (1.0 - smaller) < GROUPS_MIN
    if not (too_few or overdue(config, trial)):
        return None
    return Stuck(
        version=trial.candidate,
        share=trial.share,
        exposures=(canary.exposures, stable.exposures),
        users_min=ceil(USERS_SIDE / smaller),
    )


class Canary:
    """The state machine. `learn` each record in the order of the log, then `decide`."""

    def __init__(self, run: str, config: CanaryConfig, state: State | None = None) -> None:
        self._run = run
        self._config = config
        self.state = state or State()

    def learn(self, record: Record, at_ms: int) -> None:
        """`at_ms`: broker time."""
        if getattr(record, "run", None) != self._run:
            return
        match record:
            case Exposure():
                self._expose(record)
            case WeightsAck():
                if record.unfit and record.version not in self.state.unfit:
                    self.state.unfit = [*self.state.unfit, record.version][-UNFIT_KEPT:]
            case WeightsPublished() | WeightsPromoted() | WeightsRevoked():
                if not isinstance(record, WeightsPublished) and record.by == "canary":
                    self.state.awaited = max(0, self.state.awaited - 1)
                self.state.release.learn(record)
                self._follow(at_ms)

    def decide(self) -> list[Record]:
        """The records to send now. They count as awaited: send them before the next record is learned, and
        take them as sent only when they are."""
        if self.state.awaited or not self._config.auto:
            return []
        decided = self._unfit() or self._first() or self._judged() or self._next()
        self.state.awaited = len(decided)
        return decided

    def evidence(self, reason: str) -> Evidence:
        """What the trial under way shows so far."""
        trial = self.state.trial
        if trial is None:
            return Evidence(reason=reason)
        sides = [(trial.canary_side[m.name], trial.stable_side[m.name]) for m in self._config.metrics]
        means = {
            metric.name: (round(canary.mean, 6), round(stable.mean, 6))
            for metric, (canary, stable) in zip(self._config.metrics, sides, strict=True)
        }
        ours, theirs = means.pop("speed")
        means["latency_ms"] = (round(exp(-ours) - 1, 3), round(exp(-theirs) - 1, 3))
        return Evidence(
            reason=reason,
            stable=trial.stable,
            share=trial.share,
            exposures=(sides[0][0].exposures, sides[0][1].exposures),
            means=means,
            e={name: float(f"{exp(min(value, 700.0)):.4g}") for name, value in self._log_e(trial).items()},
            e_max=round(exp(self._config.log_e_max), 3),
        )

    def _expose(self, exposure: Exposure) -> None:
        trial = self.state.trial
        if trial is None or exposure.quarantined or exposure.opened_ms < trial.began_ms:
            return
        if (exposure.cohort, exposure.version) == ("canary", trial.candidate):
            side = trial.canary_side
        elif (exposure.cohort, exposure.version) == ("stable", trial.stable):
            side = trial.stable_side
        else:
            return
        bucket = bucket_of(exposure.user)
        for name, value in values_of(exposure).items():
            side[name].add(bucket, value)

    def _follow(self, at_ms: int) -> None:
        """Begins a trial where the release says so, ends it where another is in force."""
        serving = self.state.release.serving("gradual")
        trial = self.state.trial
        if serving.stable is None or serving.canary is None:
            self.state.trial = None
        elif trial is None or (trial.stable, trial.candidate, trial.share) != serving:
            names = [metric.name for metric in self._config.metrics]
            self.state.trial = Trial(
                stable=serving.stable,
                candidate=serving.canary,
                share=serving.share,
                began_ms=at_ms,
                canary_side={name: Tally() for name in names},
                stable_side={name: Tally() for name in names},
            )

    def _unfit(self) -> list[Record]:
        release = self.state.release
        unfit = [version for version in self.state.unfit if version not in release.revoked]
        return [
            self._revoke(v, Evidence(reason="a replica found numbers that are not finite")) for v in unfit
        ]

    def _first(self) -> list[Record]:
        """Somebody has to be stable before anything can be compared."""
        release = self.state.release
        fit = [version for version in release.published if version not in release.revoked]
        if release.stable or release.pinned is not None or not fit:
            return []
        return [self._promote(fit[-1], 1.0, Evidence(reason="nothing is stable to compare it with"))]

    def _judged(self) -> list[Record]:
        trial = self.state.trial
        if trial is None:
            return []
        canary, stable = trial.canary_side["reward"], trial.stable_side["reward"]
        found = self._log_e(trial)
        worst = max(found, key=lambda name: found[name])
        if found[worst] >= self._config.log_e_max:
            return [self._revoke(trial.candidate, self.evidence(f"{worst}: worse than the stable version"))]
        enough = min(canary.exposures, stable.exposures) >= self._config.exposures_min
        if enough and min(canary.groups, stable.groups) >= GROUPS_MIN and found[worst] <= DOUBT:
            share = next((stage for stage in self._config.stages if stage > trial.share), 1.0)
            return [self._promote(trial.candidate, share, self.evidence("no sign of harm"))]
        return []

    def _next(self) -> list[Record]:
        """The newest version, if it is newer than those in service, and nothing is under test or the test is
        overdue."""
        release, trial = self.state.release, self.state.trial
        newest, stable = release.newest, release.serving("gradual").stable
        if newest is None or stable is None or release.pinned is not None or newest in release.revoked:
            return []
        if newest <= max(stable, -1 if trial is None else trial.candidate):
            return []
        if trial is not None and not overdue(self._config, trial):
            return []
        between = [version for version in release.published if stable < version < newest]
        evidence = self.evidence("the newest version")
        if trial is not None:
            evidence.reason += f"; {trial.candidate} is overdue, and undecided"
        evidence.stable = stable
        evidence.skipped = [version for version in between if version not in release.revoked]
        return [self._promote(newest, self._config.stages[0], evidence)]

    def _log_e(self, trial: Trial) -> dict[str, float]:
        first = self._config.exposures_first
        found = {}
        for metric in self._config.metrics:
            canary, stable = trial.canary_side[metric.name], trial.stable_side[metric.name]
            enough = min(canary.exposures, stable.exposures) >= first
            found[metric.name] = log_e(metric, canary, stable) if enough else 0.0
        return found

    def _promote(self, version: int, share: float, evidence: Evidence) -> Record:
        return WeightsPromoted(run=self._run, version=version, share=share, evidence=_text(evidence))

    def _revoke(self, version: int, evidence: Evidence) -> Record:
        return WeightsRevoked(run=self._run, version=version, evidence=_text(evidence))


def _text(evidence: Evidence) -> str:
    said = {key: value for key, value in msgspec.to_builtins(evidence).items() if value not in (None, {}, [])}
    return msgspec.json.encode(said).decode()

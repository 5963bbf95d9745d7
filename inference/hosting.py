"""Which weights serve whom: the newest for rollouts, and the two sides of a release for live users.

Values, not a machine: the engine's thread puts a new `Hosting` in place of the old one between two steps, any
thread may look. Not here: who decides on a release (`streams.canary`), computing (`inference.engine`).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace.inference.weights import ServedWeights
from headrace.rpc.generation import Cohort, Generation
from headrace.wire.release import in_cohort


@dataclass(frozen=True, slots=True)
class SidedRelease:
    """`share` of the users have `canary`; the run salts who that is."""

    run: str
    stable: ServedWeights
    canary: ServedWeights | None
    share: float


class Choice(NamedTuple):
    weights: ServedWeights
    cohort: Cohort


@dataclass(frozen=True, slots=True)
class Hosting:
    """Every set of weights in memory. `held` ones serve nobody yet."""

    newest: ServedWeights | None = None
    release: SidedRelease | None = None
    held: tuple[ServedWeights, ...] = ()

    @property
    def sets(self) -> list[ServedWeights]:
        """Each set once, the newest first."""
        sides = (self.release.stable, self.release.canary) if self.release else ()
        found: list[ServedWeights] = []
        for item in (self.newest, *sides, *self.held):
            if item is not None and not any(_same(item, other) for other in found):
                found.append(item)
        return found

    def find(self, version: int) -> ServedWeights | None:
        return next((item for item in self.sets if item.version == version), None)

    def choose(self, request: Generation) -> Choice | None:
        """The weights that a new request starts with. None: there are none for it."""
        if request.version is not None:
            pinned = self.find(request.version)
            return None if pinned is None else Choice(pinned, "")
        release = self.release
        if request.lane != "live" or release is None:
            return None if self.newest is None else Choice(self.newest, "")
        canary = release.canary
        if canary is not None and in_cohort(release.run, canary.version, request.user, release.share):
            return Choice(canary, "canary")
        return Choice(release.stable, "stable")

    def go_on(self, started_version: int, cohort: Cohort) -> ServedWeights:
        """The weights of the next token of a sequence that has begun: those of its side now. One whose canary
        is gone goes on with the stable version."""
        release = self.release
        if cohort and release is not None:
            canary = release.canary
            mine = cohort == "canary" and canary is not None and canary.version == started_version
            return canary if mine and canary is not None else release.stable
        assert self.newest is not None, "a release ends only where there is a newest version"
        return self.newest

    def with_newest(self, weights: ServedWeights) -> "Hosting":
        return replace(self, newest=self._shared(weights))

    def with_held(self, weights: ServedWeights, sets_max: int) -> "Hosting | None":
        """None when that would be more than `sets_max` sets."""
        after = replace(self, held=(*self.held, self._shared(weights)))
        return after if len(after.sets) <= sets_max else None

    def with_release(self, run: str, stable: int | None, canary: int | None, share: float) -> "Hosting | str":
        """The release in force from now on; sets that nobody is served are let go. Or why it can't be."""
        if stable is None:
            return (
                replace(self, release=None, held=())
                if self.newest is not None or self.release is None
                else "expected a newest version to fall back on, got none"
            )
        if not 0.0 <= share <= 1.0:
            return f"share: expected 0 to 1, got {share}"
        hosted = [item.version for item in self.sets]
        missing = [version for version in (stable, canary) if version is not None and version not in hosted]
        if missing:
            return f"expected hosted versions, got {missing} beside {hosted}"
        first, second = self.find(stable), None if canary is None else self.find(canary)
        assert first is not None
        return replace(self, release=SidedRelease(run, first, second, share), held=())

    def _shared(self, weights: ServedWeights) -> ServedWeights:
        """The same set that is in memory already, if it is."""
        return next((item for item in self.sets if _same(item, weights)), weights)


def _same(one: ServedWeights, other: ServedWeights) -> bool:
    return (one.version, one.root) == (other.version, other.root)

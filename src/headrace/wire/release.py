"""Who is served which weights: what the records on `weights` mean together, for all who read them.

A pure fold in the order of the log, so that relays, the canary and the command line never disagree. Not here:
deciding anything (`streams.release`), bringing it about (`consumers.weights`, `inference`).

Without a release (`immediate`) each published version serves everybody at once. With one (`gradual`) live
users have the *stable* version, and a cohort of them the *candidate*; rollouts always have the newest.
"""

import hashlib
from typing import Final, Literal, NamedTuple

import msgspec

from headrace.wire.records import Record, WeightsPromoted, WeightsPublished, WeightsRevoked

Mode = Literal["immediate", "gradual"]
KEPT: Final = 64
"""Published and former stable versions remembered, to fall back on when the present one is revoked."""


class ReleaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What relays, the canary and the command line share."""

    mode: Mode = "immediate"
    """`gradual`: live users get new weights from the canary (`headrace canary`), by stages. `immediate`: as
    soon as they are published."""


class Serving(NamedTuple):
    """Of live users: a `share` has the `canary`, all others have `stable`. None: nothing is chosen, so they
    have the newest like everybody."""

    stable: int | None = None
    canary: int | None = None
    share: float = 0.0


class Release(msgspec.Struct, kw_only=True):
    """What was said so far of one run. `stable`: versions that served all and were not revoked, the present
    one last."""

    published: list[int] = []
    stable: list[int] = []
    candidate: int | None = None
    share: float = 0.0
    pinned: int | None = None
    revoked: list[int] = []

    @property
    def newest(self) -> int | None:
        return self.published[-1] if self.published else None

    def learn(self, record: Record) -> bool:
        """Takes the next record of `weights`; whether it changed anything. While a version is pinned, what
        the canary says of others is void, except a revocation."""
        match record:
            case WeightsPublished():
                if self.newest is not None and record.version <= self.newest:
                    return False
                self.published = [*self.published, record.version][-KEPT:]
                return True
            case WeightsPromoted():
                if record.by == "canary" and (self.pinned is not None or record.version in self.revoked):
                    return False
                return self._promote(record)
            case WeightsRevoked():
                return self._revoke(record.version)
        return False

    def serving(self, mode: Mode) -> Serving:
        """What live users should have now."""
        if self.pinned is not None:
            return Serving(self.pinned)
        if mode == "gradual" and self.stable:
            return Serving(self.stable[-1], self.candidate, self.share)
        if self.newest not in self.revoked:
            return Serving()
        return Serving(next((kept for kept in reversed(self.published) if kept not in self.revoked), None))

    def _promote(self, record: WeightsPromoted) -> bool:
        if record.version in self.revoked:  # by hand: a person takes the revocation back
            self.revoked.remove(record.version)
        if record.by == "hand":
            self.pinned = record.version if record.pinned else None
        if record.share < 1.0:
            self.candidate, self.share = record.version, record.share
            return True
        self.candidate, self.share = None, 0.0
        if self.stable[-1:] != [record.version]:
            self.stable = [*self.stable, record.version][-KEPT:]
        return True

    def _revoke(self, version: int) -> bool:
        if version in self.revoked:
            return False
        self.revoked = sorted([*self.revoked, version])
        self.stable = [kept for kept in self.stable if kept != version]
        if self.pinned == version:
            self.pinned = None
        if self.candidate == version:
            self.candidate, self.share = None, 0.0
        return True


def place_of(run: str, version: int, user: str) -> float:
    """Where `user` stands in the queue for `version`, in [0, 1): a hash, so the same on every replica and
    after every restart.

    Cohorts of one release are nested, since whoever stands below 1 % stands below 10 %; the version salts it,
    so that it isn't always the same users who try new weights first.
    """
    digest = hashlib.blake2b(f"{run}/{version}/{user}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def in_cohort(run: str, version: int, user: str, share: float) -> bool:
    """Whether `user` gets the candidate. One without a pseudonym never does: nobody could say whether two
    such answers were for the same person."""
    return bool(user) and place_of(run, version, user) < share

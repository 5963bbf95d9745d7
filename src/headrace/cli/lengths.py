"""Whether long rollouts are lost more often than short ones. Numbers in, numbers out.

The units of known length are cut at their median; Fisher's exact test (one-sided: the long ones are lost more
often) on the table long/short x lost/kept. Exact at every size, so that a small run raises no false alarm.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, lgamma

SIGNIFICANT = 0.01
"""A warning below it: one false alarm in a hundred looks at healthy runs, at most."""


@dataclass(frozen=True, slots=True)
class LengthTest:
    """`long`: units of more than `median` tokens (of as many at least, when none has more)."""

    median: int
    long: int
    long_lost: int
    short: int
    short_lost: int
    p: float

    @property
    def lost(self) -> int:
        return self.long_lost + self.short_lost

    @property
    def biased(self) -> bool:
        return self.p < SIGNIFICANT


def length_test(units: Iterable[tuple[int, bool]]) -> LengthTest | None:
    """`units`: (tokens, lost) of each. None when they can't be told apart by length. Units without a token
    have no known length and are left out."""
    known = sorted((tokens, lost) for tokens, lost in units if tokens > 0)
    if not known:
        return None
    median = known[(len(known) - 1) // 2][0]
    long = [lost for tokens, lost in known if tokens > median]
    if not long:
        long = [lost for tokens, lost in known if tokens >= median]
    short = [lost for _, lost in known[: len(known) - len(long)]]
    if not short:
        return None
    p = fisher_greater(sum(long), len(long), sum(short), len(short))
    return LengthTest(median, len(long), sum(long), len(short), sum(short), p)


def fisher_greater(hits: int, tries: int, other_hits: int, other_tries: int) -> float:
    """P(at least `hits` of the `hits + other_hits` fall on the first `tries`) when all are equally likely
    (Fisher's exact test: the tail of the hypergeometric distribution)."""
    total, drawn = tries + other_tries, hits + other_hits
    whole = _choose(total, drawn)
    most = min(tries, drawn)
    tail = (exp(_choose(tries, k) + _choose(other_tries, drawn - k) - whole) for k in range(hits, most + 1))
    return min(1.0, sum(tail))


def _choose(n: int, k: int) -> float:
    """Logarithm of n over k."""
    if not 0 <= k <= n:
        return float("-inf")
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

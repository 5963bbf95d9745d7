"""Figures of online learning: hand-worked changes, and thresholds of policies that are known."""

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.producers.figures import bins, change, threshold
from headrace.producers.measure import Result


def _result(shown: bool, accepted: float, reward: float) -> Result:
    return Result("name", shown, not shown, accepted, reward)


def test_fewer_suggestions_at_a_higher_accept_rate() -> None:
    """10 shown with 3 accepts, then 5 shown with 3: half as many, at 0.6 instead of 0.3."""
    good, bad = _result(True, 1.0, 0.75), _result(True, 0.0, -0.25)
    silent = _result(False, 0.0, 0.0)
    before, after = [good] * 3 + [bad] * 7, [good] * 3 + [bad] * 2 + [silent] * 5
    found = change(before * 40, after * 40)
    assert found.fewer.value == pytest.approx(0.5) and found.higher.value == pytest.approx(1.0)
    assert found.reward.value == pytest.approx(0.125)  # five rejects of -0.25 less, in ten
    assert 0.4 < found.fewer.low < 0.5 < found.fewer.high < 0.6


def test_an_unchanged_version_has_exactly_no_change() -> None:
    """Pairs are drawn together: the same results twice differ by 0 in every resample."""
    results = [_result(True, float(index % 3 == 0), 0.1) for index in range(60)]
    found = change(results, results)
    for interval in (found.fewer, found.higher, found.reward):
        assert (interval.value, interval.low, interval.high) == (0.0, 0.0, 0.0)


def test_nothing_accepted_before() -> None:
    """From none to some is infinitely more, from none to none is no change: neither is a number that is
    none. Resamples that show nothing count likewise."""
    before = [_result(index == 0, 0.0, -0.25) for index in range(40)]
    after = [_result(index == 0, float(index == 0), 0.75) for index in range(40)]
    more, same = change(before, after).higher, change(before, before).higher
    assert (more.value, more.high, same.value, same.low, same.high) == (float("inf"), float("inf"), 0, 0, 0)
    assert change(before, before).fewer.high == 0


def test_results_of_other_trials_are_refused() -> None:
    """There are no pairs."""
    with pytest.raises(ConfigError, match="same trials"):
        change([_result(True, 1.0, 0.75)], [])


@pytest.mark.parametrize("where", [0.25, 0.5])
def test_the_threshold_of_a_known_policy_is_found(where: float) -> None:
    """Shares drawn from a logistic curve around it."""
    chance = np.linspace(0, 1, 400)
    show = 1 / (1 + np.exp(-12 * (chance - where)))
    found = threshold(list(chance), list(show))
    assert found.value == pytest.approx(where, abs=0.02) and found.low <= found.value <= found.high


def test_a_policy_that_shows_the_worse_ones_has_no_threshold() -> None:
    """It is infinite, on the side on which the policy is most of the time."""
    chance = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert threshold(chance, [0.4, 0.3, 0.2, 0.1, 0.1, 0.1]).value == float("inf")


def test_bins_hold_every_trial_once() -> None:
    """Two bins, the last edge inside; an empty one is left out."""
    found = bins([0.1, 0.2, 0.9, 1.0], [0.0, 0.5, 1.0, 1.0], [0.0, 0.5, 0.8, 1.0])
    assert [b.trials for b in found] == [2, 2]
    assert [b.accept for b in found] == pytest.approx([0.15, 0.95])
    assert [b.show for b in found] == [0.25, 1.0]

"""Advantages of a group, by hand."""

import math

import pytest

from headrace.trainer.advantage import advantages, rewards_equal


def test_reward_minus_mean() -> None:
    """Rewards 1, 0, 0, 1 have mean 0.5."""
    assert advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]


def test_divided_by_the_sample_deviation() -> None:
    """Rewards 3, 1: mean 2, sample deviation sqrt(2)."""
    expected = 1 / (math.sqrt(2) + 1e-6)
    assert advantages([3.0, 1.0], scale_std=True) == pytest.approx([expected, -expected], rel=1e-15)


@pytest.mark.parametrize("scale_std", [False, True])
@pytest.mark.parametrize("rewards", [[0.35] * 8, [0.1] * 3, [7.0], []])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(rewards: list[float], scale_std: bool) -> None:
    """No residue that a deviation near 0 could blow up."""
    assert advantages(rewards, scale_std=scale_std) == [0.0] * len(rewards)


def test_rounding_of_totals_is_not_a_difference() -> None:
    """0.1 + 0.2 and 0.3 are the same reward: no gradient from the last bit."""
    assert rewards_equal([0.1 + 0.2, 0.3])
    assert advantages([0.1 + 0.2, 0.3], scale_std=True) == [0.0, 0.0]
    assert not rewards_equal([0.3, 0.3001])

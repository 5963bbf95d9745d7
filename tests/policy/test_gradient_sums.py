"""Gradient sums on the integer grid: exact, without an order, and the gradients they should be."""

import random

import pytest
import torch
from small_policy import SMALL, random_tokens, random_weights

from headrace.errors import TrainingError
from headrace.kernels.gradient_sums import GRID_BITS, TERM_MAX, GradientSums, on_grid
from headrace.policy.tree import Group, tree_logp

GRID = 2.0**-GRID_BITS


def test_terms_are_rounded_to_the_nearest_multiple_ties_to_even() -> None:
    """By hand: halves go to the even neighbour on both sides of zero, the ends of the range are exact."""
    term = torch.tensor([0.0, -0.0, GRID, 0.5 * GRID, 1.5 * GRID, -0.5 * GRID, -1.5 * GRID, 0.75 * GRID])
    assert on_grid("w", term).tolist() == [0, 0, 1, 0, 2, 0, -2, 1]
    ends = on_grid("w", torch.tensor([TERM_MAX, -TERM_MAX, 1.0, 3e-39]))
    assert ends.tolist() == [2**50, -(2**50), 2**40, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2 * TERM_MAX])
def test_a_term_that_is_not_finite_or_too_large_is_refused(bad: float) -> None:
    """Beyond the range the shift to the grid would be wrong."""
    with pytest.raises(TrainingError, match=r"w: expected a gradient within ±1024"):
        on_grid("w", torch.tensor([0.0, bad, 0.0]))


def test_the_sum_has_no_order() -> None:
    """Terms of very different sizes: every order has one integer sum, where float32 sums differ."""
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(257, generator=generator) * 10.0 ** -(number % 7) for number in range(64)]
    exact, floats = set(), set()
    for seed in range(8):
        order = random.Random(seed).sample(range(64), 64)
        total = torch.zeros(257, dtype=torch.int64)
        plain = torch.zeros(257)
        for number in order:
            total += on_grid("w", terms[number])
            plain += terms[number]
        exact.add(tuple(total.tolist()))
        floats.add(tuple(plain.tolist()))
    assert len(exact) == 1
    assert len(floats) > 1


def _gradients(groups: list[Group], packing: list[list[int]]) -> dict[str, torch.Tensor]:
    """Of a fixed function of the log-probabilities, `packing` groups at a time."""
    weights = random_weights(SMALL, 1)
    sums = GradientSums.like(weights)
    for numbers in packing:
        out = tree_logp(weights, SMALL, [groups[n] for n in numbers], 0.7, sums)
        total = sum((i + 1) * value.sum() for found in out.logp for i, value in enumerate(found))
        assert isinstance(total, torch.Tensor)
        torch.autograd.backward(total)
    return sums.gradients()


def _groups() -> list[Group]:
    draw = random.Random(1)
    shapes = ((3, [4, 1, 7]), (66, [5]), (17, [2, 2, 30]), (40, [1]), (5, [66, 3]))
    return [Group(random_tokens(draw, p, 64), [random_tokens(draw, n, 64) for n in own]) for p, own in shapes]


def test_they_are_autograds_gradients() -> None:
    """Every weight's sum equals plain autograd's up to float32 rounding."""
    groups = _groups()
    found = _gradients(groups, [[0, 1, 2, 3, 4]])
    weights = {name: tensor.requires_grad_() for name, tensor in random_weights(SMALL, 1).items()}
    out = tree_logp(weights, SMALL, groups, 0.7)
    total = sum((i + 1) * value.sum() for group in out.logp for i, value in enumerate(group))
    assert isinstance(total, torch.Tensor)
    torch.autograd.backward(total)
    for name, weight in weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_packing_order_and_threads_leave_no_trace() -> None:
    """One by one, in pairs, all at once, backwards, on one and two threads: the same bits."""
    groups = _groups()
    packings = [[[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[4, 0], [3], [2, 1]], [[4, 3, 2, 1, 0]]]
    expected = _gradients(groups, packings[0])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for packing in packings:
                found = _gradients(groups, packing)
                assert all(torch.equal(found[name], expected[name]) for name in expected), (threads, packing)
    finally:
        torch.set_num_threads(before)

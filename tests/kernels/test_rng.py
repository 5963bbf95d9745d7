"""Noise depends on key and counter, on nothing else, and is distributed as it should be."""

import pytest
import torch

from headrace.kernels import rng


def test_splitmix_reference_values() -> None:
    """The mixing function gives SplitMix64's published outputs for seed 1234567."""
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + golden * step) % 2**64 for step in (1, 2, 3)]
    signed = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    mixed = [value % 2**64 for value in rng._mix(signed).tolist()]
    assert mixed == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_gumbel_rows_do_not_depend_on_the_batch() -> None:
    """A row's noise is the same alone and among 40; for a smaller vocabulary it is the beginning."""
    keys = torch.tensor([rng.key("run", group, 3) for group in range(40)])
    positions = torch.arange(40) % 7
    noise = rng.gumbel(keys, positions, 2048)
    for row in (0, 16, 39):
        assert torch.equal(rng.gumbel(keys[row : row + 1], positions[row : row + 1], 2048)[0], noise[row])
    assert torch.equal(rng.gumbel(keys, positions, 100), noise[:, :100])
    assert len({row.numpy().tobytes() for row in noise}) == 40


def test_gumbel_moments() -> None:
    """Mean 0.5772 and variance pi²/6 over 400,000 draws, within four standard errors; never infinite."""
    noise = rng.gumbel(torch.arange(200), torch.zeros(200, dtype=torch.int64), 2000)
    assert torch.isfinite(noise).all()
    assert float(noise.double().mean()) == pytest.approx(0.57722, abs=4 * 1.2825 / 400_000**0.5)
    assert float(noise.double().var()) == pytest.approx(1.64493, abs=0.03)


def test_argmax_samples_the_softmax() -> None:
    """argmax(logits + noise) draws each token as often as its probability says."""
    probability = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = rng.gumbel(torch.full((40_000,), rng.key("x")), torch.arange(40_000), 4)
    drawn = (probability.log() + noise).argmax(-1).bincount(minlength=4) / 40_000
    assert drawn.tolist() == pytest.approx(probability.tolist(), abs=0.01)


def test_keys_of_different_parts_differ() -> None:
    """Parts are not just glued together, and a number is not its digits."""
    assert len({rng.key("a", "b"), rng.key("ab"), rng.key("a", 1), rng.key("a", "1")}) == 4


def test_uniform_is_exact_and_even() -> None:
    """Multiples of 2^-53 in [0, 1) with mean one half."""
    draws = rng.uniform(7, torch.arange(100_000))
    assert float(draws.min()) >= 0 and float(draws.max()) < 1
    assert torch.equal(draws * 2**53, (draws * 2**53).round())
    assert float(draws.mean()) == pytest.approx(0.5, abs=4 * 0.2887 / 100_000**0.5)

"""The metrics of mismatch and drops, by hand."""

import math

import pytest
import torch

from headrace.trainer.metrics import drop_counts, lag, mismatch, spread
from headrace.wire.records import Drop


def test_mismatch_by_hand() -> None:
    """Ratios 1 and 4: k3 is 0 and 4 - log 4 - 1; the sample size is (1 + 4)^2 / (2 x 17)."""
    found = mismatch(
        torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0 - math.log(4)]), torch.tensor([0, 2])
    )
    assert found["mismatch.k3_mean"] == pytest.approx((4 - math.log(4) - 1) / 2)
    assert found["mismatch.abs_mean"] == pytest.approx(math.log(4) / 2)
    assert found["mismatch.abs_max"] == pytest.approx(math.log(4))
    assert found["mismatch.ratio_above_2"] == 0.5
    assert found["mismatch.sample_size"] == pytest.approx(25 / 34)
    assert found["mismatch.lag0.abs_max"] == 0.0
    assert found["mismatch.lag2.abs_mean"] == pytest.approx(math.log(4))
    assert mismatch(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == {}


def test_lag() -> None:
    """Of 0 and 2 versions: 1 in the mean; of nothing nothing."""
    assert lag(torch.tensor([0, 2])) == {"lag.mean": 1.0, "lag.max": 2.0}
    assert lag(torch.zeros(0, dtype=torch.int64)) == {}


def test_drops_and_withheld_are_counted_apart() -> None:
    """Two groups dropped, one member withheld, with their tokens."""
    counts = drop_counts(
        [
            Drop(group_id="a", reason="stale", tokens=5),
            Drop(group_id="b", reason="stale", tokens=6),
            Drop(group_id="c", reason="stale", member=1, tokens=7),
        ]
    )
    assert counts == {
        "drops.stale": 2.0,
        "drops.stale.tokens": 11.0,
        "withheld.stale": 1.0,
        "withheld.stale.tokens": 7.0,
    }


def test_spread() -> None:
    """Mean, least and most; nothing of nothing."""
    assert spread("x", [1.0, 3.0]) == {"x.mean": 2.0, "x.min": 1.0, "x.max": 3.0}
    assert spread("x", []) == {}

"""The loss, by hand: one to three tokens, ratios that are powers of two."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.trainer.config import LossConfig
from headrace.trainer.loss import Tokens, policy_loss, ratio

LOG2 = math.log(2)


def _gradient(
    config: LossConfig,
    *,
    advantage: list[float],
    now: list[float],
    old: list[float] | None = None,
    rollout: list[float] | None = None,
    sequence: list[int] | None = None,
    total: int | None = None,
) -> tuple[float, list[float], list[bool]]:
    """Loss, its gradient by `now`, and the masked tokens. `old` and `rollout` default to `now`."""
    now_N = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    tokens = Tokens(
        torch.tensor(old or now, dtype=torch.float64),
        torch.tensor(rollout or now, dtype=torch.float64),
        torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(sequence or [0] * len(now)),
    )
    found = policy_loss(config, now_N, tokens, tokens_total=total or len(now))
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert isinstance(now_N.grad, Tensor)
    return float(found.loss.detach()), now_N.grad.tolist(), found.masked_N.tolist()


@pytest.mark.parametrize("correction", ["ppo", "tis", "icepop"])
def test_on_policy_gradient(correction: Any) -> None:
    """On policy, each trained token's gradient is -advantage / tokens, whatever the correction."""
    loss, gradient, _ = _gradient(
        LossConfig(correction=correction), advantage=[1.0, 1.0, -0.5], now=[-1.0, -2.0, -3.0], total=6
    )
    assert gradient == pytest.approx([-1 / 6, -1 / 6, 0.5 / 6])
    assert loss == pytest.approx(-(1 + 1 - 0.5) / 6)


@pytest.mark.parametrize(
    ("advantage", "factor", "gradient"),
    [
        (1.0, 1.1, -1.1),  # inside the band: ratio x advantage
        (1.0, 1.25, -1.25),  # clip-higher lets it pass ...
        (1.0, 1.3, 0.0),  # ... up to 1.28
        (-1.0, 1.3, 1.3),  # min takes the unclipped branch: the push back stays
        (-1.0, 0.7, 0.0),  # below 1 - 0.2, advantage negative: clipped
        (1.0, 0.7, -0.7),
    ],
)
def test_clip_higher(advantage: float, factor: float, gradient: float) -> None:
    """PPO's surrogate with the band [0.8, 1.28]."""
    found = _gradient(
        LossConfig(correction="ppo"), advantage=[advantage], now=[math.log(factor) - 3], rollout=[-3.0]
    )
    assert found[1] == pytest.approx([gradient])


def test_plain_clip() -> None:
    """clip_high = clip_low = 0.2: a ratio of 1.25 is clipped."""
    config = LossConfig(correction="ppo", clip_high=0.2)
    loss, gradient, _ = _gradient(config, advantage=[1.0], now=[math.log(1.25) - 3], rollout=[-3.0])
    assert loss == pytest.approx(-1.2)
    assert gradient == [0.0]


def test_dual_clip() -> None:
    """Ratio 4 at advantage -1: without the bound the loss is 4, with dual_clip 3 it stops at 3, flat."""
    far: dict[str, Any] = {"advantage": [-1.0], "now": [2 * LOG2 - 5], "rollout": [-5.0]}
    assert _gradient(LossConfig(correction="ppo"), **far)[0] == pytest.approx(4.0)
    loss, gradient, _ = _gradient(LossConfig(correction="ppo", dual_clip=3.0), **far)
    assert loss == pytest.approx(3.0)
    assert gradient == [0.0]


def test_truncated_importance_sampling() -> None:
    """old / rollout of 1/2, 2 and 8 weigh 1/2, 2 and (truncated) 2; no gradient through the weight."""
    _, gradient, masked = _gradient(
        LossConfig(correction="tis", tis_max=2.0),
        advantage=[3.0, 3.0, 3.0],
        now=[-5.0, -5.0, -5.0],
        rollout=[-5.0 + LOG2, -5.0 - LOG2, -5.0 - 3 * LOG2],
    )
    assert gradient == pytest.approx([-0.5, -2.0, -2.0])
    assert masked == [False, False, False]


def test_icepop() -> None:
    """old / rollout of 1/4 and 8 are masked, 1/2 and 2 (the edges) weigh themselves; the count stays 4."""
    _, gradient, masked = _gradient(
        LossConfig(correction="icepop"),
        advantage=[1.0] * 4,
        now=[0.0] * 4,
        rollout=[2 * LOG2, LOG2, -LOG2, -3 * LOG2],
    )
    assert masked == [True, False, False, True]
    assert gradient == pytest.approx([0.0, -0.5 / 4, -2 / 4, 0.0])


def test_second_pass_is_clipped_against_the_first() -> None:
    """tis with now / old = 1.5 is outside the band, whatever rollout says."""
    _, gradient, _ = _gradient(
        LossConfig(correction="tis"), advantage=[1.0], now=[math.log(1.5)], old=[0.0], rollout=[-LOG2]
    )
    assert gradient == [0.0]


@pytest.mark.parametrize(
    ("config", "masked"),
    [
        (LossConfig(sequence_low=0.99), [True, True, False, False]),  # geometric means 2^-0.5 and 1
        (LossConfig(sequence_high=0.99), [False, False, True, True]),
        (LossConfig(veto=0.6), [True, True, False, False]),  # ratios 1/2, 1 | 1, 1
        (LossConfig(veto=0.4), [False] * 4),
        (LossConfig(off_policy_delta=0.3), [True, True, False, False]),  # mean log(rollout / old) 0.35 | 0
        (LossConfig(off_policy_delta=0.4), [False] * 4),
    ],
)
def test_sequence_masks(config: LossConfig, masked: list[bool]) -> None:
    """A sequence is masked whole, its siblings stay."""
    found = _gradient(
        config,
        advantage=[-1.0, -1.0, 1.0, 1.0],
        now=[-3.0] * 4,
        rollout=[-3.0 + LOG2, -3.0, -3.0, -3.0],
        sequence=[0, 0, 1, 1],
    )
    assert found[2] == masked
    assert [g == 0.0 for g in found[1]] == masked


def test_off_policy_mask_spares_what_was_good() -> None:
    """The same fall of probability with a positive advantage is no reason to mask."""
    found = _gradient(LossConfig(off_policy_delta=0.1), advantage=[1.0], now=[-3.0], rollout=[-2.0])
    assert found[2] == [False]


def test_ratio_is_bounded() -> None:
    """exp(±20) at most: a log-probability of -1000 on one side is no infinity."""
    found = ratio(torch.tensor([-1000.0, 0.0]), torch.tensor([0.0, -1000.0])).tolist()
    assert found == pytest.approx([math.exp(-20), math.exp(20)])


def test_microbatches_add_up() -> None:
    """The loss of all tokens is the sum of its parts, each over the same total."""
    config = LossConfig(correction="tis")
    whole, _, _ = _gradient(config, advantage=[1.0, -2.0, 3.0], now=[-1.0, -2.0, -3.0], rollout=[-1.5] * 3)
    first, _, _ = _gradient(config, advantage=[1.0], now=[-1.0], rollout=[-1.5], total=3)
    rest, _, _ = _gradient(config, advantage=[-2.0, 3.0], now=[-2.0, -3.0], rollout=[-1.5] * 2, total=3)
    assert first + rest == pytest.approx(whole)

"""The recorded steps and the same records under other settings, side by side.

Two walks of `consumers.replay` from one state: one as it was, one changed. Each goes on from its own weights,
so over a range the two part further. Nothing is published. Not here: which settings (`headrace.config`), how
it looks (`cli.what_if`).

N trained tokens
"""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.consumers.replay import Change, Replayed, Source, replay
from headrace.policy.model import ModelConfig, Weights
from headrace.trainer.admission import Unit
from headrace.trainer.forward import forward
from headrace.trainer.state import State, published


@dataclass(frozen=True, slots=True)
class Distance:
    """Between two sets of float32 masters."""

    l2: float
    largest: float
    """Of the absolute differences."""
    relative: float
    """`l2` as a share of the way that the recorded steps went from the common start."""


@dataclass(frozen=True, slots=True)
class Shift:
    """Mean change of the log-probability of a step's trained tokens, from the recorded weights before the
    step to those after it; None without such tokens."""

    better: float | None
    """Tokens of positive advantage."""
    worse: float | None
    """Tokens of negative advantage."""


@dataclass(frozen=True, slots=True)
class Beside:
    """One step twice. `shift`: as recorded, and as changed; over the units that the recorded step trained."""

    recorded: Replayed
    changed: Replayed
    distance: Distance
    shift: tuple[Shift, Shift]


async def side_by_side(
    source: Source,
    start: State,
    last: int,
    change: Change,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[Beside, None]:
    """Steps `start.step + 1` to `last`. Raises what `replay` raises, and TrainingError when the changed
    settings give numbers that are not finite."""
    async with (
        aclosing(replay(source, start, last, cancelled=cancelled)) as as_recorded,
        aclosing(replay(source, start, last, change=change, cancelled=cancelled)) as as_changed,
    ):
        async for then in as_recorded:
            now = await anext(as_changed)
            distance, shift = await source.compute(lambda: _measured(source.model, start, then, now))  # noqa: B023 - awaited here
            yield Beside(then, now, distance, shift)


def _measured(
    model: ModelConfig, start: State, then: Replayed, now: Replayed
) -> tuple[Distance, tuple[Shift, Shift]]:
    units = then.result.admission.units
    before_N = _logp(model, then.before, units)
    signs_N = _advantages(units)
    shifts = tuple(_shift(_logp(model, done.result.state, units) - before_N, signs_N) for done in (then, now))
    ours, theirs = then.result.state.masters, now.result.state.masters
    return distance(ours, theirs, start.masters), (shifts[0], shifts[1])


def distance(ours: Weights, theirs: Weights, start: Weights) -> Distance:
    """How far `theirs` are from `ours`, which went from `start`."""
    apart, way = _l2(ours, theirs), _l2(ours, start)
    return Distance(
        l2=apart,
        largest=max(float((ours[name] - theirs[name]).abs().max()) for name in ours),
        relative=apart / way if way else math.inf if apart else 0.0,
    )


def _l2(one: Weights, other: Weights) -> float:
    return math.sqrt(
        math.fsum(float((one[name].double() - other[name].double()).square().sum()) for name in sorted(one))
    )


def _logp(model: ModelConfig, state: State, units: Sequence[Unit]) -> Tensor:
    """float32 `[N]`, of the published weights, unit by unit."""
    if not units:
        return torch.zeros(0)
    weights = published(state.masters)
    with torch.no_grad():
        return torch.cat([forward(weights, model, [unit]).logp_N for unit in units])


def _advantages(units: Sequence[Unit]) -> Tensor:
    """float32 `[N]`."""
    values = [
        torch.full((member.tokens_trained,), advantage)
        for unit in units
        for member, advantage in zip(unit.sequences, unit.advantages, strict=True)
    ]
    return torch.cat(values) if values else torch.zeros(0)


def _shift(change_N: Tensor, advantage_N: Tensor) -> Shift:
    better_N, worse_N = change_N[advantage_N > 0], change_N[advantage_N < 0]
    return Shift(
        better=float(better_N.double().mean()) if better_N.numel() else None,
        worse=float(worse_N.double().mean()) if worse_N.numel() else None,
    )

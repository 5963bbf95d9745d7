"""What each unit of a step did to its gradient, by one computation of that step again.

    share of a unit = <g_unit, g> / |g|^2     g = sum over the units, before it is clipped

The shares add up to 1; a negative one pulled against the step. `norm` is |g_unit|, which does not add up.
Both are of the first pass over the batch. Torch is imported here, and nowhere else in `headrace step`.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace.cli.ground import Ground

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.policy.model import Weights
    from headrace.trainer.admission import Unit
    from headrace.trainer.config import StepSettings
    from headrace.trainer.state import State


HELD_BYTES_MAX = 1 << 30
"""Gradients kept between the two passes over the units; those above are computed twice."""


@dataclass(frozen=True, slots=True)
class Share:
    share: float
    norm: float


@dataclass(frozen=True, slots=True)
class Shares:
    """By group id. `norm`: |g|, beside `gradient.norm` of the ledger."""

    units: dict[str, Share]
    norm: float


async def gradient_shares(
    found: Ground, step: int, advance: "Callable[[int, int], None] | None" = None
) -> Shares:
    """Of the units that `step` trained. `advance(done, of)`: after each gradient, and each product with the
    sum. Raises TrainingError when the state before the step can't be computed again, StoreError when its
    records are gone."""
    from headrace.consumers.replay import settings_of, state_before
    from headrace.trainer.admission import admit
    from headrace.trainer.step import LIVE

    source = found.source
    recorded = source.recorded(step)
    start = await found.newest_state(step - 1)
    state = await state_before(source, step, now=found.now, start=start, cancelled=found.cancelled)
    settings = settings_of(recorded)
    admission = admit(
        await source.entries(recorded),
        version=state.version,
        seen=state.seen,
        model=source.model,
        lag_versions_max=settings.run.lag_versions_max,
        sequence_tokens_max=settings.trainer.sequence_tokens_max,
        scale_std=settings.trainer.advantage_std,
        baseline=state.baselines.get(LIVE),
        user_units_max=settings.trainer.user_units_max,
        train_revoked=settings.trainer.train_revoked,
    )
    shares: Shares = await source.compute(
        partial(_shares, found, state, admission.units, settings, advance or (lambda done, of: None))
    )
    return shares


def _shares(
    found: Ground,
    state: "State",
    units: "Sequence[Unit]",
    settings: "StepSettings",
    advance: "Callable[[int, int], None]",
) -> Shares:
    from headrace.trainer.learner import Cancelled, unit_gradient

    tokens_total = sum(member.tokens_trained for unit in units for member in unit.sequences)
    if not tokens_total:
        return Shares({}, 0.0)

    def gradient(unit: "Unit") -> "Weights":
        if found.cancelled():
            raise Cancelled
        return unit_gradient(state, unit, tokens_total, model=found.source.model, config=settings.trainer)

    total: Weights = {}
    held: list[Weights] = []
    norms: dict[str, float] = {}
    for number, unit in enumerate(units):
        own = gradient(unit)
        norms[unit.group_id] = math.sqrt(_inner(own, own))
        total = {name: total[name] + own[name].double() if total else own[name].double() for name in own}
        if (number + 1) * sum(4 * tensor.numel() for tensor in own.values()) <= HELD_BYTES_MAX:
            held.append(own)
        advance(1, 2 * len(units))
    square = _inner(total, total)
    shares: dict[str, Share] = {}
    for number, unit in enumerate(units):
        own = held[number] if number < len(held) else gradient(unit)
        shares[unit.group_id] = Share(_inner(own, total) / square if square else 0.0, norms[unit.group_id])
        advance(1, 2 * len(units))
    return Shares(shares, math.sqrt(square))


def _inner(a: "Weights", b: "Weights") -> float:
    return math.fsum(float((a[name].double() * b[name].double()).sum()) for name in sorted(a))

"""Forward, loss, backward and optimizer over the admitted units of a step. Knows no record and no admission.

Gradients are taken at the published (bf16-exact) weights and applied to the float32 masters. They are exact
integer sums over the units (`kernels.gradient_sums`), so microbatches, ranks and their order leave no trace
in the result: they only say what is computed together.

N trained tokens, in the order of units, members, tokens
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.errors import TrainingError
from headrace.kernels.gradient_sums import GradientSums
from headrace.policy.model import ModelConfig, Weights
from headrace.trainer import metrics
from headrace.trainer.admission import Unit
from headrace.trainer.config import TrainerConfig
from headrace.trainer.forward import Recorded, forward, recorded
from headrace.trainer.loss import Tokens, policy_loss
from headrace.trainer.optimizer import adamw, clipped, gradient_norm
from headrace.trainer.ranks import ALONE, Ranks
from headrace.trainer.state import State, published


class Cancelled(Exception):
    """The process was told to stop in the middle of a step; nothing of the step remains."""


@dataclass(frozen=True, slots=True)
class Learned:
    """`state`: the very state that came in when there was nothing to learn."""

    state: State
    metrics: dict[str, float]


def learn(
    state: State,
    units: Sequence[Unit],
    *,
    model: ModelConfig,
    config: TrainerConfig,
    cancelled: Callable[[], bool],
    ranks: Ranks = ALONE,
) -> Learned:
    """`state` with masters, moments and `updates` after `config.epochs` updates on `units`.

    A pass whose gradient is exactly zero (all masked) updates nothing, moments included. Raises
    TrainingError that names the records, and Cancelled.
    """
    tokens_total = sum(_tokens(unit) for unit in units)
    if not tokens_total:
        return Learned(state, {"tokens.trained": 0.0})
    run = _Passes(units, tokens_total, model, config, cancelled, ranks)
    found: dict[str, float] = {}
    old_N: Tensor | None = None
    for _ in range(config.epochs):
        gradients, report = run.one(published(state.masters), old_N)
        norm = gradient_norm(gradients)
        if old_N is None:
            old_N = report.logp_N
            found = _metrics(state, units, report, tokens_total) | {"gradient.norm": norm}
        if norm == 0.0:
            break
        state = _updated(state, clipped(gradients, norm, config.grad_norm_max), config)
    return Learned(state, found)


def unit_gradient(
    state: State, unit: Unit, tokens_total: int, *, model: ModelConfig, config: TrainerConfig
) -> Weights:
    """What `unit` adds to the gradient of a step of `tokens_total` trained tokens, before it is clipped."""
    run = _Passes([unit], tokens_total, model, config, lambda: False, ALONE)
    return run.one(published(state.masters), None)[0]


class _Report:
    """Numbers of a pass over all units, each written by the rank that has the unit and 0 elsewhere, in one
    float64 tensor, so that a sum over ranks is exact."""

    def __init__(self, tokens_total: int, units: int) -> None:
        self.numbers = torch.zeros(2 * tokens_total + units + 5, dtype=torch.float64)
        self._logp_N, self._kept_N, self.entropy_U, self.counts = torch.split(
            self.numbers, [tokens_total, tokens_total, units, 5]
        )
        """`counts`: tokens masked, tokens clipped, routes, routes otherwise, tokens computed."""

    def set(self, rows: slice, logp_N: Tensor, kept_N: Tensor) -> None:
        self._logp_N[rows], self._kept_N[rows] = logp_N.detach().double(), kept_N.detach().double()

    @property
    def logp_N(self) -> Tensor:
        return self._logp_N.float()

    @property
    def kept_sum(self) -> float:
        return math.fsum(self._kept_N.tolist())


class _Passes:
    """Passes over one batch."""

    def __init__(
        self,
        units: Sequence[Unit],
        tokens_total: int,
        model: ModelConfig,
        config: TrainerConfig,
        cancelled: Callable[[], bool],
        ranks: Ranks,
    ) -> None:
        self._units = units
        self._tokens_total = tokens_total
        self._model = model
        self._config = config
        self._cancelled = cancelled
        self._ranks = ranks
        self._starts = [0]
        for unit in units:
            self._starts.append(self._starts[-1] + _tokens(unit))

    def one(self, weights: Weights, old_N: Tensor | None) -> tuple[Weights, _Report]:
        """Gradients of the whole batch at `weights`. `old`: log-probabilities at the step's start; None in
        the first pass, whose own they are."""
        sums = GradientSums.like(weights)
        report = _Report(self._starts[-1], len(self._units))
        for numbers in self._microbatches():
            if self._cancelled():
                raise Cancelled
            places = ", ".join(self._units[number].place for number in numbers)
            try:
                self._microbatch(numbers, weights, old_N, sums, report)
            except TrainingError as error:
                raise TrainingError(f"{places}: {error}") from error
        self._ranks.total([*(sums.sums[name] for name in sorted(sums.sums)), report.numbers])
        return sums.gradients(), report

    def _microbatches(self) -> list[range]:
        """This rank's neighbouring units of one sampling temperature, at most `microbatch_groups`
        together."""
        size, count = self._ranks.size, len(self._units)
        first, end = (count * rank // size for rank in (self._ranks.rank, self._ranks.rank + 1))
        batches: list[range] = []
        for number in range(first, end):
            last = batches[-1] if batches else range(0)
            alike = last and self._units[last[0]].temperature == self._units[number].temperature
            if alike and len(last) < self._config.microbatch_groups:
                batches[-1] = range(last[0], number + 1)
            else:
                batches.append(range(number, number + 1))
        return batches

    def _microbatch(
        self, numbers: range, weights: Weights, old_N: Tensor | None, sums: GradientSums, report: _Report
    ) -> None:
        units = self._units[numbers.start : numbers.stop]
        if not any(_tokens(unit) for unit in units):
            return
        said = recorded(units)
        run = forward(weights, self._model, units, sums)
        _check_finite(run.logp_N.detach(), said, units)
        rows = slice(self._starts[numbers.start], self._starts[numbers.stop])
        behind_N = run.logp_N.detach() if old_N is None else old_N[rows]
        tokens = Tokens(behind_N, said.rollout_N, said.advantage_N, said.sequence_N)
        loss = policy_loss(self._config.loss, run.logp_N, tokens, tokens_total=self._tokens_total)
        if not torch.isfinite(loss.loss):
            raise TrainingError(f"expected a finite loss, got {float(loss.loss.detach())}")
        loss.loss.backward()  # type: ignore[no-untyped-call]
        report.set(rows, run.logp_N, loss.kept_N)
        report.entropy_U[numbers.start : numbers.stop] = torch.tensor(run.entropies, dtype=torch.float64)
        masked, cut = int(loss.masked_N.sum()), int(loss.clipped_N.sum())
        report.counts += torch.tensor([masked, cut, run.routes, run.routes_other, run.tokens])


def _tokens(unit: Unit) -> int:
    return sum(member.tokens_trained for member in unit.sequences)


def _check_finite(logp_N: Tensor, said: Recorded, units: Sequence[Unit]) -> None:
    wrong = said.sequence_N[~torch.isfinite(logp_N)]
    if wrong.numel():
        members = [(unit, member) for unit in units for member in unit.sequences]
        unit, member = members[int(wrong[0])]
        raise TrainingError(
            f"group {unit.group_id}: member {member.member}: expected finite log-probabilities,"
            f" got {wrong.numel()} that are not"
        )


def _updated(state: State, gradients: Weights, config: TrainerConfig) -> State:
    updates = state.updates + 1
    masters, moment1, moment2 = adamw(config, state.masters, state.moment1, state.moment2, gradients, updates)
    return replace(state, masters=masters, moment1=moment1, moment2=moment2, updates=updates)


def _metrics(state: State, units: Sequence[Unit], report: _Report, tokens_total: int) -> dict[str, float]:
    """Of the first pass."""
    said = recorded(units)
    masked, cut, routes, routes_other, tokens = report.counts.tolist()
    sequences = [member for unit in units for member in unit.sequences]
    advantages = [advantage for unit in units for advantage in unit.advantages]
    return {
        "loss": -report.kept_sum / tokens_total,
        "tokens.trained": float(tokens_total),
        "tokens.forward": tokens,
        "entropy.mean": math.fsum(report.entropy_U.tolist()) / tokens_total,
        "mask.share": masked / tokens_total,
        "clip.share": cut / tokens_total,
        "advantage.abs_mean": sum(abs(a) for a in advantages) / len(advantages),
        "route.disagreement": routes_other / routes if routes else 0.0,
        **metrics.spread("length", [float(member.tokens) for member in sequences]),
        **metrics.lag(state.version - said.version_N),
        **metrics.mismatch(report.logp_N, said.rollout_N, state.version - said.context_version_N),
    }

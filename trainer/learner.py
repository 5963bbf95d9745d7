"""Forward, loss, backward and optimizer over the admitted units of a step. Knows no record and no admission.

Gradients are taken at the published (bf16-exact) weights and applied to the float32 masters. The schedule of
microbatches is fixed by the order of the units and `microbatch_groups`, so the same units give the same bits.

N trained tokens
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.errors import TrainingError
from headrace.policy.model import ModelConfig, Weights
from headrace.trainer import metrics
from headrace.trainer.admission import Unit
from headrace.trainer.config import TrainerConfig
from headrace.trainer.forward import Forward, forward
from headrace.trainer.loss import Tokens, policy_loss
from headrace.trainer.optimizer import adamw, clipped, gradient_norm
from headrace.trainer.state import State, published


class Cancelled(Exception):
    """The process was told to stop in the middle of a step; nothing of the step remains."""


@dataclass(frozen=True, slots=True)
class Learned:
    """`state`: the very state that came in when there was nothing to learn."""

    state: State
    metrics: dict[str, float]


@dataclass(slots=True)
class _Pass:
    """What one pass over the batch leaves behind."""

    gradients: Weights
    loss: float
    old: list[Tensor]
    masked: int
    clipped: int
    forwards: list[Forward]


def learn(
    state: State,
    units: Sequence[Unit],
    *,
    model: ModelConfig,
    config: TrainerConfig,
    cancelled: Callable[[], bool],
) -> Learned:
    """`state` with masters, moments and `updates` after `config.epochs` updates on `units`.

    A pass whose gradient is exactly zero (all masked) updates nothing, moments included. Raises
    TrainingError that names the records, and Cancelled.
    """
    tokens_total = sum(member.tokens_trained for unit in units for member in unit.sequences)
    if not tokens_total:
        return Learned(state, {"tokens.trained": 0.0})
    found: dict[str, float] = {}
    old: list[Tensor] = []
    for epoch in range(config.epochs):
        done = _run_pass(state, units, old, tokens_total, model=model, config=config, cancelled=cancelled)
        norm = gradient_norm(done.gradients)
        if epoch == 0:
            old = done.old
            found = _first_pass_metrics(state, units, done, tokens_total)
            found["gradient.norm"] = norm
        if norm == 0.0:
            break
        state = _updated(state, clipped(done.gradients, norm, config.grad_norm_max), config)
    return Learned(state, found)


def _run_pass(
    state: State,
    units: Sequence[Unit],
    old: Sequence[Tensor],
    tokens_total: int,
    *,
    model: ModelConfig,
    config: TrainerConfig,
    cancelled: Callable[[], bool],
) -> _Pass:
    """Gradients of the whole batch at the published weights. `old` is empty in the first pass, which sets
    it."""
    leaves = {name: weight.requires_grad_() for name, weight in published(state.masters).items()}
    done = _Pass({}, 0.0, [], 0, 0, [])
    for index, batch in enumerate(_microbatches(units, config.microbatch_groups)):
        if cancelled():
            raise Cancelled
        run = forward(leaves, model, batch)
        now_N = run.logp_N
        _check_finite(run, batch)
        old_N = old[index] if old else now_N.detach()
        tokens = Tokens(old_N, run.rollout_N, run.advantage_N, run.sequence_N)
        loss = policy_loss(config.loss, now_N, tokens, tokens_total=tokens_total)
        places = ", ".join(unit.place for unit in batch)
        if not torch.isfinite(loss.loss):
            raise TrainingError(f"{places}: expected a finite loss, got {float(loss.loss.detach())}")
        loss.loss.backward()  # type: ignore[no-untyped-call]
        for name, leaf in leaves.items():
            if leaf.grad is not None and not torch.isfinite(leaf.grad).all():
                raise TrainingError(f"{places}: expected a finite gradient of {name}, got one that is not")
        done.loss += float(loss.loss.detach())
        done.old.append(old_N)
        done.masked += int(loss.masked_N.sum())
        done.clipped += int(loss.clipped_N.sum())
        done.forwards.append(run.detached())
    done.gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
    }
    return done


def _microbatches(units: Sequence[Unit], groups: int) -> list[list[Unit]]:
    """Runs of at most `groups` neighbours of one sampling temperature."""
    batches: list[list[Unit]] = []
    for unit in units:
        if batches and len(batches[-1]) < groups and batches[-1][0].temperature == unit.temperature:
            batches[-1].append(unit)
        else:
            batches.append([unit])
    return batches


def _check_finite(run: Forward, batch: Sequence[Unit]) -> None:
    wrong = run.sequence_N[~torch.isfinite(run.logp_N.detach())]
    if wrong.numel():
        members = [(unit, member) for unit in batch for member in unit.sequences]
        unit, member = members[int(wrong[0])]
        raise TrainingError(
            f"{unit.place}: group {unit.group_id}: member {member.member}: expected finite log-probabilities,"
            f" got {wrong.numel()} that are not"
        )


def _updated(state: State, gradients: Weights, config: TrainerConfig) -> State:
    updates = state.updates + 1
    masters, moment1, moment2 = adamw(config, state.masters, state.moment1, state.moment2, gradients, updates)
    return replace(state, masters=masters, moment1=moment1, moment2=moment2, updates=updates)


def _first_pass_metrics(
    state: State, units: Sequence[Unit], done: _Pass, tokens_total: int
) -> dict[str, float]:
    runs = done.forwards
    routed = sum(run.routes for run in runs)
    sequences = [member for unit in units for member in unit.sequences]
    advantages = [advantage for unit in units for advantage in unit.advantages]
    return {
        "loss": done.loss,
        "tokens.trained": float(tokens_total),
        "tokens.forward": float(sum(run.tokens for run in runs)),
        "entropy.mean": sum(run.entropy_sum for run in runs) / tokens_total,
        "mask.share": done.masked / tokens_total,
        "clip.share": done.clipped / tokens_total,
        "advantage.abs_mean": sum(abs(a) for a in advantages) / len(advantages),
        "route.disagreement": sum(run.routes_other for run in runs) / routed if routed else 0.0,
        **metrics.spread("length", [float(member.tokens) for member in sequences]),
        **metrics.lag(state.version - torch.cat([run.version_N for run in runs])),
        **metrics.mismatch(
            torch.cat(done.old),
            torch.cat([run.rollout_N for run in runs]),
            state.version - torch.cat([run.context_version_N for run in runs]),
        ),
    }

"""The cost of gradient sums that depend on no order, against plain float32 accumulation by autograd.

Both compute the same recorded steps from the same state, in turns: forward, loss and backward of every
microbatch; no optimizer. Part of `benchmarks.replay`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.kernels.gradient_sums import GradientSums
from headrace.policy.model import ModelConfig, Weights
from headrace.trainer.admission import Unit
from headrace.trainer.config import LossConfig
from headrace.trainer.forward import forward, recorded
from headrace.trainer.loss import Tokens, policy_loss

MICROBATCHES = (1, 4, 8, 32)
Pass = Callable[[Weights, ModelConfig, Sequence[Unit], int], None]


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor seconds of all steps on one thread, the median over the repetitions."""

    microbatch: int
    plain_s: float
    exact_s: float


def plain(weights: Weights, model: ModelConfig, units: Sequence[Unit], microbatch: int) -> None:
    """Gradients into the weights' `.grad`, in float32, in the order of the microbatches."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    for batch in _batches(units, microbatch):
        _backward(leaves, model, batch, None)


def exact(weights: Weights, model: ModelConfig, units: Sequence[Unit], microbatch: int) -> None:
    """Gradients as integer sums over the units."""
    sums = GradientSums.like(weights)
    for batch in _batches(units, microbatch):
        _backward(weights, model, batch, sums)
    sums.gradients()


def measure(weights: Weights, model: ModelConfig, steps: Sequence[Sequence[Unit]], times: int) -> list[Cost]:
    """Both ways over all `steps`, in turns, `times` times, for each size of microbatch."""
    torch.set_num_threads(1)
    costs = []
    for microbatch in MICROBATCHES:
        seconds: dict[Pass, list[float]] = {plain: [], exact: []}
        for turn in range(times + 1):
            for way in (plain, exact):
                started_s = time.process_time()
                for units in steps:
                    way(weights, model, units, microbatch)
                if turn:  # the first is the warm-up
                    seconds[way].append(time.process_time() - started_s)
        median = {way: sorted(values)[len(values) // 2] for way, values in seconds.items()}
        costs.append(Cost(microbatch, median[plain], median[exact]))
    return costs


def _backward(weights: Weights, model: ModelConfig, units: Sequence[Unit], sums: GradientSums | None) -> None:
    said = recorded(units)
    run = forward(weights, model, units, sums)
    tokens = Tokens(run.logp_N.detach(), said.rollout_N, said.advantage_N, said.sequence_N)
    loss = policy_loss(LossConfig(), run.logp_N, tokens, tokens_total=1000).loss
    torch.autograd.backward(loss)


def _batches(units: Sequence[Unit], size: int) -> list[Sequence[Unit]]:
    return [units[start : start + size] for start in range(0, len(units), size)]

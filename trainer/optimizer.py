"""AdamW on float32 master weights, as a function: new tensors out, the old ones untouched.

Masters never round: what is published is their bf16 view, and gradients are taken at that view
(straight-through). Loshchilov & Hutter 2019, algorithm 2.
"""

import math

import numpy as np
import torch

from headrace.policy.model import Weights
from headrace.trainer.config import TrainerConfig


def gradient_norm(gradients: Weights) -> float:
    """The 2-norm over all tensors, summed in float64 in the order of the names, on one thread: a sum split
    over threads has other bits."""
    squares = (np.square(gradients[name].numpy(), dtype=np.float64) for name in sorted(gradients))
    return math.sqrt(math.fsum(float(square.sum()) for square in squares))


def clipped(gradients: Weights, norm: float, norm_max: float) -> Weights:
    """`gradients`, scaled down so that their norm is at most `norm_max`."""
    if norm <= norm_max:
        return gradients
    return {name: gradient * (norm_max / norm) for name, gradient in gradients.items()}


def adamw(
    config: TrainerConfig,
    masters: Weights,
    moment1: Weights,
    moment2: Weights,
    gradients: Weights,
    updates: int,
) -> tuple[Weights, Weights, Weights]:
    """Masters and both moments after update number `updates` (from 1)."""
    with torch.no_grad():
        correction1 = 1 - config.beta1**updates
        correction2 = 1 - config.beta2**updates
        new_masters, new1, new2 = {}, {}, {}
        for name, gradient in gradients.items():
            new1[name] = config.beta1 * moment1[name] + (1 - config.beta1) * gradient
            new2[name] = config.beta2 * moment2[name] + (1 - config.beta2) * gradient.square()
            direction = (new1[name] / correction1) / ((new2[name] / correction2).sqrt() + config.adam_eps)
            new_masters[name] = masters[name] * (1 - config.lr * config.weight_decay) - config.lr * direction
    return new_masters, new1, new2

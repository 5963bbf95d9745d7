"""Policies small enough for a test: random weights with bf16-exact values, and random sequences. Not a
trained model.
"""

import random

import torch

from headrace.policy.model import ModelConfig, Weights, shapes

SMALL = ModelConfig(vocabulary=64, width=32, layers=2, heads=4, heads_kv=2, head_width=16, expert_width=16)


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """Nothing is zero, so that every part of the network shows in the result."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        spread = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.2 * spread if name.endswith("norm") else spread * 2 * shape[-1] ** -0.5
    return {name: tensor.bfloat16().float() for name, tensor in weights.items()}


def random_tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]

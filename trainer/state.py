"""All that a training step starts from: two equal states and the same records give the same next state.

The trainer draws no random number, so there is no generator to keep. Who saves it: `trainer.checkpoint`.
"""

from dataclasses import dataclass, field
from typing import Final

import torch

from headrace.policy.checkpoint import from_bf16, to_bf16, weights_root
from headrace.policy.model import Weights

SEEN_MAX: Final = 100_000
"""Ids remembered. Forgetting one is safe after `lag_versions_max` steps: a repeat is stale by then, and only
its reason is another; this is far above that."""


@dataclass(frozen=True, slots=True)
class State:
    """`step` N has made version N. Masters and moments are float32, by name."""

    step: int
    masters: Weights
    moment1: Weights
    moment2: Weights
    updates: int
    """Optimizer updates so far; a step without anything to train makes none."""
    positions: dict[str, int]
    """`topic/partition` -> next offset to read."""
    seen: dict[str, int]
    """Group ids read -> their step, oldest first."""
    root: str
    """Of the published (bf16) view."""
    baselines: dict[str, float] = field(default_factory=dict)
    """Source of single units -> running mean of their rewards (`trainer.advantage.baseline`)."""

    @property
    def version(self) -> int:
        return self.step


def fresh(weights: Weights, positions: dict[str, int]) -> State:
    """Version 0 of a run that starts from `weights`, reading from `positions`."""
    return State(
        step=0,
        masters={name: weight.detach().float().clone() for name, weight in weights.items()},
        moment1={name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()},
        moment2={name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()},
        updates=0,
        positions=dict(positions),
        seen={},
        root=weights_root(weights),
    )


def published(masters: Weights) -> Weights:
    """What replicas compute with: bf16-exact values in float32."""
    return from_bf16(to_bf16(masters))


def remember(seen: dict[str, int], group_ids: list[str], step: int) -> dict[str, int]:
    """`seen` and these ids; the oldest make room above `SEEN_MAX`."""
    together = seen | dict.fromkeys(group_ids, step)
    excess = len(together) - SEEN_MAX
    return dict(list(together.items())[excess:]) if excess > 0 else together

"""Admitted units through the policy, and back as flat tensors of their trained tokens.

Members of a group that wrote the same tokens over the same routes are computed once: their log-probabilities
have the same bits, and their gradients add up. Knows no loss.

N trained tokens, in the order of units, members, tokens  S all tokens  L layers  K experts per token
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.gradient_sums import GradientSums
from headrace.policy.model import ModelConfig, Weights
from headrace.policy.tree import Group, tree_logp
from headrace.trainer.admission import Unit
from headrace.trainer.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the records say of trained tokens: float32 `[N]`, `sequence` and the versions int64. `sequence`
    counts the members of all units."""

    rollout_N: Tensor
    advantage_N: Tensor
    sequence_N: Tensor
    version_N: Tensor
    context_version_N: Tensor
    """The oldest weights behind what was recorded and is used here, the shared prefix included."""


@dataclass(frozen=True, slots=True)
class Forward:
    """What the policy says of them now."""

    logp_N: Tensor
    entropies: list[float]
    """By unit, summed over its trained tokens."""
    routes: int
    """(token, layer) pairs whose recorded routes were used."""
    routes_other: int
    """Those of them where the router would have chosen otherwise."""
    tokens: int
    """Really computed."""


def recorded(units: SequenceOf[Unit]) -> Recorded:
    """Of all trained tokens of `units`."""
    rollout, advantage, version, context = [], [], [], []
    sequence: list[Tensor] = []
    for unit in units:
        for member, value in zip(unit.sequences, unit.advantages, strict=True):
            trained_T = member.trained_T
            rollout.append(member.logp_T[trained_T])
            advantage.append(torch.full((member.tokens_trained,), value))
            sequence.append(torch.full((member.tokens_trained,), len(sequence)))
            version.append(member.version_T[trained_T])
            context.append(member.context_version_T[trained_T].clamp(max=unit.sequences[0].prefix_version))
    return Recorded(
        torch.cat(rollout), torch.cat(advantage), torch.cat(sequence), torch.cat(version), torch.cat(context)
    )


def forward(
    weights: Weights, model: ModelConfig, units: SequenceOf[Unit], sums: GradientSums | None = None
) -> Forward:
    """One differentiable pass over `units`, all of one sampling temperature; its backward pass adds the
    weights' gradients to `sums`."""
    distinct = [_distinct(unit.sequences) for unit in units]
    groups = [_group(found) for found, _ in distinct]
    output = tree_logp(weights, model, groups, units[0].temperature, sums)
    logp, entropies = [], []
    for unit, (_, slots), unit_logp, unit_entropy in zip(
        units, distinct, output.logp, output.entropy, strict=True
    ):
        members = list(zip(unit.sequences, slots, strict=True))
        logp += [unit_logp[slot][member.trained_T] for member, slot in members]
        of_members = [unit_entropy[slot][member.trained_T] for member, slot in members]
        entropies.append(float(torch.cat(of_members).double().sum()))
    return Forward(
        logp_N=torch.cat(logp),
        entropies=entropies,
        routes=output.routes_replayed,
        routes_other=output.route_disagreements,
        tokens=sum(len(group.prefix) + sum(len(own) for own in group.own) for group in groups),
    )


def _distinct(members: SequenceOf[Sequence]) -> tuple[list[Sequence], list[int]]:
    """The different members, and for each member which of them it is."""
    found: dict[tuple[bytes, bytes], int] = {}
    first: list[Sequence] = []
    slots = []
    for member in members:
        routes = b"" if member.routes_SLK is None else member.routes_SLK.numpy().tobytes()
        key = (member.own_T.numpy().tobytes(), routes)
        if key not in found:
            found[key] = len(first)
            first.append(member)
        slots.append(found[key])
    return first, slots


def _group(members: SequenceOf[Sequence]) -> Group:
    """The first member's recorded routes stand for the shared prefix."""
    first = members[0]
    length = first.prefix_P.numel()
    return Group(
        prefix=first.prefix_P.tolist(),
        own=[member.own_T.tolist() for member in members],
        prefix_routes=None if first.routes_SLK is None else first.routes_SLK[:length],
        own_routes=[None if m.routes_SLK is None else m.routes_SLK[length:] for m in members],
    )

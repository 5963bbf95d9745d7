"""The policy as the trainer sees it: differentiable log-probabilities of groups of sequences that share a
prefix.

A group's prefix is computed once, its sequences side by side behind it. For the same weights and routes the
log-probabilities have the bits that `policy.decode` produced while sampling. It knows no reward and no loss.
Routes recorded at sampling time may be replayed (facts of the router: `kernels.moe`).

N tokens of all groups  R rows with a successor  T tokens of a sequence  L layers  K experts per token  C
width  V vocabulary
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.errors import PolicyError
from headrace.kernels.gradient_sums import GradientSums, Taps, spans
from headrace.kernels.invariant import KEY_BLOCK, ROW_TILE, log_probs, padded
from headrace.policy import attention, model
from headrace.policy.attention import Keys
from headrace.policy.model import ModelConfig, Weights

MISSING = 255  # in recorded routes: this token's routes are unknown, the router chooses


@dataclass(frozen=True, slots=True)
class Group:
    """A prefix and the sequences that continue it. Routes, uint8 `[T, L, K]`, are those recorded while
    sampling; None replays nothing."""

    prefix: list[int]
    own: list[list[int]]
    prefix_routes: Tensor | None = None
    own_routes: list[Tensor | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TreeOutput:
    """By group and sequence: log-probabilities `[T]` of its own tokens at the temperature (token 0 follows
    the prefix), entropies `[T]` of the distributions they were drawn from (no gradient), routes used uint8
    `[T, L, K]`.

    `route_disagreements` of `routes_replayed` (token, layer) pairs would now choose another set of experts
    than was replayed.
    """

    logp: list[list[Tensor]]
    entropy: list[list[Tensor]]
    prefix_routes: list[Tensor]
    own_routes: list[list[Tensor]]
    route_disagreements: int
    routes_replayed: int


def tree_logp(
    weights: Weights,
    config: ModelConfig,
    groups: list[Group],
    temperature: float,
    sums: GradientSums | None = None,
) -> TreeOutput:
    """Log-probabilities of all sequences of `groups` in one differentiable pass.

    With `sums`, a backward pass adds the weights' gradients there, group by group, instead of to the weights.
    Raises PolicyError naming group and sequence if one is empty or too long, or if its recorded routes don't
    fit its tokens.
    """
    places = [_Places.of(config, group, index) for index, group in enumerate(groups)]
    offsets = _offsets([place.tokens for place in places])
    tokens = [t for group in groups for t in (*group.prefix, *(t for own in group.own for t in own))]
    positions = [position for place in places for position in place.positions]
    missing = -len(tokens) % ROW_TILE
    recorded_NLK = _recorded(config, groups, len(tokens) + missing)
    taps = None if sums is None else Taps(sums, spans(place.tokens for place in places))
    x_NC = model.embed(weights, torch.tensor(tokens + [0] * missing), taps)
    rope = model.rope_at(config, torch.tensor(positions + [0] * missing))
    used: list[Tensor] = []
    disagreements = torch.zeros((), dtype=torch.int64)
    for layer in range(config.layers):
        q, k, v = model.attention_inputs(config, weights, layer, x_NC, rope, taps)
        parts = []
        for place, start in zip(places, offsets, strict=True):
            span = slice(start, start + place.tokens)
            parts.append(place.attend(q[span], k[span], v[span]))
        attended_NC = torch.nn.functional.pad(torch.cat(parts), (0, 0, 0, missing))
        recorded_NK = None if recorded_NLK is None else recorded_NLK[:, layer]
        x_NC, routing = model.after_attention(config, weights, layer, x_NC, attended_NC, recorded_NK, taps)
        used.append(routing.used_NK.to(torch.uint8))
        differs_N = (routing.used_NK.sort(1).values != routing.chosen_NK.sort(1).values).any(1)
        disagreements += differs_N.sum()
    routes_NLK = torch.stack(used, 1)
    replayed = 0 if recorded_NLK is None else int((recorded_NLK[:, :, 0] >= 0).sum())
    logp, entropy = _logp(weights, config, x_NC, groups, offsets, temperature, taps)
    prefix_routes, own_routes = [], []
    for group, start in zip(groups, offsets, strict=True):
        lengths = [len(group.prefix), *(len(own) for own in group.own)]
        first, *rest = torch.split(routes_NLK[start : start + sum(lengths)], lengths)
        prefix_routes.append(first)
        own_routes.append(rest)
    return TreeOutput(logp, entropy, prefix_routes, own_routes, int(disagreements), replayed)


def _logp(
    weights: Weights,
    config: ModelConfig,
    x_NC: Tensor,
    groups: list[Group],
    offsets: list[int],
    temperature: float,
    taps: Taps | None,
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """The head over every row that has a successor; a prefix's last row serves all sequences of its group."""
    rows_used: list[int] = []
    pick: list[int] = []  # for each own token: which of `rows_used` predicts it
    targets: list[int] = []
    lengths: list[int] = []
    used_by_group: list[int] = []
    for group, offset in zip(groups, offsets, strict=True):
        at = offset + len(group.prefix)
        root = len(rows_used)
        rows_used.append(at - 1)
        for own in group.own:
            pick += [root, *range(len(rows_used), len(rows_used) + len(own) - 1)]
            rows_used += range(at, at + len(own) - 1)
            targets += own
            lengths.append(len(own))
            at += len(own)
        used_by_group.append(len(rows_used) - root)
    head_taps = None if taps is None else taps.over(spans(used_by_group))
    logits_RV = model.logits(config, weights, x_NC.index_select(0, torch.tensor(rows_used)), head_taps)
    logp_RV = log_probs(logits_RV, temperature)
    pick_T = torch.tensor(pick)
    with torch.no_grad():
        entropy_T = (-(logp_RV.exp() * logp_RV).sum(-1)).index_select(0, pick_T)
    flat_T = logp_RV.flatten().index_select(0, pick_T * logp_RV.shape[1] + torch.tensor(targets))
    counts = [len(group.own) for group in groups]
    return _regroup(torch.split(flat_T, lengths), counts), _regroup(torch.split(entropy_T, lengths), counts)


class _Places:
    """How one group's tokens stand in the products of attention: the prefix over itself; all own tokens over
    the prefix; each sequence over itself.
    """

    def __init__(self, config: ModelConfig, prefix: int, own: list[int]) -> None:
        g, r = config.heads_kv, config.query_rows
        self._config = config
        self._prefix = prefix
        self.tokens = prefix + sum(own)
        self.positions = [*range(prefix), *(prefix + i for length in own for i in range(length))]
        zero = torch.zeros(1, dtype=torch.int64)
        at_P, at_N = torch.arange(prefix), torch.arange(sum(own))
        self._keys_prefix = padded(prefix, KEY_BLOCK)
        self._self = attention.layout(torch.zeros_like(at_P), at_P, 1, prefix, g, r)
        self._self_hidden = attention.causal(r, prefix, self._keys_prefix, zero, g)
        self._over = attention.layout(torch.zeros_like(at_N), at_N, 1, sum(own), g, r)
        self._over_hidden = attention.beyond(torch.tensor([prefix]), self._keys_prefix, g)
        unit_N = torch.tensor([unit for unit, length in enumerate(own) for _ in range(length)])
        row_N = torch.tensor([i for length in own for i in range(length)])
        self._keys_own = padded(max(own), KEY_BLOCK)
        self._own = attention.layout(unit_N, row_N, len(own), max(own), g, r)
        self._own_hidden = attention.causal(r, max(own), self._keys_own, zero, g)
        self._key_place = attention.layout(unit_N, row_N, len(own), self._keys_own, g, 1)

    @classmethod
    def of(cls, config: ModelConfig, group: Group, index: int) -> "_Places":
        if not group.prefix or not group.own:
            raise PolicyError(
                f"tree: groups[{index}]: expected a prefix and sequences, got {len(group.own)} sequences"
            )
        limit = config.context_max - len(group.prefix)
        for number, own in enumerate(group.own):
            if not 0 < len(own) <= limit:
                place = f"tree: groups[{index}].own[{number}]"
                raise PolicyError(f"{place}: expected 1..{limit} tokens, got {len(own)}")
        return cls(config, len(group.prefix), [len(own) for own in group.own])

    def attend(self, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Attention's output `[tokens, C]` of the group."""
        p, d = self._prefix, self._config.head_width
        k_prefix, v_prefix = attention.key_rows(k_NGD[:p]), attention.key_rows(v_NGD[:p])
        alone = Keys(k_prefix, v_prefix, self._self_hidden, self._self)
        q_prefix = q_NHD[:p].reshape(-1, d)
        first_XD = attention.attend(q_prefix, None, alone)
        k_own, v_own = (self._key_place.spread(part[p:].reshape(-1, d)) for part in (k_NGD, v_NGD))
        shared = Keys(k_prefix, v_prefix, self._over_hidden, self._over)
        own = Keys(k_own, v_own, self._own_hidden, self._own)
        q_own = q_NHD[p:].reshape(-1, d)
        rest_XD = attention.attend(q_own, shared, own)
        return torch.cat((first_XD, rest_XD)).view(self.tokens, -1)


def _recorded(config: ModelConfig, groups: list[Group], rows: int) -> Tensor | None:
    """All recorded routes as int64 `[N, L, K]`, -1 where missing; None if there are none at all."""
    if all(group.prefix_routes is None and not group.own_routes for group in groups):
        return None
    shape = (config.layers, config.experts_active)
    parts = []
    for index, group in enumerate(groups):
        if group.own_routes and len(group.own_routes) != len(group.own):
            place = f"tree: groups[{index}].own_routes"
            raise PolicyError(f"{place}: expected {len(group.own)} sequences, got {len(group.own_routes)}")
        own_routes = group.own_routes or [None] * len(group.own)
        pairs = [("prefix_routes", group.prefix, group.prefix_routes)]
        pairs += [
            (f"own_routes[{i}]", o, r) for i, (o, r) in enumerate(zip(group.own, own_routes, strict=True))
        ]
        for name, tokens, routes in pairs:
            if routes is None:
                parts.append(torch.full((len(tokens), *shape), -1))
            else:
                parts.append(checked_routes(config, len(tokens), routes, f"tree: groups[{index}].{name}"))
    filler = torch.full((rows - sum(len(part) for part in parts), *shape), -1)
    return torch.cat([*parts, filler])


def checked_routes(config: ModelConfig, tokens: int, routes_TLK: Tensor, place: str) -> Tensor:
    """Recorded routes as int64 with -1 where missing (255).

    Raises PolicyError, beginning with `place`, with the counts: another length than the tokens', experts that
    don't exist, one expert twice.
    """
    shape = (tokens, config.layers, config.experts_active)
    if tuple(routes_TLK.shape) != shape:
        raise PolicyError(f"{place}: expected routes of shape {shape}, got {tuple(routes_TLK.shape)}")
    wide = routes_TLK.to(torch.int64)
    missing_TL = (wide == MISSING).all(-1)
    outside = int(((wide < 0) | (wide >= config.experts)).any(-1).logical_and(~missing_TL).sum())
    ordered = wide.sort(-1).values
    doubled = int((ordered[..., 1:] == ordered[..., :-1]).any(-1).logical_and(~missing_TL).sum())
    if outside or doubled:
        raise PolicyError(
            f"{place}: expected {config.experts_active} different experts of {config.experts}, "
            f"got {outside} out of range and {doubled} doubled of {missing_TL.numel()}"
        )
    return wide.masked_fill(missing_TL.unsqueeze(-1), -1)


def _offsets(lengths: list[int]) -> list[int]:
    return [sum(lengths[:index]) for index in range(len(lengths))]


def _regroup(flat: tuple[Tensor, ...], counts: list[int]) -> list[list[Tensor]]:
    iterator = iter(flat)
    return [[next(iterator) for _ in range(count)] for count in counts]

"""The policy network: a decoder-only transformer with a Mixture of Experts, as functions over a plain
dictionary of tensors.

Pre-norm blocks; rotary positions; grouped-query attention; SwiGLU experts; the embedding is also the output
head. Weights are stored in bf16 and computed with in float32 on exactly those values. How keys and values are
laid out (a cache, a packed tree, padded rows) is the business of `policy.decode`, `policy.tree` and
mid-training: they share every arithmetic step of this file, which is why they agree bit for bit. `taps`,
where given, sum the weights' gradients unit by unit (`kernels.gradient_sums`); they leave the values alone.

N tokens (rows)  C width  H query heads  G key-value heads  D head width  E experts  K experts per token  V
vocabulary
"""

import functools
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import PolicyError
from headrace.kernels import invariant, moe
from headrace.kernels.gradient_sums import Taps

Weights = dict[str, Tensor]


class ModelConfig(msgspec.Struct, frozen=True):
    """The shape of the network. `context_max` is in tokens, prefix and own part together."""

    vocabulary: int = 2048
    width: int = 128
    layers: int = 4
    heads: int = 4
    heads_kv: int = 2
    head_width: int = 32
    experts: int = 4
    experts_active: int = 2
    expert_width: int = 192
    context_max: int = 512
    rope_base: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        wrong = [
            ("vocabulary, width, head_width and expert_width in multiples of 16", self._off_tile()),
            ("heads to be a multiple of heads_kv", self.heads % self.heads_kv != 0),
            ("1 <= experts_active <= experts <= 255", not 1 <= self.experts_active <= self.experts <= 255),
        ]
        for expected, failed in wrong:
            if failed:
                raise PolicyError(f"model: expected {expected}, got {self}")

    def _off_tile(self) -> bool:
        return any(size % 16 for size in (self.vocabulary, self.width, self.head_width, self.expert_width))

    @property
    def query_rows(self) -> int:
        """Query heads that share one key-value head: rows of the attention product per token."""
        return self.heads // self.heads_kv


class Routing(NamedTuple):
    """A layer's router: its scores, the experts it chose, and the experts used (other ones where routes were
    replayed)."""

    scores_NE: Tensor
    chosen_NK: Tensor
    used_NK: Tensor


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the network."""
    c, d, w, e = config.width, config.head_width, config.expert_width, config.experts
    named: dict[str, tuple[int, ...]] = {"embed": (config.vocabulary, c), "final_norm": (c,)}
    for layer in range(config.layers):
        at = f"layers.{layer}."
        named[at + "attention_norm"] = (c,)
        named[at + "qkv"] = ((config.heads + 2 * config.heads_kv) * d, c)
        named[at + "out"] = (c, config.heads * d)
        named[at + "expert_norm"] = (c,)
        named[at + "router"] = (e, c)
        named[at + "up"] = (e, 2 * w, c)
        named[at + "down"] = (e, c, w)
    return named


def check_shapes(config: ModelConfig, weights: Weights) -> None:
    """Raises PolicyError naming the first tensor that is missing, unknown or of another shape than `config`
    says."""
    expected = shapes(config)
    for name in sorted(expected.keys() | weights.keys()):
        got = tuple(weights[name].shape) if name in weights else None
        if got != expected.get(name):
            raise PolicyError(f"model: {name}: expected shape {expected.get(name)}, got {got}")


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    """Fresh float32 weights: normal of standard deviation 1/sqrt(inputs); norms 1; outputs of a block 0;
    embedding 0.02."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        if name.endswith("norm"):
            weights[name] = torch.ones(shape)
        elif name.endswith((".out", ".down")):
            weights[name] = torch.zeros(shape)
        else:
            scale = 0.02 if name == "embed" else shape[-1] ** -0.5
            weights[name] = torch.randn(shape, generator=generator) * scale
    return weights


@functools.cache
def rope_tables(head_width: int, positions: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 `[positions, 1, head_width / 2]` (Su et al. 2021), rounded once from
    float64."""
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency).unsqueeze(1)
    return angle.cos().float(), angle.sin().float()


def rotate(x_NHD: Tensor, cos_N1F: Tensor, sin_N1F: Tensor) -> Tensor:
    """Rotary position embedding of each head: its halves turned by the position's angles."""
    a, b = x_NHD.chunk(2, -1)
    return torch.cat((a * cos_N1F - b * sin_N1F, b * cos_N1F + a * sin_N1F), -1)


def rope_at(config: ModelConfig, position_N: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the rotary tables for these positions."""
    cos, sin = rope_tables(config.head_width, config.context_max, config.rope_base)
    return cos.index_select(0, position_N), sin.index_select(0, position_N)


def embed(weights: Weights, tokens_N: Tensor, taps: Taps | None = None) -> Tensor:
    """The residual stream `[N, C]` at the entrance."""
    x_NC = F.embedding(tokens_N, weights["embed"])
    if taps is not None:
        taps.embedded("embed", tokens_N, x_NC)
    return x_NC


def _linear(weights: Weights, name: str, x_NI: Tensor, taps: Taps | None) -> Tensor:
    y_NO = invariant.linear(x_NI, weights[name])
    if taps is not None:
        taps.product(name, x_NI, y_NO)
    return y_NO


def _norm(weights: Weights, name: str, x_NC: Tensor, eps: float, taps: Taps | None) -> Tensor:
    unit_NC = invariant.unit_rms(x_NC, eps)
    y_NC = unit_NC * weights[name]
    if taps is not None:
        taps.scaled(name, unit_NC, y_NC)
    return y_NC


def attention_inputs(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    x_NC: Tensor,
    rope: tuple[Tensor, Tensor],
    taps: Taps | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[N, H, D]`, keys and values `[N, G, D]` of a layer, queries and keys rotated."""
    at = f"layers.{layer}."
    normed_NC = _norm(weights, at + "attention_norm", x_NC, config.norm_eps, taps)
    joint = _linear(weights, at + "qkv", normed_NC, taps).view(x_NC.shape[0], -1, config.head_width)
    both = config.heads + config.heads_kv
    turned = rotate(joint[:, :both], *rope)
    return turned[:, : config.heads], turned[:, config.heads :], joint[:, both:]


def after_attention(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    x_NC: Tensor,
    attended_NC: Tensor,
    recorded_NK: Tensor | None,
    taps: Taps | None = None,
) -> tuple[Tensor, Routing]:
    """The residual stream after the rest of a layer, and how its tokens were routed.

    `recorded` (int64) replays routes in their order; a row of -1 chooses for itself.
    """
    at = f"layers.{layer}."
    x_NC = x_NC + _linear(weights, at + "out", attended_NC, taps)
    normed_NC = _norm(weights, at + "expert_norm", x_NC, config.norm_eps, taps)
    scores_NE = _linear(weights, at + "router", normed_NC, taps)
    chosen_NK = moe.choose(scores_NE, config.experts_active)
    used_NK = chosen_NK if recorded_NK is None else torch.where(recorded_NK < 0, chosen_NK, recorded_NK)
    gates_NK = moe.gate(scores_NE, used_NK)
    tapped = None if taps is None else taps.routed(at + "up", at + "down")
    mixed_NC = moe.experts(normed_NC, used_NK, gates_NK, weights[at + "up"], weights[at + "down"], tapped)
    return x_NC + mixed_NC, Routing(scores_NE, chosen_NK, used_NK)


def logits(config: ModelConfig, weights: Weights, x_NC: Tensor, taps: Taps | None = None) -> Tensor:
    """Scores of the next token, float32 `[N, V]`."""
    return _linear(weights, "embed", _norm(weights, "final_norm", x_NC, config.norm_eps, taps), taps)

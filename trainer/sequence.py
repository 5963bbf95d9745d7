"""One rollout as tensors, once every count in it is checked. Knows no reward and no loss.

The steps of a rollout are appended, never re-tokenised: the first `prefix_length` tokens are the prompt that
the group shares, all after it is the *own part*, in which some tokens were generated.

P prefix tokens  T own tokens  S all tokens  L layers  K experts per token
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import WireError
from headrace.policy.model import ModelConfig
from headrace.policy.tree import MISSING
from headrace.wire.records import TEMPERATURE_MAX, TEMPERATURE_MIN, VERSION_MAX, Rollout, RolloutStep

NOT_GENERATED = -1
LOGP_MAX = 1e-3
"""Log-probabilities are at most 0; their rounding may say a little more."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """A member's tokens. int64 but for `trained` (bool), `logp` (float32, 0 where not generated) and
    routes."""

    member: int
    prefix_P: Tensor
    own_T: Tensor
    trained_T: Tensor
    logp_T: Tensor
    version_T: Tensor
    """Weights version of each generated token, `NOT_GENERATED` elsewhere."""
    context_version_T: Tensor
    """The oldest weights that took part in each generated token: in sampling it or any before it, in the keys
    and values that it saw, in the routes recorded up to it. `NOT_GENERATED` elsewhere."""
    prefix_version: int
    """Of the weights that computed the prefix, and chose its routes."""
    routes_SLK: Tensor | None
    """uint8: recorded experts of prefix and own part, `MISSING` where there is none (the last output)."""
    temperature: float
    oldest_version: int
    """Of its spans; of the start of generation when nothing was generated."""

    @property
    def tokens_trained(self) -> int:
        return int(self.trained_T.sum())

    @property
    def tokens(self) -> int:
        return self.prefix_P.numel() + self.own_T.numel()


def sequence_of(rollout: Rollout, model: ModelConfig) -> Sequence:
    """The tensors of a whole rollout. Raises WireError that names the member, the step and the two counts."""
    if not rollout.steps:
        raise WireError(f"member {rollout.member}: expected steps, got none")
    prefix_length = rollout.steps[0].prefix_length
    length = 0
    tokens: list[NDArray[np.int64]] = []
    trained: list[NDArray[np.generic]] = []
    logp: list[NDArray[np.generic]] = []
    version: list[NDArray[np.generic]] = []
    context: list[NDArray[np.generic]] = []
    oldest = rollout.steps[0].weights_version
    for index, step in enumerate(rollout.steps):
        place = f"member {rollout.member}: step {index}"
        _check_order(rollout, step, index, length, prefix_length, place)
        given = _tokens(step.tokens_in, model, f"{place}: tokens_in")
        made = _tokens(step.tokens_out, model, f"{place}: tokens_out")
        silent = np.zeros(given.size, np.int64)
        tokens += [given, made]
        trained += [silent, _mask(step, made.size, place)]
        logp += [silent, _logp(step, made.size, place)]
        made_version = _versions(step, made.size, place)
        oldest = min(oldest, step.weights_version)
        made_context = np.minimum.accumulate(np.minimum(made_version, oldest))
        oldest = int(made_context[-1]) if made.size else oldest
        version += [silent + NOT_GENERATED, made_version]
        context += [silent + NOT_GENERATED, made_context]
        length += given.size + made.size
    prompt = tokens[0].size
    if not 1 <= prefix_length <= prompt:
        raise WireError(
            f"member {rollout.member}: prefix_length: expected 1 to the {prompt} tokens of the prompt,"
            f" got {prefix_length}"
        )
    tokens_S = torch.from_numpy(np.concatenate(tokens))
    return Sequence(
        member=rollout.member,
        prefix_P=tokens_S[:prefix_length],
        own_T=tokens_S[prefix_length:],
        trained_T=torch.from_numpy(np.concatenate(trained))[prefix_length:].bool(),
        logp_T=torch.from_numpy(np.concatenate(logp))[prefix_length:].float(),
        version_T=torch.from_numpy(np.concatenate(version))[prefix_length:].long(),
        context_version_T=torch.from_numpy(np.concatenate(context))[prefix_length:].long(),
        prefix_version=rollout.steps[0].weights_version,
        routes_SLK=_routes(rollout, length, model),
        temperature=rollout.steps[0].temperature,
        oldest_version=min(
            min((span.weights_version for span in step.spans), default=step.weights_version)
            for step in rollout.steps
        ),
    )


def _check_order(
    rollout: Rollout, step: RolloutStep, index: int, length: int, prefix_length: int, place: str
) -> None:
    first = rollout.steps[0]
    expected_last = index == len(rollout.steps) - 1
    for name, expected, got in (
        ("member", rollout.member, step.member),
        ("attempt", rollout.attempt, step.attempt),
        ("step", index, step.step),
        ("last", expected_last, step.last),
        ("segment", 0, step.segment),
        ("base_length", length, step.base_length),
        ("prefix_length", prefix_length, step.prefix_length),
        ("temperature", first.temperature, step.temperature),
    ):
        if got != expected:
            raise WireError(f"{place}: {name}: expected {expected}, got {got}")
    if not TEMPERATURE_MIN <= step.temperature <= TEMPERATURE_MAX:
        raise WireError(
            f"{place}: temperature: expected {TEMPERATURE_MIN} to {TEMPERATURE_MAX} (sampled),"
            f" got {step.temperature}"
        )
    if not 0 <= step.weights_version <= VERSION_MAX:
        raise WireError(f"{place}: weights_version: expected 0 to {VERSION_MAX}, got {step.weights_version}")


def _tokens(packed: bytes, model: ModelConfig, place: str) -> NDArray[np.int64]:
    if len(packed) % 4:
        raise WireError(f"{place}: expected 4 bytes a token, got {len(packed)} bytes")
    tokens = np.frombuffer(packed, "<u4").astype(np.int64)
    if tokens.size and tokens.max() >= model.vocabulary:
        raise WireError(f"{place}: expected ids below {model.vocabulary}, got {tokens.max()}")
    return tokens


def _mask(step: RolloutStep, made: int, place: str) -> NDArray[np.uint8]:
    mask = np.frombuffer(step.loss_mask, np.uint8)
    if mask.size != made or (made and mask.max() > 1):
        raise WireError(f"{place}: loss_mask: expected {made} times 0 or 1, got {mask.size} values")
    return mask


def _logp(step: RolloutStep, made: int, place: str) -> NDArray[np.float32]:
    if len(step.logp) != 4 * made:
        raise WireError(f"{place}: logp: expected {made} values of 4 bytes, got {len(step.logp)} bytes")
    logp = np.frombuffer(step.logp, "<f4")
    if not (np.isfinite(logp).all() and (logp <= LOGP_MAX).all()):
        raise WireError(f"{place}: logp: expected finite values of at most 0, got {logp.tolist()}")
    return logp


def _versions(step: RolloutStep, made: int, place: str) -> NDArray[np.int64]:
    version = np.full(made, NOT_GENERATED, np.int64)
    end = 0
    for span in step.spans:
        if span.start != end or span.end < span.start or not 0 <= span.weights_version <= VERSION_MAX:
            raise WireError(
                f"{place}: spans: expected one from {end} of a version from 0 to {VERSION_MAX}, got {span}"
            )
        end = span.end
        version[span.start : span.end] = span.weights_version
    if end != made:
        raise WireError(f"{place}: spans: expected to cover {made} tokens, got {end}")
    return version


def _routes(rollout: Rollout, length: int, model: ModelConfig) -> Tensor | None:
    """`[S, L, K]`, or None when no step recorded any. Each step covers just the tokens that it fed first."""
    if not any(step.routes for step in rollout.steps):
        return None
    layers, top_k = model.layers, model.experts_active
    routes = np.full((length, layers, top_k), MISSING, np.uint8)
    for index, step in enumerate(rollout.steps):
        if not step.routes:
            continue
        place = f"member {rollout.member}: step {index}: routes"
        start = 0 if index == 0 else step.base_length - 1
        end = step.base_length + (len(step.tokens_in) + len(step.tokens_out)) // 4 - 1
        if step.routes_start != start:
            raise WireError(f"{place}: expected to start at token {start}, got {step.routes_start}")
        if step.routes_shape != (end - start, layers, top_k):
            raise WireError(
                f"{place}: expected {(end - start, layers, top_k)} (tokens, layers, experts per token),"
                f" got {step.routes_shape}"
            )
        width = len(step.routes) / ((end - start) * layers * top_k or 1)
        if width not in (1, 2):
            raise WireError(
                f"{place}: expected 1 or 2 bytes a choice for {step.routes_shape},"
                f" got {len(step.routes)} bytes"
            )
        chosen = np.frombuffer(step.routes, "<u1" if width == 1 else "<u2").reshape(-1, layers, top_k)
        outside = int((chosen >= model.experts).sum())
        ordered = np.sort(chosen, -1)
        twice = int((ordered[..., 1:] == ordered[..., :-1]).sum())
        if outside or twice:
            raise WireError(
                f"{place}: expected different experts below {model.experts},"
                f" got {outside} outside and {twice} repeated of {chosen.size}"
            )
        routes[start:end] = chosen
    return torch.from_numpy(routes)

"""The shipped model, sampled token by token by the decoder and then trained on: the same numbers."""

import msgspec
import pytest
import torch
from trainer_records import consumed, experience

from headrace.config import RunConfig
from headrace.kernels.invariant import log_probs
from headrace.policy.checkpoint import load_seed
from headrace.policy.decode import Decoder, Prefix, Row
from headrace.policy.model import ModelConfig, Weights
from headrace.trainer.admission import Entry
from headrace.trainer.config import StepSettings, TrainerConfig
from headrace.trainer.state import fresh
from headrace.trainer.step import run_step
from headrace.wire.packed import pack_f32, pack_u32
from headrace.wire.records import Experience, Rollout, RolloutStep, Span

TEMPERATURE = 0.7
PROMPT = [3 * i % 2000 for i in range(70)]  # longer than one block of attention
RESULT = [11, 12, 13]


class _Sampler:
    """One member: two turns of `turn` tokens with a tool's result between them."""

    def __init__(
        self, model: ModelConfig, weights: Weights, prefix: Prefix, member: int, decoder: Decoder
    ) -> None:
        self._weights, self._prefix, self._member, self._decoder = weights, prefix, member, decoder
        self._generator = torch.Generator().manual_seed(member)
        self._logits_V = prefix.logits_V
        self._routes = [prefix.routes_TLK]
        self._model = model

    def _feed(self, tokens: list[int]) -> None:
        found = self._decoder.extend(self._weights, [Row(self._member, self._prefix, tokens)])
        self._logits_V = found.logits_RV[0]
        self._routes += found.routes

    def _turn(self, tokens: int) -> tuple[list[int], list[float]]:
        made, logp = [], []
        for index in range(tokens):
            logp_1V = log_probs(self._logits_V[None], TEMPERATURE)
            token = int(torch.multinomial(logp_1V.exp(), 1, generator=self._generator))
            made.append(token)
            logp.append(float(logp_1V[0, token]))
            if index < tokens - 1:
                self._feed([token])
        return made, logp

    def rollout(self, turn: int) -> Rollout:
        first, first_logp = self._turn(turn)
        before = self._take_routes()
        self._feed([first[-1], *RESULT])
        second, second_logp = self._turn(turn + 1)
        after = self._take_routes()
        length = len(PROMPT) + turn
        steps = (
            self._step(0, 0, PROMPT, first, first_logp, before, 0),
            self._step(1, length, RESULT, second, second_logp, after, length - 1),
        )
        return Rollout(
            member=self._member, attempt=1, steps=steps, components={}, reward=float(self._member % 2)
        )

    def _take_routes(self) -> torch.Tensor:
        routes, self._routes = torch.cat(self._routes), []
        return routes

    def _step(
        self,
        index: int,
        base: int,
        given: list[int],
        made: list[int],
        logp: list[float],
        routes: torch.Tensor,
        start: int,
    ) -> RolloutStep:
        return RolloutStep(
            run="test",
            group_id="g",
            member=self._member,
            attempt=1,
            step=index,
            last=index == 1,
            source="sim",
            base_length=base,
            prefix_length=len(PROMPT),
            tokens_in=pack_u32(given),
            tokens_out=pack_u32(made),
            logp=pack_f32(logp),
            loss_mask=b"\1" * len(made),
            spans=(Span(start=0, end=len(made), weights_version=0),),
            weights_version=0,
            routes=routes.numpy().tobytes(),
            routes_start=start,
            routes_shape=tuple(routes.shape),
            finish="stop",
            temperature=TEMPERATURE,
            started_ms=0,
            ended_ms=0,
        )


@pytest.fixture(scope="module")
def sampled() -> tuple[ModelConfig, Weights, Experience]:
    model, weights, _ = load_seed()
    decoder = Decoder(model, 4, 64)
    [prefix] = decoder.prefill(weights, [PROMPT])
    members = [
        _Sampler(model, weights, prefix, member, decoder).rollout(3 + 2 * member) for member in range(4)
    ]
    return model, weights, experience("g", members)


def _metrics(model: ModelConfig, weights: Weights, group: Experience) -> dict[str, float]:
    result = run_step(
        fresh(weights, {}),
        [Entry(consumed("g"), group)],
        {},
        model=model,
        settings=StepSettings(run=RunConfig(), trainer=TrainerConfig()),
    )
    assert len(result.admission.units) == 1, result.admission
    return result.metrics


def test_on_policy_numbers_agree_bit_for_bit(sampled: tuple[ModelConfig, Weights, Experience]) -> None:
    """Two turns, a tool's result between them, temperature 0.7, routes replayed: no token differs at all."""
    metrics = _metrics(*sampled)
    assert metrics["tokens.trained"] == sum(2 * (3 + 2 * member) + 1 for member in range(4))
    assert metrics["mismatch.abs_max"] == 0.0
    assert metrics["mismatch.k3_mean"] == 0.0
    assert metrics["route.disagreement"] == 0.0


def test_and_without_recorded_routes_too(sampled: tuple[ModelConfig, Weights, Experience]) -> None:
    """The same kernels choose the same experts."""
    model, weights, group = sampled
    bare = [
        msgspec.structs.replace(
            member,
            steps=tuple(
                msgspec.structs.replace(step, routes=b"", routes_start=0, routes_shape=())
                for step in member.steps
            ),
        )
        for member in group.rollouts
    ]
    metrics = _metrics(model, weights, msgspec.structs.replace(group, rollouts=tuple(bare)))
    assert metrics["mismatch.abs_max"] == 0.0


def test_other_numbers_are_seen(sampled: tuple[ModelConfig, Weights, Experience]) -> None:
    """Log-probabilities taken at temperature 1 where 0.7 is meant are no small mismatch."""
    model, weights, group = sampled
    wrong = [
        msgspec.structs.replace(
            m, steps=tuple(msgspec.structs.replace(step, temperature=1.0) for step in m.steps)
        )
        for m in group.rollouts
    ]
    metrics = _metrics(model, weights, msgspec.structs.replace(group, rollouts=tuple(wrong)))
    assert metrics["mismatch.abs_mean"] > 0.05

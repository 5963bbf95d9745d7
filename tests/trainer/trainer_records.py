"""Closed groups for the tests of the trainer: small, whole, consistent. Not tests."""

from collections.abc import Sequence

from headrace.policy.model import ModelConfig
from headrace.wire.packed import pack_f32, pack_u32
from headrace.wire.records import Consumed, Experience, Rollout, RolloutStep, Span

MODEL = ModelConfig(
    vocabulary=64,
    width=32,
    layers=2,
    heads=2,
    heads_kv=1,
    head_width=16,
    experts=4,
    experts_active=2,
    expert_width=16,
    context_max=128,
)
PREFIX = (5, 6, 7, 8)
RUN = "test"


def rollout(
    member: int,
    reward: float | None,
    turns: Sequence[tuple[Sequence[int], Sequence[int]]] = (((), (9, 10)),),
    *,
    version: int = 0,
    prefix: Sequence[int] = PREFIX,
    logp: float = -1.0,
    temperature: float = 1.0,
    routes: bool = False,
    whole: bool = True,
    quarantined: bool = False,
    group_id: str = "g",
) -> Rollout:
    """`turns`: (tokens in, tokens out); the prompt is put in front of the first."""
    steps = []
    length = 0
    for index, (given, made) in enumerate(turns):
        tokens_in = [*prefix, *given] if index == 0 else list(given)
        start = 0 if index == 0 else length - 1
        fed = length + len(tokens_in) + len(made) - 1 - start
        row = bytes([1, 3] * MODEL.layers)
        steps.append(
            RolloutStep(
                run=RUN,
                group_id=group_id,
                member=member,
                attempt=1,
                step=index,
                last=index == len(turns) - 1,
                source="sim",
                base_length=length,
                prefix_length=len(prefix),
                tokens_in=pack_u32(tokens_in),
                tokens_out=pack_u32(made),
                logp=pack_f32([logp] * len(made)),
                loss_mask=b"\1" * len(made),
                spans=(Span(start=0, end=len(made), weights_version=version),) if made else (),
                weights_version=version,
                routes=row * fed if routes else b"",
                routes_start=start if routes else 0,
                routes_shape=(fed, MODEL.layers, MODEL.experts_active) if routes else (),
                finish="stop",
                temperature=temperature,
                started_ms=0,
                ended_ms=0,
            )
        )
        length += len(tokens_in) + len(made)
    return Rollout(
        member=member,
        attempt=1,
        steps=tuple(steps),
        components={},
        reward=reward,
        whole=whole,
        quarantined=quarantined,
    )


def experience(
    group_id: str,
    rollouts: Sequence[Rollout],
    *,
    run: str = RUN,
    size: int | None = None,
    missing: Sequence[int] = (),
    closed: str = "complete",
) -> Experience:
    return Experience(
        run=run,
        group_id=group_id,
        source="sim",
        env="holes",
        task_id="task",
        group_size=len(rollouts) if size is None else size,
        rollouts=tuple(rollouts),
        missing=tuple(missing),
        closed=closed,  # type: ignore[arg-type]
        admitted_version=0,
        opened_ms=0,
        closed_ms=0,
    )


def pair(group_id: str, *, version: int = 0, first: int = 9) -> Experience:
    """Two members with rewards 1 and 0: advantages +0.5 and -0.5, two trained tokens each."""
    return experience(
        group_id,
        [
            rollout(0, 1.0, (((), (first, 10)),), version=version, group_id=group_id),
            rollout(1, 0.0, (((), (first + 1, 11)),), version=version, group_id=group_id),
        ],
    )


def consumed(group_id: str, offset: int = 0) -> Consumed:
    return Consumed(topic="experience", partition=0, offset=offset, group_id=group_id)

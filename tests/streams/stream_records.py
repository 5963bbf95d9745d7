"""Small records for the tests of streams: two-step rollouts with hand-worked rewards. Not tests."""

from headrace.wire.packed import pack_f32, pack_u32
from headrace.wire.records import GroupFailed, Prompt, Reward, RolloutStep, Sampling, Span

COMPONENTS = {"tests": 1.0, "format": 0.5}
DEADLINE_MS = 60_000


def prompt(
    group: str, *, size: int = 2, deadline_ms: int = DEADLINE_MS, components: dict[str, float] = COMPONENTS
) -> Prompt:
    return Prompt(
        run="test",
        group_id=group,
        env="holes",
        task_id=f"task of {group}",
        seed=1,
        group_size=size,
        sampling=Sampling(),
        components=components,
        weights_version=3,
        admitted_ms=0,
        deadline_ms=deadline_ms,
    )


def step(
    group: str,
    member: int,
    index: int,
    *,
    last: bool = False,
    attempt: int = 1,
    tokens: int = 2,
    worker: str = "w",
) -> RolloutStep:
    return RolloutStep(
        run="test",
        group_id=group,
        member=member,
        attempt=attempt,
        step=index,
        last=last,
        source="sim",
        base_length=0,
        prefix_length=0,
        tokens_in=pack_u32([7] * tokens),
        tokens_out=pack_u32([8] * tokens),
        logp=pack_f32([-0.5] * tokens),
        loss_mask=b"\1" * tokens,
        spans=(Span(start=0, end=tokens, weights_version=3),),
        weights_version=3,
        finish="stop",
        temperature=1.0,
        started_ms=0,
        ended_ms=0,
        worker=worker,
    )


def reward(
    group: str, member: int, component: str, value: float, *, attempt: int = 1, quarantine: bool = False
) -> Reward:
    return Reward(
        run="test",
        group_id=group,
        member=member,
        attempt=attempt,
        component=component,
        verdict="quarantine" if quarantine else "score",
        value=value,
    )


def failed(group: str, *, attempt: int = 1, reason: str = "sandbox gone") -> GroupFailed:
    return GroupFailed(run="test", group_id=group, attempt=attempt, reason=reason)


def rollout(group: str, member: int, *, attempt: int = 1, tests: float = 1.0) -> list[RolloutStep | Reward]:
    """Two steps and both rewards: total = tests + 0.5."""
    return [
        step(group, member, 0, attempt=attempt),
        step(group, member, 1, last=True, attempt=attempt),
        reward(group, member, "tests", tests, attempt=attempt),
        reward(group, member, "format", 1.0, attempt=attempt),
    ]

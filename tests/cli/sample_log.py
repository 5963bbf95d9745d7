"""A small run on an embedded log, written record by record, for tests of the commands that look."""

from collections.abc import Sequence
from pathlib import Path

from headrace.bus import open_bus
from headrace.bus.protocol import Message
from headrace.clock import ManualClock
from headrace.wire import packed
from headrace.wire import records as r
from headrace.wire.codec import encode
from headrace.wire.topics import TOPICS

RUN = "sample"
START_MS = 1_796_000_000_000


def prompt(number: int) -> tuple[str, str, r.Record]:
    return (
        "prompts",
        group(number),
        r.Prompt(
            run=RUN,
            group_id=group(number),
            env="doctest",
            task_id="package.module.function:name:3-7",
            seed=1,
            group_size=2,
            sampling=r.Sampling(),
            components={"tests": 1.0},
            weights_version=0,
            admitted_ms=START_MS,
            deadline_ms=START_MS + 1000,
        ),
    )


def step(
    number: int, member: int, *, attempt: int = 1, tokens: Sequence[int] = (4, 5)
) -> tuple[str, str, r.Record]:
    return (
        "rollout.steps",
        group(number),
        r.RolloutStep(
            run=RUN,
            group_id=group(number),
            member=member,
            attempt=attempt,
            step=0,
            last=True,
            source="sim",
            base_length=0,
            prefix_length=3,
            tokens_in=packed.pack_u32([1, 2, 3]),
            tokens_out=packed.pack_u32(tokens),
            logp=packed.pack_f32([-0.5] * len(tokens)),
            loss_mask=b"\1" * len(tokens),
            spans=(r.Span(start=0, end=len(tokens), weights_version=0),),
            weights_version=0,
            finish="passed",
            temperature=1.0,
            started_ms=START_MS,
            ended_ms=START_MS + 5,
            worker="rollouts-0",
            tool_call=r.ToolCall(name="fill", arguments={"fill": "x"}),
        ),
    )


def reward(number: int, member: int, value: float, *, attempt: int = 1) -> tuple[str, str, r.Record]:
    return (
        "rewards",
        group(number),
        r.Reward(
            run=RUN, group_id=group(number), member=member, attempt=attempt, component="tests", value=value
        ),
    )


def train_step(
    number: int,
    consumed: Sequence[int],
    admitted: Sequence[int],
    drops: Sequence[r.Drop] = (),
    **metrics: float,
) -> tuple[str, str, r.Record]:
    return (
        "train.steps",
        RUN,
        r.TrainStep(
            run=RUN,
            step=number,
            version_from=number - 1,
            version_to=number,
            consumed=tuple(
                r.Consumed(topic="experience", partition=0, offset=n, group_id=group(n)) for n in consumed
            ),
            positions={},
            admitted=tuple(map(group, admitted)),
            drops=tuple(drops),
            config="{}",
            config_sha256="",
            seed=0,
            code="",
            libraries={},
            threads=1,
            kernel_probe="",
            metrics=metrics,
            root_before="",
            root_after="",
            started_ms=START_MS + 2000 * number - 1500,
            ended_ms=START_MS + 2000 * number,
        ),
    )


def evaluation(
    round: str, version: int, task: int, passed: bool, *, mode: str = "sampled", sample: int = 0
) -> tuple[str, str, r.Record]:
    return (
        "evaluations",
        RUN,
        r.Evaluation(
            run=RUN,
            version=version,
            round=round,
            mode=mode,  # type: ignore[arg-type]
            task_id=f"package.module.function{task}:name:1-2",
            kind="name",
            sample=sample,
            passed=passed,
            passed_first=passed,
            reward=float(passed),
            turns=(r.Turn(call="<b>x", result="NameError", finish="stop"),),
            finish="passed" if passed else "tries_exhausted",
        ),
    )


def group(number: int) -> str:
    return f"{RUN}-{number:07d}"


async def write(path: Path, records: Sequence[tuple[str, str, r.Record]], bad: Sequence[Message] = ()) -> str:
    """Creates all topics on the log at `path` and appends, one second apart; the address."""
    clock = ManualClock(START_MS)
    async with open_bus(f"sqlite:{path}", clock=clock) as bus:
        await bus.create_topics(list(TOPICS.values()))
        for topic, key, record in records:
            value, headers = encode(record, source="test", now_ms=START_MS)
            await bus.produce([Message(topic, key.encode(), value, headers)])
            clock.advance(1000)
        if bad:
            await bus.produce(list(bad))
    return f"sqlite:{path}"

"""A run's log with one group for each thing that can become of one; its ledger answers as the trainer's own
admission does. Not tests."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.bus import open_bus
from headrace.bus.dead_letters import dead_letter
from headrace.bus.protocol import Delivery, Message, TopicPartition
from headrace.clock import ManualClock
from headrace.errors import WireError
from headrace.policy.model import ModelConfig
from headrace.trainer.admission import Admission, Entry, admit
from headrace.wire import packed
from headrace.wire import records as r
from headrace.wire.codec import encode
from headrace.wire.topics import TOPICS

RUN = "sample"
START_MS = 1_796_000_000_000
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
TOKENS_MAX = 40


def group(number: int) -> str:
    return f"{RUN}-{number:07d}"


def turn(number: int, member: int, *, tokens: int = 2, version: int = 0, last: bool = True) -> r.RolloutStep:
    return r.RolloutStep(
        run=RUN,
        group_id=group(number),
        member=member,
        attempt=1,
        step=0,
        last=last,
        source="sim",
        base_length=0,
        prefix_length=3,
        tokens_in=packed.pack_u32([1, 2, 3]),
        tokens_out=packed.pack_u32([4] * tokens),
        logp=packed.pack_f32([-0.5] * tokens),
        loss_mask=b"\1" * tokens,
        spans=(r.Span(start=0, end=tokens, weights_version=version),) if tokens else (),
        weights_version=version,
        finish="stop",
        temperature=1.0,
        started_ms=START_MS,
        ended_ms=START_MS + 5,
        worker="rollouts-0",
    )


def closed(
    number: int,
    rewards: Sequence[float | None] = (1.0, 0.0),
    *,
    tokens: Sequence[int] = (2, 2),
    version: int = 0,
    how: str = "complete",
    quarantined: bool = False,
    env: str = "doctest",
) -> r.Experience:
    return r.Experience(
        run=RUN,
        group_id=group(number),
        source="sim",
        env=env,
        task_id="package.module.function:name:3-7",
        group_size=2,
        rollouts=tuple(
            r.Rollout(
                member=member,
                attempt=1,
                steps=(turn(number, member, tokens=tokens[member], version=version),),
                components={} if reward is None else {"tests": reward},
                reward=reward,
                quarantined=quarantined and member == 0,
            )
            for member, reward in enumerate(rewards)
        ),
        missing=() if len(rewards) == 2 else (1,),
        closed=how,  # type: ignore[arg-type]
        admitted_version=version,
        opened_ms=START_MS,
        closed_ms=START_MS + 9,
        region="eu" if number % 2 else "us",
    )


def lone(number: int) -> r.Experience:
    """The deadline passed, and its second member had not come."""
    return closed(number, (1.0,), how="timeout")


def prompt(number: int) -> r.Prompt:
    return r.Prompt(
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
        deadline_ms=START_MS + 100_000,
        region="us",
    )


def reward(number: int, member: int) -> r.Reward:
    return r.Reward(run=RUN, group_id=group(number), member=member, attempt=1, component="tests", value=1.0)


def broken(record: r.Experience) -> r.Experience:
    """Its first member has one log-probability too few."""
    first = record.rollouts[0]
    step = msgspec.structs.replace(first.steps[0], logp=first.steps[0].logp[4:])
    return msgspec.structs.replace(
        record, rollouts=(msgspec.structs.replace(first, steps=(step,)), *record.rollouts[1:])
    )


def answered() -> list[list[r.Experience]]:
    """What three steps read, in one partition. The third starts from version 2, the oldest allowed is 1."""
    return [
        [closed(0), closed(1, (0.5, 0.5)), closed(2, (1.0, None)), closed(0)],
        [closed(3, how="failed"), closed(4, quarantined=True), closed(5, tokens=(38, 39)), broken(closed(6))],
        [
            closed(7),
            closed(6, version=1),
            closed(8, tokens=(38, 2), version=2),
            closed(9, (1.0,), how="timeout"),
        ],
    ]


def under_way() -> list[r.Record]:
    """One group of each stage: waiting, rolled out in part, judged in part, judged, given up."""
    return [
        *(prompt(number) for number in range(10, 15)),
        turn(11, 0),
        turn(12, 0),
        turn(12, 1),
        reward(12, 0),
        turn(13, 0),
        turn(13, 1),
        reward(13, 0),
        reward(13, 1),
        r.GroupFailed(run=RUN, group_id=group(14), attempt=1, reason="the sandbox died"),
    ]


def answer(steps: Sequence[Sequence[r.Experience]]) -> tuple[list[r.TrainStep], list[Admission]]:
    """The ledger's records for what each step read, in partition 0 of `experience`."""
    offset, seen, found, admissions = 0, set[str](), [], []
    for number, records in enumerate(steps, start=1):
        entries = []
        for record in records:
            consumed = r.Consumed(
                topic="experience",
                partition=0,
                offset=offset,
                group_id=record.group_id,
                env=record.env,
                region=record.region,
                tokens=max(len(x.steps[0].tokens_out) // 4 for x in record.rollouts),
            )
            entries.append(Entry(consumed, record))
            offset += 1
        admission = admit(
            entries,
            version=number - 1,
            seen=seen,
            model=MODEL,
            lag_versions_max=1,
            sequence_tokens_max=TOKENS_MAX,
            scale_std=False,
        )
        seen.update(admission.read)
        admissions.append(admission)
        found.append(
            r.TrainStep(
                run=RUN,
                step=number,
                version_from=number - 1,
                version_to=number,
                consumed=tuple(entry.consumed for entry in entries),
                positions={"experience/0": offset},
                admitted=tuple(unit.group_id for unit in admission.units),
                drops=tuple(admission.drops),
                config='{"run":{"seed":0},"trainer":{"lr":0.001}}',
                config_sha256="",
                seed=0,
                code="1",
                libraries={"torch": "2"},
                threads=1,
                kernel_probe="p",
                metrics={"loss": 0.5, "seconds.learn": 1.5},
                root_before=f"root{number - 1}",
                root_after=f"root{number}",
                started_ms=START_MS,
                ended_ms=START_MS + 1000,
            )
        )
    return found, admissions


Change = Callable[[list[r.TrainStep]], list[r.TrainStep]]


async def write(
    path: Path,
    *,
    steps: Sequence[Sequence[r.Experience]] | None = None,
    change: Change = lambda ledger: ledger,
    others: Sequence[r.Record] | None = None,
    unread: Sequence[r.Experience] = (),
    committed: int | None = None,
    extra: Sequence[Message] = (),
) -> str:
    """The log at `path`: prompts, closed groups, what is under way, the ledger after `change`, dead letters
    of what was malformed, the trainer's positions. Its address."""
    steps = answered() if steps is None else steps
    flat = [record for records in steps for record in records]
    ledger, admissions = answer(steps)
    async with open_bus(f"sqlite:{path}", clock=ManualClock(START_MS)) as bus:
        await bus.create_topics(list(TOPICS.values()))
        prompts = [prompt(number) for number in sorted({int(x.group_id[-7:]) for x in [*flat, *unread]})]
        rest = under_way() if others is None else others
        letters = [_letter(entry, error) for found in admissions for entry, error in found.malformed]
        await bus.produce(
            [
                *(message(record) for record in [*prompts, *rest]),
                *(message(record, partition=0) for record in [*flat, *unread]),
                *extra,
                *(message(step) for step in change(ledger)),
                *letters,
            ]
        )
        position = len(flat) if committed is None else committed
        async with bus.transactor("t") as transactor:
            await transactor.commit(
                [], group=f"trainer-{RUN}", positions={TopicPartition("experience", 0): position}
            )
    return f"sqlite:{path}"


def message(record: r.Record, *, partition: int | None = None) -> Message:
    key = getattr(record, "group_id", RUN)
    topic = next(topic.name for topic in TOPICS.values() if type(record) in topic.records)
    value, headers = encode(record, source="test", now_ms=START_MS)
    return Message(topic, key.encode(), value, headers, partition)


def _letter(entry: Entry, error: WireError) -> Message:
    """What the trainer writes of a record that it can't handle."""
    place = entry.consumed
    key = place.group_id.encode()
    delivery = Delivery(place.topic, place.partition, place.offset, START_MS, key, b"", ())
    return dead_letter(delivery, error, by="trainer", now_ms=START_MS)


def made(path: Path, **options: object) -> str:
    return asyncio.run(write(path, **options))  # type: ignore[arg-type]

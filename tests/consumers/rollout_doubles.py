"""Doubles for worker tests: the real harness and the real log, a model whose words are scripted, a sandbox
whose verdict is scripted.

The task's hole is `return a <fill> b`; `+` passes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from headrace.bus import open_bus
from headrace.bus.protocol import Bus, Message, TopicPartition, partition_of
from headrace.clock import SystemClock
from headrace.consumers.arena import Arena
from headrace.envs.checks import Check, Outcome
from headrace.envs.config import EnvConfig
from headrace.envs.sandbox import Job
from headrace.envs.tasks import Task
from headrace.errors import ConfigError
from headrace.policy import dialogue, tokenizer
from headrace.rpc.generation import Completion, Generation
from headrace.streams.experience import ExperienceJoin
from headrace.streams.fold import Fold
from headrace.streams.processor import Event
from headrace.wire.codec import decode, encode
from headrace.wire.records import Experience, GroupFailed, Prompt, Record, Reward, RolloutStep, Sampling, Span
from headrace.wire.topics import PROMPTS, REWARDS, ROLLOUT_STEPS, TOPICS

LAYERS, TOP_K = 2, 1
WAIT_S = 60.0
MARKS = {name: 256 + i for i, name in enumerate(tokenizer.SPECIAL)}


class Bytes:
    """A codec of one token a byte, for ASCII."""

    special = MARKS

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        names = {mark: name for name, mark in MARKS.items()}
        return "".join(names.get(token) or chr(token) for token in ids)


CODEC = Bytes()


class OneTask:
    """Knows every task but `unknown`."""

    task_ids = ("f:operator:1-2", "g:operator:1-2", "f:operator:3-4")

    def task(self, task_id: str) -> Task:
        if task_id == "unknown":
            raise ConfigError(f"task set train: no task {task_id!r}")
        return Task(
            task_id=task_id,
            split="train",
            kind="operator",
            distribution="d",
            module="m",
            function="f",
            prefix="def f ( a , b ) :\n\treturn a",
            suffix=" b",
            fill=" +",
            checks=(Check((), "f(1, 2)", "3\n"),),
        )


class Verdicts:
    """A sandbox: a program with `+` passes; the first `faults` jobs raise what they are told to."""

    def __init__(self, faults: Sequence[Exception] = ()) -> None:
        self.faults = list(faults)
        self.jobs = 0

    async def run(self, job: Job) -> list[Outcome]:
        self.jobs += 1
        if self.faults:
            raise self.faults.pop(0)
        return [
            Outcome("passed")
            if "+" in program
            else Outcome("failed", (0,), "-1", unmet_visible=0, got_visible="-1")
            for program in job.candidates
        ]

    def describe(self) -> str:
        return "scripted"


def arena(sandbox: Verdicts | None = None, config: EnvConfig | None = None) -> Arena:
    return Arena(config or EnvConfig(), OneTask(), CODEC, sandbox or Verdicts())  # type: ignore[arg-type]


def call(fill: str) -> tuple[int, ...]:
    return tuple(dialogue.call_tokens(CODEC, fill))


def completed(request: Generation, member: int, tokens: tuple[int, ...], version: int = 0) -> Completion:
    """What an engine would answer, with routes whose value is their token's position."""
    own = next(s.own_tokens for s in request.sequences if s.member == member)
    fed = len(request.prefix_tokens) + len(own) + len(tokens) - 1
    return Completion(
        member=member,
        tokens=tokens,
        logp=tuple(-0.5 for _ in tokens),
        finish="stop",
        spans=(Span(start=0, end=len(tokens), weights_version=version),),
        weights_version=version,
        routes=bytes(position % 256 for position in range(fed) for _ in range(LAYERS * TOP_K)),
        routes_shape=(fed, LAYERS, TOP_K),
        started_ms=1,
        ended_ms=2,
    )


Says = Callable[[Generation, int], Awaitable[tuple[int, ...]]]


class Model:
    """Answers each member by `says(request, member)`; counts requests by group."""

    def __init__(self, says: Says | None = None) -> None:
        self._says = says or plus
        self.requests: list[Generation] = []

    async def generate(self, request: Generation, *, timeout_s: float) -> list[Completion]:
        self.requests.append(request)
        return [
            completed(request, item.member, await self._says(request, item.member))
            for item in request.sequences
        ]


async def plus(request: Generation, member: int) -> tuple[int, ...]:
    """Members of an even number are right at once, the others at their second try."""
    second = bool(request.sequences[0].own_tokens)
    return call("+" if member % 2 == 0 or second else "-")


def prompt(number: int, run: str = "r", **changes: object) -> Prompt:
    now_ms = SystemClock().now_ms()
    fields: dict[str, object] = {
        "run": run,
        "group_id": f"{run}-{number:07d}",
        "env": "doctest",
        "task_id": "t",
        "seed": number,
        "group_size": 2,
        "sampling": Sampling(),
        "components": {"tests": 1.0, "format": 0.1},
        "weights_version": 0,
        "admitted_ms": now_ms,
        "deadline_ms": now_ms + 60_000,
    }
    return Prompt(**(fields | changes))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def a_bus(address: str = "sqlite::memory:", session_ms: int = 60_000) -> AsyncIterator[Bus]:
    async with open_bus(address, session_ms=session_ms) as bus:
        await bus.create_topics(list(TOPICS.values()))
        yield bus


async def issue(bus: Bus, *prompts: Prompt, partition: int | None = None) -> dict[TopicPartition, int]:
    """Puts prompts on the log; the positions behind the last one of each partition."""
    positions: dict[TopicPartition, int] = {}
    for item in prompts:
        value, headers = encode(item, source="test", now_ms=0)
        key = item.group_id.encode()
        [offset] = await bus.produce([Message(PROMPTS.name, key, value, headers, partition)])
        place = partition_of(key, PROMPTS.partitions) if partition is None else partition
        positions[TopicPartition(PROMPTS.name, place)] = offset + 1
    return positions


async def on_log(bus: Bus, topic: str) -> list[Record]:
    found: list[Record] = []
    begins, ends = await bus.begins([topic]), await bus.ends([topic])
    for tp, end in ends.items():
        async for delivery in bus.read_range(tp, begins[tp], end):
            assert delivery.value is not None
            found.append(decode(topic, delivery.value, delivery.headers))
    return found


async def steps(bus: Bus, run: str = "r") -> list[RolloutStep]:
    found = await on_log(bus, ROLLOUT_STEPS.name)
    return [record for record in found if isinstance(record, RolloutStep) and record.run == run]


async def failures(bus: Bus, run: str = "r") -> list[GroupFailed]:
    found = await on_log(bus, ROLLOUT_STEPS.name)
    return [record for record in found if isinstance(record, GroupFailed) and record.run == run]


async def rewards(bus: Bus, run: str = "r") -> list[Reward]:
    found = await on_log(bus, REWARDS.name)
    return [record for record in found if isinstance(record, Reward) and record.run == run]


async def whole_groups(bus: Bus, run: str = "r") -> dict[str, set[int]]:
    """Attempts, by group, of which every member's last step and both components are on the log."""
    ended = {(s.group_id, s.attempt, s.member) for s in await steps(bus, run) if s.last}
    scored = {(r.group_id, r.attempt, r.member, r.component) for r in await rewards(bus, run)}
    whole: dict[str, set[int]] = {}
    for group_id, attempt in {(g, a) for g, a, _ in ended}:
        if all((group_id, attempt, m) in ended for m in (0, 1)) and all(
            (group_id, attempt, m, c) in scored for m in (0, 1) for c in ("tests", "format")
        ):
            whole.setdefault(group_id, set()).add(attempt)
    return whole


async def joined(bus: Bus, run: str = "r", *, now_ms: int = 0) -> list[Experience]:
    """What the experience join makes of the log by `now_ms`, in the order of closing."""
    fold = Fold(ExperienceJoin())
    events = []
    for topic in (PROMPTS.name, ROLLOUT_STEPS.name, REWARDS.name):
        begins, ends = await bus.begins([topic]), await bus.ends([topic])
        for tp, end in ends.items():
            async for d in bus.read_range(tp, begins[tp], end):
                if (d.key or b"").startswith(run.encode()):
                    record = decode(topic, d.value or b"", d.headers)
                    events.append(Event(topic, d.partition, d.offset, d.timestamp_ms, record))
    for event in sorted(events, key=lambda event: event.at_ms):
        fold.apply(event)
    while fold.advance(now_ms):
        pass
    return [output.record for output in fold.drain().outputs if isinstance(output.record, Experience)]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await holds():  # noqa: ASYNC110 - the log tells no event
            await asyncio.sleep(0.01)

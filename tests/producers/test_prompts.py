"""The prompt feed: order, bound, restarts, fencing. On the embedded log."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bus import open_bus
from headrace.bus.protocol import Bus, Message, Positions, Transactor
from headrace.clock import ManualClock
from headrace.config import RunConfig
from headrace.envs.config import EnvConfig
from headrace.errors import BusUnavailable, ConfigError, Fenced
from headrace.producers import prompts
from headrace.producers.config import PromptsConfig
from headrace.wire.codec import decode, encode
from headrace.wire.records import Consumed, Prompt, Record, TrainStep, WeightsPublished
from headrace.wire.topics import DEAD_LETTERS, PROMPTS, TOPICS, TRAIN_STEPS, WEIGHTS

TASKS = [f"task{i}" for i in range(10)]
RUN = RunConfig(name="r", seed=7, steps_max=6, groups_per_step=4, group_size=8, lag_versions_max=2)
ENV = EnvConfig()
CONFIG = PromptsConfig(deadline_ms=1_000)


@contextlib.asynccontextmanager
async def a_bus(address: str = "sqlite::memory:") -> AsyncIterator[Bus]:
    async with open_bus(address) as bus:
        await bus.create_topics(list(TOPICS.values()))
        yield bus


async def issued(bus: Bus, run: str = "r") -> list[Prompt]:
    """All prompts of a run on the log, by id."""
    found = []
    for tp, end in (await bus.ends([PROMPTS.name])).items():
        async for delivery in bus.read_range(tp, 0, end):
            assert delivery.value is not None
            record = decode(PROMPTS.name, delivery.value, delivery.headers)
            if isinstance(record, Prompt) and record.run == run:
                found.append(record)
    return sorted(found, key=lambda prompt: prompt.group_id)


async def until(holds: Callable[[], Awaitable[bool]], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():  # noqa: ASYNC110 - the log tells no event
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def feeding(bus: Bus, run: RunConfig = RUN, config: PromptsConfig = CONFIG) -> AsyncIterator[None]:
    """A feed that runs beside the test, stopped at its end."""
    stop = asyncio.Event()
    task = asyncio.create_task(prompts.run(bus, run, config, stop, env=ENV, task_ids=TASKS))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


async def has(bus: Bus, count: int) -> None:
    await until(lambda: _at_least(bus, count))
    assert len(await issued(bus)) == count


async def _at_least(bus: Bus, count: int) -> bool:
    return len(await issued(bus)) >= count


async def put(bus: Bus, topic: str, record: Record) -> None:
    value, headers = encode(record, source="test", now_ms=0)
    await bus.produce([Message(topic, b"r", value, headers)])


def published(version: int, run: str = "r") -> WeightsPublished:
    return WeightsPublished(
        run=run,
        version=version,
        root="",
        step=version,
        manifest_uri="",
        manifest_sha256="",
        encodings=(),
        published_ms=0,
    )


def trained(step: int, group_ids: Sequence[str] = ()) -> TrainStep:
    return TrainStep(
        run="r",
        step=step,
        version_from=step - 1,
        version_to=step,
        consumed=tuple(
            Consumed(topic="experience", partition=0, offset=i, group_id=g) for i, g in enumerate(group_ids)
        ),
        positions={},
        admitted=(),
        drops=(),
        config="",
        config_sha256="",
        seed=0,
        code="",
        libraries={},
        threads=1,
        kernel_probe="",
        metrics={},
        root_before="",
        root_after="",
        started_ms=0,
        ended_ms=0,
    )


def ids(count: int) -> list[str]:
    return [f"r-{i:07d}" for i in range(count)]


def test_order_is_shuffled_epochs() -> None:
    """Each epoch holds every task once, no two epochs are in the same order, and the seed fixes both."""
    order = prompts.TaskOrder(TASKS, seed=7)
    first, second = [order[i] for i in range(10)], [order[i] for i in range(10, 20)]
    assert sorted(first) == sorted(second) == TASKS
    assert first != second != TASKS
    assert [prompts.TaskOrder(TASKS[::-1], seed=7)[i] for i in range(10)] == first
    assert [prompts.TaskOrder(TASKS, seed=8)[i] for i in range(10)] != first


def test_order_is_for_ever() -> None:
    """A run that goes on under a later release goes on in the same order."""
    order = prompts.TaskOrder(TASKS, seed=7)
    assert [order[i] for i in (0, 1, 2, 10)] == ["task1", "task2", "task6", "task4"]


def test_no_tasks() -> None:
    """An empty task set is refused, with the place."""
    with pytest.raises(ConfigError, match=r"^prompts: expected at least one task"):
        prompts.TaskOrder([], seed=0)


@pytest.mark.parametrize(("version", "count"), [(0, 12), (1, 16), (2, 20), (3, 24), (4, 24), (9, 24)])
def test_bound(version: int, count: int) -> None:
    """(lag 2 + version + 1) x 4 groups a step, and never more than 6 steps x 4."""
    assert prompts.admitted(RUN, version) == count


def test_counter_of() -> None:
    """Ids of runs whose name begins like ours are not ours."""
    assert prompts.counter_of("r", "r-0000041") == 41
    assert prompts.counter_of("r", "r-12345678") == 12345678
    assert prompts.counter_of("r", "r-0000001-0000041") is None
    assert prompts.counter_of("r", "rr-0000041") is None
    assert prompts.counter_of("a.c", "abc-0000041") is None


def test_feed_keeps_the_bound() -> None:
    """12 prompts before any step, 16 once version 1 is announced; the feed ends by itself with the 24th."""

    async def case() -> None:
        async with a_bus() as bus:
            feed = asyncio.create_task(
                prompts.run(bus, RUN, CONFIG, asyncio.Event(), env=ENV, task_ids=TASKS)
            )
            await has(bus, 12)
            await put(bus, WEIGHTS.name, published(0))
            await put(bus, WEIGHTS.name, published(7, run="other"))
            await put(bus, WEIGHTS.name, published(1))
            await has(bus, 16)
            await put(bus, TRAIN_STEPS.name, trained(2))
            await has(bus, 20)
            await put(bus, TRAIN_STEPS.name, trained(5))
            await asyncio.wait_for(feed, 10)
            assert [p.group_id for p in await issued(bus)] == ids(24)
            assert [p.weights_version for p in await issued(bus)] == [0] * 12 + [1] * 4 + [2] * 4 + [5] * 4

    asyncio.run(case())


def test_prompt_fields() -> None:
    """A prompt carries the run's and the feed's settings, the deadline by the clock, and a seed of its
    own."""

    async def case() -> None:
        async with a_bus() as bus:
            run = msgspec.structs.replace(RUN, steps_max=1)
            config = PromptsConfig(deadline_ms=500, components={"tests": 2.0})
            await prompts.run(
                bus, run, config, asyncio.Event(), env=ENV, task_ids=TASKS, clock=ManualClock(1_000_000)
            )
            found = await issued(bus)
            assert [(p.admitted_ms, p.deadline_ms) for p in found] == [(1_000_000, 1_000_500)] * 4
            assert [p.task_id for p in found] == [prompts.TaskOrder(TASKS, 7)[i] for i in range(4)]
            assert {p.group_size for p in found} == {8}
            assert found[0].components == {"tests": 2.0}
            assert len({p.seed for p in found}) == 4

    asyncio.run(case())


def test_restart_goes_on() -> None:
    """A feed started again issues nothing that is out already, and skips nothing."""

    async def case() -> None:
        async with a_bus() as bus:
            async with feeding(bus):
                await has(bus, 12)
            await put(bus, WEIGHTS.name, published(2))
            async with feeding(bus):
                await has(bus, 20)
            assert [p.group_id for p in await issued(bus)] == ids(20)
            order = prompts.TaskOrder(TASKS, RUN.seed)
            assert [p.task_id for p in await issued(bus)] == [order[i] for i in range(20)]

    asyncio.run(case())


def test_prompts_deleted_by_retention() -> None:
    """Where the prompts themselves are gone, the ledger says how far the run has come."""

    async def case() -> None:
        async with a_bus() as bus:
            await put(bus, TRAIN_STEPS.name, trained(2, ids(8)))
            async with feeding(bus):
                await until(lambda: _at_least(bus, 12))
            assert [p.group_id for p in await issued(bus)] == ids(20)[8:]

    asyncio.run(case())


def test_two_runs_on_one_log() -> None:
    """Each run has its own counter and its own bound."""

    async def case() -> None:
        async with a_bus() as bus:
            other = msgspec.structs.replace(RUN, name="q", groups_per_step=2)
            async with feeding(bus), feeding(bus, other):
                await has(bus, 12)
                await until(lambda: _has_run(bus, "q", 6))
            assert [p.group_id for p in await issued(bus, "q")] == [f"q-{i:07d}" for i in range(6)]

    asyncio.run(case())


async def _has_run(bus: Bus, run: str, count: int) -> bool:
    return len(await issued(bus, run)) == count


def test_second_feed_fences_the_first() -> None:
    """The older feed of a run ends as fenced, with nothing issued twice."""

    async def case() -> None:
        async with a_bus() as bus:
            old = asyncio.create_task(prompts.run(bus, RUN, CONFIG, asyncio.Event(), env=ENV, task_ids=TASKS))
            await has(bus, 12)
            async with feeding(bus):
                await put(bus, WEIGHTS.name, published(1))
                await has(bus, 16)
                with pytest.raises(Fenced):
                    await asyncio.wait_for(old, 10)
            assert [p.group_id for p in await issued(bus)] == ids(16)

    asyncio.run(case())


class Doubtful:
    """A bus whose first commit reaches the log, though its answer is lost."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._lost = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._bus, name)

    @contextlib.asynccontextmanager
    async def transactor(self, transactional_id: str) -> AsyncIterator["Doubtful"]:
        async with self._bus.transactor(transactional_id) as self._inner:
            yield self

    _inner: Transactor

    async def commit(
        self, messages: Sequence[Message], *, group: str | None = None, positions: Positions | None = None
    ) -> list[int]:
        offsets = await self._inner.commit(messages, group=group, positions=positions)
        if not self._lost:
            self._lost = True
            raise BusUnavailable("test: no answer")
        return offsets


def test_commit_of_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose answer was lost is looked up on the log, not sent again."""
    monkeypatch.setattr(prompts, "RETRY_S", 0.01)

    async def case() -> None:
        async with a_bus() as bus:
            doubtful: Any = Doubtful(bus)
            async with feeding(doubtful, config=PromptsConfig(batch_max=5)):
                await has(bus, 12)
            assert [p.group_id for p in await issued(bus)] == ids(12)

    asyncio.run(case())


class Away(Doubtful):
    """A bus that never answers."""

    def transactor(self, transactional_id: str):  # type: ignore[no-untyped-def]
        raise BusUnavailable("test: away")


def test_log_away_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed ends with the error of the log once it has been away for longer than the bound."""
    monkeypatch.setattr(prompts, "RETRY_S", 0.01)

    async def case() -> None:
        async with a_bus() as bus:
            config = PromptsConfig(outage_ms_max=30)
            away: Any = Away(bus)
            with pytest.raises(BusUnavailable, match="test: away"):
                await asyncio.wait_for(
                    prompts.run(away, RUN, config, asyncio.Event(), env=ENV, task_ids=TASKS), 10
                )

    asyncio.run(case())


def test_undecodable_announcement() -> None:
    """Bytes that are no record go to the dead letters, and the feed goes on."""

    async def case() -> None:
        async with a_bus() as bus, feeding(bus):
            await bus.produce([Message(WEIGHTS.name, b"r", b"\xc1 no record", ())])
            await put(bus, WEIGHTS.name, published(1))
            await has(bus, 16)
            assert sum((await bus.ends([DEAD_LETTERS.name])).values()) >= 1

    asyncio.run(case())


CHILD = """
import asyncio, sys
from headrace.bus import open_bus
from headrace.config import RunConfig
from headrace.envs.config import EnvConfig
from headrace.producers import prompts
from headrace.producers.config import PromptsConfig

async def main():
    async with open_bus(sys.argv[1]) as bus:
        run = RunConfig(name="r", seed=7, steps_max=100, groups_per_step=4, lag_versions_max=99)
        config, stop = PromptsConfig(batch_max=1), asyncio.Event()
        await prompts.run(bus, run, config, stop, env=EnvConfig(), task_ids=["a", "b", "c"])

asyncio.run(main())
"""


def test_killed(tmp_path: Path) -> None:
    """Killed with SIGKILL twice between its transactions, the feed has issued every prompt once in the
    end."""
    address = f"sqlite:{tmp_path / 'bus.sqlite'}"

    async def case() -> None:
        async with a_bus(address) as bus:
            for count in (40, 120, 400):
                child = subprocess.Popen(  # noqa: ASYNC220 - a fork, not a wait
                    [sys.executable, "-c", CHILD, address], env=os.environ | {"OMP_NUM_THREADS": "1"}
                )
                try:
                    await until(lambda count=count: _at_least(bus, count))  # type: ignore[misc]
                finally:
                    child.send_signal(signal.SIGKILL)
                    child.wait(10)
            assert [p.group_id for p in await issued(bus)] == ids(400)

    asyncio.run(case())

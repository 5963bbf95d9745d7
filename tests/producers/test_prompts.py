"""The prompt feed: order, bound, restarts, fencing; what touches the log also on Kafka."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bus import open_bus, outage
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


@pytest.fixture(params=["sqlite", pytest.param("kafka", marks=pytest.mark.kafka)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "kafka":
        return f"kafka:{request.getfixturevalue('kafka')}"
    return f"sqlite:{tmp_path / 'bus.sqlite'}"


@pytest.fixture
def run() -> RunConfig:
    """A run of this test alone: a broker is shared."""
    return msgspec.structs.replace(RUN, name=uuid.uuid4().hex[:8])


async def issued(bus: Bus, run: str = "r") -> list[Prompt]:
    """All prompts of a run on the log, by id."""
    found = []
    for tp, end in (await bus.ends([PROMPTS.name])).items():
        async for delivery in bus.read_range(tp, 0, end):
            if prompts.counter_of(run, (delivery.key or b"").decode()) is not None:
                record = decode(PROMPTS.name, delivery.value or b"", delivery.headers)
                assert isinstance(record, Prompt)
                found.append(record)
    return sorted(found, key=lambda prompt: prompt.group_id)


async def until(holds: Callable[[], Awaitable[bool]], within_s: float = 60.0) -> None:
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
        await asyncio.wait_for(task, 60)


async def has(bus: Bus, count: int, run: str = "r") -> None:
    await until(lambda: _at_least(bus, count, run))
    assert len(await issued(bus, run)) == count


async def _at_least(bus: Bus, count: int, run: str = "r") -> bool:
    return len(await issued(bus, run)) >= count


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


def trained(step: int, group_ids: Sequence[str] = (), run: str = "r") -> TrainStep:
    return TrainStep(
        run=run,
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


def ids(count: int, run: str = "r") -> list[str]:
    return [f"{run}-{i:07d}" for i in range(count)]


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


def test_feed_keeps_the_bound(address: str, run: RunConfig) -> None:
    """12 prompts before any step, 16 once version 1 is announced; the feed ends by itself with the 24th."""

    async def case() -> None:
        async with a_bus(address) as bus:
            feed = asyncio.create_task(
                prompts.run(bus, run, CONFIG, asyncio.Event(), env=ENV, task_ids=TASKS)
            )
            await has(bus, 12, run.name)
            await put(bus, WEIGHTS.name, published(0, run.name))
            await put(bus, WEIGHTS.name, published(7, run="other"))
            await put(bus, WEIGHTS.name, published(1, run.name))
            await has(bus, 16, run.name)
            await put(bus, TRAIN_STEPS.name, trained(2, run=run.name))
            await has(bus, 20, run.name)
            await put(bus, TRAIN_STEPS.name, trained(5, run=run.name))
            await asyncio.wait_for(feed, 60)
            found = await issued(bus, run.name)
            assert [p.group_id for p in found] == ids(24, run.name)
            assert [p.weights_version for p in found] == [0] * 12 + [1] * 4 + [2] * 4 + [5] * 4

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


def test_restart_goes_on(address: str, run: RunConfig) -> None:
    """A feed started again issues nothing that is out already, and skips nothing."""

    async def case() -> None:
        async with a_bus(address) as bus:
            async with feeding(bus, run):
                await has(bus, 12, run.name)
            await put(bus, WEIGHTS.name, published(2, run.name))
            async with feeding(bus, run):
                await has(bus, 20, run.name)
            found = await issued(bus, run.name)
            assert [p.group_id for p in found] == ids(20, run.name)
            order = prompts.TaskOrder(TASKS, run.seed)
            assert [p.task_id for p in found] == [order[i] for i in range(20)]

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


def test_second_feed_fences_the_first(address: str, run: RunConfig) -> None:
    """While a run goes on, a second feed ends the first as fenced; together they issue every prompt once."""

    async def case() -> None:
        async with a_bus(address) as bus:
            endless = msgspec.structs.replace(run, steps_max=10_000)
            old = asyncio.create_task(
                prompts.run(bus, endless, CONFIG, asyncio.Event(), env=ENV, task_ids=TASKS)
            )
            await has(bus, 12, run.name)
            async with feeding(bus, endless):
                version = 0
                async with asyncio.timeout(60):
                    while not old.done():
                        version += 1
                        await put(bus, WEIGHTS.name, published(version, run.name))
                        await has(bus, 12 + 4 * version, run.name)
                with pytest.raises(Fenced):
                    await old
            found = await issued(bus, run.name)
            assert [p.group_id for p in found] == ids(12 + 4 * version, run.name)

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
    monkeypatch.setattr(outage, "RETRY_S", 0.01)

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
    monkeypatch.setattr(outage, "RETRY_S", 0.01)

    async def case() -> None:
        async with a_bus() as bus:
            config = PromptsConfig(outage_ms_max=30)
            away: Any = Away(bus)
            with pytest.raises(BusUnavailable, match="test: away"):
                await asyncio.wait_for(
                    prompts.run(away, RUN, config, asyncio.Event(), env=ENV, task_ids=TASKS), 60
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


def test_idle_feed_raises_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """A feed that waits for a version for longer than `alarm_ms` says so, once, until it issues again."""

    async def case() -> None:
        async with a_bus() as bus, feeding(bus, config=PromptsConfig(alarm_ms=50)):
            await until(lambda: _alarms(caplog, 1))
            await put(bus, WEIGHTS.name, published(1))
            await until(lambda: _alarms(caplog, 2))

    asyncio.run(case())
    first, _ = (record.message for record in caplog.records if "alarm" in record.message)
    assert first.startswith("alarm kind=feed_idle issued=12 version=0 idle_ms=")


async def _alarms(caplog: pytest.LogCaptureFixture, count: int) -> bool:
    return sum("alarm" in record.message for record in caplog.records) == count


CHILD = """
import asyncio, sys
from headrace.bus import open_bus
from headrace.config import RunConfig
from headrace.envs.config import EnvConfig
from headrace.producers import prompts
from headrace.producers.config import PromptsConfig

async def main():
    async with open_bus(sys.argv[1]) as bus:
        last = int(sys.argv[3])
        run = RunConfig(name=sys.argv[2], steps_max=last, groups_per_step=1, lag_versions_max=last)
        config, stop = PromptsConfig(batch_max=1), asyncio.Event()
        await prompts.run(bus, run, config, stop, env=EnvConfig(), task_ids=["a", "b", "c"])

asyncio.run(main())
"""


def test_killed(address: str, run: RunConfig) -> None:
    """Killed with SIGKILL between its transactions, twice, the feed has issued every prompt once in the
    end."""
    counts = (8, 20, 60) if address.startswith("kafka") else (40, 120, 400)

    async def case() -> None:
        async with a_bus(address) as bus:
            for count in counts:
                child = subprocess.Popen([sys.executable, "-c", CHILD, address, run.name, str(counts[-1])])  # noqa: ASYNC220 - a fork
                try:
                    await until(lambda count=count: _at_least(bus, count, run.name))  # type: ignore[misc]
                finally:
                    child.send_signal(signal.SIGKILL)
                    child.wait(60)
            assert [p.group_id for p in await issued(bus, run.name)] == ids(counts[-1], run.name)

    asyncio.run(case())

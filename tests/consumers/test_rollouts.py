"""The rollout worker on the embedded log: what it takes, writes, commits, gives up, and leaves to others."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rollout_doubles import (
    Model,
    Verdicts,
    a_bus,
    arena,
    call,
    failures,
    issue,
    joined,
    on_log,
    plus,
    prompt,
    rewards,
    steps,
    until,
    whole_groups,
)

from headrace.bus.protocol import Bus, Message, TopicPartition
from headrace.clock import Clock, ManualClock
from headrace.config import RunConfig
from headrace.consumers import durable, rollouts
from headrace.consumers.config import RolloutsConfig
from headrace.consumers.rollouts import Worker, group_of
from headrace.errors import BusUnavailable, InferenceUnavailable, SandboxError
from headrace.rpc.generation import Generation
from headrace.wire.records import DeadLetter
from headrace.wire.topics import DEAD_LETTERS, PROMPTS, REWARDS, ROLLOUT_STEPS

RUN = RunConfig(name="r", group_size=2)
CONFIG = RolloutsConfig(retry_ms=1, retry_ms_max=2, drain_ms=200, groups_in_flight=4)
GROUP = group_of(RUN)


@contextlib.asynccontextmanager
async def working(
    bus: Bus,
    model: Model | None = None,
    sandbox: Verdicts | None = None,
    config: RolloutsConfig = CONFIG,
    name: str = "w",
    run: RunConfig = RUN,
    clock: Clock | None = None,
    stable: bool = True,
) -> AsyncIterator[Worker]:
    """A worker beside the test, stopped at its end."""
    worker = Worker(bus, run, config, [model or Model()], arena(sandbox), name, clock, stable=stable)
    stop = asyncio.Event()
    task = asyncio.create_task(worker.serve(stop))
    try:
        yield worker
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


async def all_committed(bus: Bus) -> bool:
    """Whether every prompt on the log is committed."""
    committed = await bus.committed(GROUP, [PROMPTS.name])
    ends = await bus.ends([PROMPTS.name])
    return all(committed.get(tp, 0) == end for tp, end in ends.items() if end)


def hanging(group_id: str, held: asyncio.Event) -> Model:
    """A model that keeps silent about one group until `held` is set."""

    async def says(request: Generation, member: int) -> tuple[int, ...]:
        if request.group_id == group_id:
            await held.wait()
        return await plus(request, member)

    return Model(says)


def test_groups_are_rolled_out() -> None:
    """Every prompt gives one whole group: a step for each turn, both rewards for each member, all
    committed."""

    async def case() -> None:
        async with a_bus() as bus:
            await issue(bus, *(prompt(i) for i in range(12)))
            async with working(bus):
                await until(lambda: all_committed(bus))
            whole = await whole_groups(bus)
            assert sorted(whole) == [f"r-{i:07d}" for i in range(12)]
            assert all(len(attempts) == 1 for attempts in whole.values())
            assert len(await steps(bus)) == 12 * 3  # member 0 needs one turn, member 1 two
            values = {(r.member, r.component): r.value for r in await rewards(bus)}
            assert values == {(0, "tests"): 1.0, (0, "format"): 1.0, (1, "tests"): 0.5, (1, "format"): 1.0}
            assert len(await rewards(bus)) == 12 * 4
            closed = await joined(bus)
            assert [(e.closed, e.missing) for e in closed] == [("complete", ())] * 12
            assert {tuple(round(r.reward or 0, 6) for r in e.rollouts) for e in closed} == {(1.1, 0.6)}

    asyncio.run(case())


def test_stable_ids() -> None:
    """The id of a record is made of its group, member, attempt and step or component, nothing else."""

    async def case() -> None:
        async with a_bus() as bus:
            await issue(bus, prompt(1))
            async with working(bus):
                await until(lambda: all_committed(bus))
            attempt = (await steps(bus))[0].attempt
            ids = set()
            for topic in (ROLLOUT_STEPS.name, REWARDS.name):
                for tp, end in (await bus.ends([topic])).items():
                    ids |= {d.header("ce_id") async for d in bus.read_range(tp, 0, end)}
            assert ids == {
                f"r-0000001/{rest}".encode()
                for rest in (
                    f"0/{attempt}/0",
                    f"1/{attempt}/0",
                    f"1/{attempt}/1",
                    *(f"{m}/{attempt}/{c}" for m in (0, 1) for c in ("tests", "format")),
                )
            }

    asyncio.run(case())


def test_nothing_is_committed_past_an_unfinished_group() -> None:
    """The first of five prompts of a partition is slow: the others are out, nothing is committed until it
    is."""

    async def case() -> None:
        async with a_bus() as bus:
            held = asyncio.Event()
            await issue(bus, *(prompt(i) for i in range(5)), partition=2)
            async with working(bus, hanging("r-0000000", held)):
                await until(lambda: _whole(bus, 4))
                assert (await bus.committed(GROUP, [PROMPTS.name])).get(TopicPartition("prompts", 2), 0) == 0
                held.set()
                await until(lambda: all_committed(bus))
            assert len(await whole_groups(bus)) == 5

    asyncio.run(case())


async def _whole(bus: Bus, count: int, run: str = "r") -> bool:
    return len(await whole_groups(bus, run)) == count


def test_bounded_concurrency() -> None:
    """Never more than `groups_in_flight` groups are asked of the model at a time, and that many are."""

    async def case() -> None:
        now, most = 0, 0

        async def says(request: Generation, member: int) -> tuple[int, ...]:
            nonlocal now, most
            now, most = now + 1, max(most, now + 1)
            await asyncio.sleep(0)
            now -= 1
            return call("+")

        async with a_bus() as bus:
            await issue(bus, *(prompt(i) for i in range(20)))
            async with working(bus, Model(says)):
                await until(lambda: all_committed(bus))
            assert most == CONFIG.groups_in_flight

    asyncio.run(case())


def test_two_workers_share() -> None:
    """Two workers divide the partitions: prompts that come later reach both, and each is rolled out."""

    async def case() -> None:
        async with a_bus() as bus:
            one, two = Model(), Model()
            async with working(bus, one, name="one"), working(bus, two, name="two"):
                issued = 0
                async with asyncio.timeout(20):
                    while not (one.requests and two.requests):
                        await issue(bus, *(prompt(issued + i) for i in range(8)))
                        issued += 8
                        await until(lambda: all_committed(bus))
            assert len(await whole_groups(bus)) == issued

    asyncio.run(case())


def test_worker_that_leaves_for_good() -> None:
    """A worker without a stable name gives its partitions away when it ends, not a session later."""

    async def case() -> None:
        async with a_bus(session_ms=60_000) as bus:
            async with working(bus, name="one", stable=False):
                await issue(bus, *(prompt(i) for i in range(8)))
                await until(lambda: all_committed(bus))
            async with working(bus, name="two", stable=False):
                await issue(bus, *(prompt(i) for i in range(8, 16)))
                await until(lambda: all_committed(bus))

    asyncio.run(case())


def test_partition_goes_and_returns() -> None:
    """Groups of a partition that moves away are dropped here and run there; when it returns, commits go
    on."""

    async def case() -> None:
        async with a_bus() as bus:
            held = asyncio.Event()

            async def says(request: Generation, member: int) -> tuple[int, ...]:
                await held.wait()
                return await plus(request, member)

            first = Model(says)
            for partition in range(4):
                await issue(bus, prompt(partition), partition=partition)
            config = msgspec.structs.replace(CONFIG, groups_in_flight=5)
            async with working(bus, first, config=config, name="one", stable=False) as one:
                await until(lambda: _asked(first, 4))
                async with working(bus, name="two", stable=False):
                    await until(lambda: _whole(bus, 2))
                    await until(lambda: _moved(one, 2))
                held.set()
                for partition in range(4):
                    await issue(bus, prompt(4 + partition), partition=partition)
                await until(lambda: all_committed(bus))
            whole = await whole_groups(bus)
            assert len(whole) == 8 and all(len(attempts) == 1 for attempts in whole.values())

    asyncio.run(case())


def test_slow_group_keeps_its_partitions() -> None:
    """A group that takes four sessions long is asked for once: heart-beats go on, no rebalance."""

    async def case() -> None:
        async with a_bus(session_ms=200) as bus:
            held = asyncio.Event()
            model = hanging("r-0000000", held)
            await issue(bus, prompt(0))
            async with working(bus, model) as worker:
                await until(lambda: _asked(model))
                async with working(bus, model, name="other") as other:
                    asyncio.get_running_loop().call_later(0.8, held.set)
                    await until(lambda: all_committed(bus))
                    moved = worker.counts["moved"]
            assert moved + worker.counts["finished"] == 1
            assert other.counts["finished"] == moved
            assert len(model.requests) == 2 + moved
            assert len((await whole_groups(bus))["r-0000000"]) == 1

    asyncio.run(case())


async def _moved(worker: Worker, groups: int) -> bool:
    return worker.counts["moved"] == groups


async def _asked(model: Model, requests: int = 1) -> bool:
    return len(model.requests) >= requests


def test_sandbox_fails_once() -> None:
    """After a fault of the sandbox the group is tried again under a higher attempt; only that one is
    whole."""

    async def case() -> None:
        async with a_bus() as bus:
            await issue(bus, prompt(1))
            async with working(bus, sandbox=Verdicts([SandboxError("sandbox: died")])):
                await until(lambda: all_committed(bus))
            assert len(await whole_groups(bus)) == 1
            assert await failures(bus) == []

    asyncio.run(case())


def test_sandbox_fails_always() -> None:
    """A sandbox that fails on every attempt: the group is given up with the reason, and nothing is scored."""

    async def case() -> None:
        async with a_bus() as bus:
            await issue(bus, prompt(1), prompt(2))
            sandbox = Verdicts([SandboxError("sandbox: died")] * 6)
            async with working(bus, sandbox=sandbox):
                await until(lambda: all_committed(bus))
            assert sandbox.jobs == 6  # two groups, three attempts
            assert {(f.group_id, f.reason) for f in await failures(bus)} == {
                ("r-0000001", "sandbox: died"),
                ("r-0000002", "sandbox: died"),
            }
            assert await rewards(bus) == [] and await steps(bus) == []
            assert {(e.closed, e.reason, e.rollouts) for e in await joined(bus)} == {
                ("failed", "sandbox: died", ())
            }

    asyncio.run(case())


def test_replica_away_is_not_a_try() -> None:
    """A replica that is away five times in a row costs no attempt: the group is whole when it is back."""

    async def case() -> None:
        left = 5

        async def says(request: Generation, member: int) -> tuple[int, ...]:
            nonlocal left
            if left:
                left -= 1
                raise InferenceUnavailable("replica: away")
            return call("+")

        async with a_bus() as bus:
            await issue(bus, prompt(1))
            async with working(bus, Model(says)):
                await until(lambda: all_committed(bus))
            assert len(await whole_groups(bus)) == 1 and await failures(bus) == []

    asyncio.run(case())


def test_attempts_grow() -> None:
    """Attempts of one group grow even within one millisecond, so that the join can order them."""

    async def case() -> None:
        left = 2

        async def says(request: Generation, member: int) -> tuple[int, ...]:
            nonlocal left
            if request.sequences[0].own_tokens and left:
                left -= 1
                raise InferenceUnavailable("replica: away in the second turn")
            return await plus(request, member)

        async with a_bus() as bus:
            await issue(bus, prompt(1))
            async with working(bus, Model(says), clock=ManualClock(prompt(1).admitted_ms)):
                await until(lambda: all_committed(bus))
            firsts = [s.attempt for s in await steps(bus) if (s.member, s.step) == (1, 0)]
            assert len(firsts) == 3 and firsts == sorted(set(firsts))
            assert (await whole_groups(bus))["r-0000001"] == {firsts[-1]}

    asyncio.run(case())


def test_member_that_never_ends() -> None:
    """A group with a member that never ends stops at its deadline, told as failed; the others are not held
    up."""

    async def case() -> None:
        async with a_bus() as bus:
            short = prompt(0)
            await issue(
                bus,
                msgspec.structs.replace(short, deadline_ms=short.admitted_ms + 400),
                prompt(1),
                partition=0,
            )
            async with working(bus, hanging("r-0000000", asyncio.Event())):
                await until(lambda: all_committed(bus))
            assert [(f.group_id, f.reason) for f in await failures(bus)] == [
                ("r-0000000", "r-0000000: the deadline passed")
            ]
            assert list(await whole_groups(bus)) == ["r-0000001"]

    asyncio.run(case())


def test_not_ours() -> None:
    """Prompts past their deadline, of another run or another region are committed and leave no trace."""

    async def case() -> None:
        async with a_bus() as bus:
            model = Model()
            await issue(bus, prompt(0, deadline_ms=1), prompt(1, run="q"), prompt(2, region="far"))
            async with working(bus, model) as worker:
                await until(lambda: all_committed(bus))
                assert (worker.counts["expired"], worker.counts["foreign"]) == (1, 2)
            assert model.requests == [] and await on_log(bus, ROLLOUT_STEPS.name) == []

    asyncio.run(case())


def test_unknown_task() -> None:
    """A prompt for a task or an environment that is not here is given up at once, with the reason."""

    async def case() -> None:
        async with a_bus() as bus:
            await issue(bus, prompt(0, task_id="unknown"), prompt(1, env="browser"), prompt(2))
            async with working(bus) as worker:
                await until(lambda: all_committed(bus))
                assert worker.counts["retried"] == 0
            reasons = {f.group_id: f.reason for f in await failures(bus)}
            assert reasons == {
                "r-0000000": "task set train: no task 'unknown'",
                "r-0000001": "t: expected the environment 'doctest', got 'browser'",
            }
            assert list(await whole_groups(bus)) == ["r-0000002"]

    asyncio.run(case())


def test_poison() -> None:
    """Bytes that are no prompt go to the dead letters with their place; the groups around them are rolled
    out."""

    async def case() -> None:
        async with a_bus() as bus:
            await issue(bus, prompt(0), partition=1)
            await bus.produce([Message(PROMPTS.name, b"r-x", b"\xc1 no record", (), 1)])
            await issue(bus, prompt(1), partition=1)
            async with working(bus):
                await until(lambda: all_committed(bus))
            assert len(await whole_groups(bus)) == 2
            (letter,) = await on_log(bus, DEAD_LETTERS.name)
            assert isinstance(letter, DeadLetter)
            assert (letter.topic, letter.partition, letter.value) == ("prompts", 1, b"\xc1 no record")

    asyncio.run(case())


def test_stop_lets_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to stop, a worker waits for what ends within the bound, and commits it."""
    monkeypatch.setattr(rollouts, "POLL_MS", 5)

    async def case() -> None:
        async with a_bus() as bus:
            held = asyncio.Event()
            model = hanging("r-0000000", held)
            await issue(bus, prompt(0))
            config = msgspec.structs.replace(CONFIG, drain_ms=5_000)
            async with working(bus, model, config=config):
                await until(lambda: _asked(model))
                asyncio.get_running_loop().call_later(0.3, held.set)
            assert await all_committed(bus)
            assert len(await whole_groups(bus)) == 1

    asyncio.run(case())


def test_stop_abandons_what_does_not_end() -> None:
    """A group that does not end within the bound is left uncommitted; the next worker takes it."""

    async def case() -> None:
        async with a_bus() as bus:
            model = hanging("r-0000001", asyncio.Event())
            await issue(bus, *(prompt(i) for i in range(3)), partition=0)
            async with working(bus, model) as worker:
                await until(lambda: _whole(bus, 2))
            assert worker.counts["abandoned"] == 1
            assert (await bus.committed(GROUP, [PROMPTS.name]))[TopicPartition("prompts", 0)] == 1
            assert await failures(bus) == []
            async with working(bus):
                await until(lambda: all_committed(bus))
            assert len(await whole_groups(bus)) == 3

    asyncio.run(case())


def test_broken_invariant_ends_the_worker() -> None:
    """A fault that is nobody's failure ends the worker, with nothing committed past the prompt it happened
    on."""

    async def case() -> None:
        async def says(request: Generation, member: int) -> tuple[int, ...]:
            raise AssertionError("test: broken")

        async with a_bus() as bus:
            await issue(bus, prompt(0))
            with pytest.raises(AssertionError, match="test: broken"):
                await Worker(bus, RUN, CONFIG, [Model(says)], arena(), "w").serve(asyncio.Event())
            assert await bus.committed(GROUP, [PROMPTS.name]) == {}

    asyncio.run(case())


class Shaky:
    """A bus that refuses the first `refusals` batches."""

    def __init__(self, bus: Bus, refusals: int) -> None:
        self._bus = bus
        self.refusals = refusals

    def __getattr__(self, name: str) -> object:
        return getattr(self._bus, name)

    async def produce(self, messages: Sequence[Message]) -> list[int]:
        if self.refusals:
            self.refusals -= 1
            raise BusUnavailable("test: away")
        return await self._bus.produce(messages)


def test_log_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that the log refuses are sent again, in order; the group is whole at the first attempt."""
    monkeypatch.setattr(durable, "RETRY_S", 0.01)

    async def case() -> None:
        async with a_bus() as bus:
            await issue(bus, prompt(0))
            shaky: Any = Shaky(bus, 3)
            async with working(shaky) as worker:
                await until(lambda: all_committed(bus))
                assert worker.counts["retried"] == 0
            assert len(await whole_groups(bus)) == 1

    asyncio.run(case())


def test_log_away_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that stays away ends the worker with its error, instead of groups that are given up."""
    monkeypatch.setattr(durable, "RETRY_S", 0.01)

    async def case() -> None:
        async with a_bus() as bus:
            await issue(bus, prompt(0))
            config = msgspec.structs.replace(CONFIG, outage_ms_max=1)
            shaky: Any = Shaky(bus, 2)
            with pytest.raises(BusUnavailable, match="test: away"):
                await Worker(shaky, RUN, config, [Model()], arena(), "w").serve(asyncio.Event())
            assert await bus.committed(GROUP, [PROMPTS.name]) == {}

    asyncio.run(case())


@pytest.fixture(params=["sqlite", pytest.param("kafka", marks=pytest.mark.kafka)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "kafka":
        return f"kafka:{request.getfixturevalue('kafka')}"
    return f"sqlite:{tmp_path / 'bus.sqlite'}"


@pytest.fixture
def run() -> RunConfig:
    """A run of this test alone: a broker is shared."""
    return msgspec.structs.replace(RUN, name=uuid.uuid4().hex[:8])


async def committed_to(bus: Bus, run: RunConfig, positions: dict[TopicPartition, int]) -> bool:
    committed = await bus.committed(group_of(run), [PROMPTS.name])
    return all(committed.get(tp, 0) >= position for tp, position in positions.items())


def test_slow_first_group_on_both_buses(address: str, run: RunConfig) -> None:
    """A slow first group: the others behind it are out, nothing is committed past it until it is."""

    async def case() -> None:
        async with a_bus(address, session_ms=1_000) as bus:
            held = asyncio.Event()
            first = await issue(bus, prompt(0, run.name), partition=3)
            positions = await issue(bus, *(prompt(i, run.name) for i in range(1, 4)), partition=3)
            async with working(bus, hanging(f"{run.name}-0000000", held), run=run):
                await until(lambda: _whole(bus, 3, run.name))
                assert not await committed_to(bus, run, first)
                held.set()
                await until(lambda: committed_to(bus, run, positions))
            assert len(await whole_groups(bus, run.name)) == 4

    asyncio.run(case())


def test_killed_in_the_middle_of_a_group(address: str, run: RunConfig) -> None:
    """A worker killed with SIGKILL after the first turn: another takes its prompts, and each group is whole,
    by one attempt above the torn one."""
    victim = Path(__file__).with_name("rollout_victim.py")

    async def case() -> None:
        async with a_bus(address, session_ms=1_000) as bus:
            positions = await issue(bus, *(prompt(i, run.name) for i in range(6)))
            child = subprocess.Popen([sys.executable, victim, address, run.name])  # noqa: ASYNC220 - a fork
            try:
                await until(lambda: _torn(bus, 4, run.name))
            finally:
                child.send_signal(signal.SIGKILL)
                child.wait(10)
            torn = {s.group_id: s.attempt for s in await steps(bus, run.name)}
            async with working(bus, name="heir", run=run):
                await until(lambda: committed_to(bus, run, positions))
            whole = await whole_groups(bus, run.name)
            assert sorted(whole) == [f"{run.name}-{i:07d}" for i in range(6)]
            assert all(len(attempts) == 1 for attempts in whole.values())
            assert all(min(whole[group_id]) > attempt for group_id, attempt in torn.items())
            closed = {e.group_id: (e.closed, e.missing) for e in await joined(bus, run.name)}
            assert closed == dict.fromkeys(whole, ("complete", ()))
            assert {r.attempt for e in await joined(bus, run.name) for r in e.rollouts} == {
                attempt for attempts in whole.values() for attempt in attempts
            }

    asyncio.run(case())


async def _torn(bus: Bus, count: int, run: str) -> bool:
    return len({s.group_id for s in await steps(bus, run)}) >= count


def test_worker_joins_and_leaves(address: str, run: RunConfig) -> None:
    """A second worker joins while groups are under way, and leaves again: every group is whole in the end."""

    async def case() -> None:
        async with a_bus(address, session_ms=1_000) as bus:
            first, second = Model(slowly), Model(slowly)
            async with working(bus, first, name="one", run=run):
                positions = await issue(bus, *(prompt(i, run.name) for i in range(16)))
                await until(lambda: _asked(first))
                async with working(bus, second, name="two", run=run):
                    issued = 16
                    async with asyncio.timeout(30):
                        while not second.requests:
                            more = [prompt(issued + i, run.name) for i in range(4)]
                            positions |= await issue(bus, *more)
                            issued += 4
                            await asyncio.sleep(0.1)
                await until(lambda: committed_to(bus, run, positions), 30)
            assert len(await whole_groups(bus, run.name)) == issued

    asyncio.run(case())


async def slowly(request: Generation, member: int) -> tuple[int, ...]:
    await asyncio.sleep(0.01)
    return await plus(request, member)

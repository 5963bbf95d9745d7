"""The rollout worker on both buses: a slow group, a kill in the middle, workers that come and go."""

import asyncio
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest
from rollout_doubles import (
    WAIT_S,
    Model,
    a_bus,
    issue,
    joined,
    plus,
    prompt,
    steps,
    until,
    whole_groups,
)
from rollout_working import RUN, asked, hanging, whole_count, working

from headrace.bus.protocol import Bus, TopicPartition
from headrace.config import RunConfig
from headrace.consumers.rollouts import group_of
from headrace.rpc.generation import Generation
from headrace.wire.topics import PROMPTS


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
        async with a_bus(address, session_ms=10_000) as bus:
            held = asyncio.Event()
            first = await issue(bus, prompt(0, run.name), partition=3)
            positions = await issue(bus, *(prompt(i, run.name) for i in range(1, 4)), partition=3)
            async with working(bus, hanging(f"{run.name}-0000000", held), run=run):
                await until(lambda: whole_count(bus, 3, run.name))
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
        async with a_bus(address, session_ms=10_000) as bus:
            positions = await issue(bus, *(prompt(i, run.name) for i in range(6)))
            child = subprocess.Popen([sys.executable, victim, address, run.name])  # noqa: ASYNC220 - a fork
            try:
                await until(lambda: _torn(bus, 4, run.name))
            finally:
                child.send_signal(signal.SIGKILL)
                child.wait(WAIT_S)
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
                await until(lambda: asked(first))
                async with working(bus, second, name="two", run=run):
                    issued = 16
                    async with asyncio.timeout(WAIT_S):
                        while not second.requests:
                            more = [prompt(issued + i, run.name) for i in range(4)]
                            positions |= await issue(bus, *more)
                            issued += 4
                            await asyncio.sleep(0.1)
                await until(lambda: committed_to(bus, run, positions))
            assert len(await whole_groups(bus, run.name)) == issued

    asyncio.run(case())


def test_position_that_is_not_in_the_log(
    address: str, run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The committed position lies past the end, as after the topic was made anew: the worker raises an alarm,
    goes on at the oldest prompt that there is, and the position is right again."""

    async def case() -> None:
        async with a_bus(address, session_ms=10_000) as bus:
            positions = await issue(bus, *(prompt(i, run.name) for i in range(2)), partition=3)
            [(tp, end)] = positions.items()
            async with bus.transactor(f"operator-{run.name}") as operator:
                await operator.commit([], group=group_of(run), positions={tp: end + 1_000})
            async with working(bus, run=run):
                await until(lambda: whole_count(bus, 2, run.name))
                await until(lambda: _committed_is(bus, run, {tp: end}))

    with caplog.at_level("WARNING"):
        asyncio.run(case())
    assert any("alarm kind=position_gone" in line for line in caplog.messages)


async def _committed_is(bus: Bus, run: RunConfig, positions: dict[TopicPartition, int]) -> bool:
    committed = await bus.committed(group_of(run), [PROMPTS.name])
    return all(committed.get(tp) == position for tp, position in positions.items())


async def slowly(request: Generation, member: int) -> tuple[int, ...]:
    await asyncio.sleep(0.01)
    return await plus(request, member)

"""The rollout worker on the embedded log: what it takes, writes and commits; how workers share."""

import asyncio

import msgspec
import pytest
from rollout_doubles import (
    WAIT_S,
    Model,
    a_bus,
    call,
    issue,
    joined,
    plus,
    prompt,
    rewards,
    steps,
    until,
    whole_groups,
)
from rollout_working import CONFIG, GROUP, all_committed, asked, hanging, moved, whole_count, working

from headrace.bus.protocol import TopicPartition
from headrace.bus.sqlite import groups
from headrace.rpc.generation import Generation
from headrace.wire.topics import PROMPTS, REWARDS, ROLLOUT_STEPS


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
                await until(lambda: whole_count(bus, 4))
                assert (await bus.committed(GROUP, [PROMPTS.name])).get(TopicPartition("prompts", 2), 0) == 0
                held.set()
                await until(lambda: all_committed(bus))
            assert len(await whole_groups(bus)) == 5

    asyncio.run(case())


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
                async with asyncio.timeout(WAIT_S):
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
                await until(lambda: asked(first, 4))
                async with working(bus, name="two", stable=False):
                    await until(lambda: whole_count(bus, 2))
                    await until(lambda: moved(one, 2))
                held.set()
                for partition in range(4):
                    await issue(bus, prompt(4 + partition), partition=partition)
                await until(lambda: all_committed(bus))
            whole = await whole_groups(bus)
            assert len(whole) == 8 and all(len(attempts) == 1 for attempts in whole.values())

    asyncio.run(case())


def test_slow_group_keeps_its_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that takes four sessions long is asked for once: heart-beats go on, no rebalance."""
    session_ms, now_ms = 200, 0
    monkeypatch.setattr(groups, "_now_ms", lambda: now_ms)

    async def case() -> None:
        nonlocal now_ms
        async with a_bus(session_ms=session_ms) as bus:
            held = asyncio.Event()
            model = hanging("r-0000000", held)
            await issue(bus, prompt(0), partition=0)  # which stays where it is when another member comes
            async with working(bus, model) as worker:
                await until(lambda: asked(model))
                async with working(bus, model, name="other") as other:
                    while now_ms < 4 * session_ms:  # no time passes in a stall, which holds up the beats
                        await asyncio.sleep(0.01)
                        now_ms += 10
                    held.set()
                    await until(lambda: all_committed(bus))
            assert (worker.counts["moved"], worker.counts["finished"]) == (0, 1)
            assert other.counts["finished"] == 0
            assert len(model.requests) == 2
            assert len((await whole_groups(bus))["r-0000000"]) == 1

    asyncio.run(case())

"""What a rollout worker does when a part of it fails: tries again, gives up, stops; never invents."""

import asyncio
from collections.abc import Sequence
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
from rollout_working import CONFIG, GROUP, RUN, all_committed, asked, hanging, whole_count, working

from headrace.bus import outage
from headrace.bus.protocol import Bus, Message, TopicPartition
from headrace.clock import ManualClock, SystemClock
from headrace.consumers import rollouts
from headrace.consumers.rollouts import Worker
from headrace.errors import BusUnavailable, InferenceUnavailable, SandboxError
from headrace.rpc.generation import Generation
from headrace.wire.records import GROUP_SIZE_MAX, DeadLetter
from headrace.wire.topics import DEAD_LETTERS, PROMPTS, ROLLOUT_STEPS


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
            soon_ms = SystemClock().now_ms() + 1
            assert {(e.closed, e.reason, e.rollouts) for e in await joined(bus, now_ms=soon_ms)} == {
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
            hangs = hanging("r-0000000", asyncio.Event())
            # by a clock that stands still its 400 ms run from the start of work, however late that is
            async with working(bus, hangs, clock=ManualClock(short.admitted_ms)):
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


def test_a_group_of_no_size_is_no_prompt() -> None:
    """Sizes that nobody can play go to the dead letters; the worker and the next group go on."""

    async def case() -> None:
        async with a_bus() as bus:
            sizes = (0, -1, GROUP_SIZE_MAX + 1)
            await issue(bus, *(prompt(i, group_size=size) for i, size in enumerate(sizes)), prompt(3))
            async with working(bus):
                await until(lambda: all_committed(bus))
            assert list(await whole_groups(bus)) == ["r-0000003"]
            letters = await on_log(bus, DEAD_LETTERS.name)
            assert len(letters) == 3
            assert all(isinstance(letter, DeadLetter) and "group_size" in letter.reason for letter in letters)

    asyncio.run(case())


def test_stop_lets_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to stop, a worker waits for what ends within the bound, and commits it."""
    monkeypatch.setattr(rollouts, "POLL_MS", 5)

    async def case() -> None:
        async with a_bus() as bus:
            held = asyncio.Event()
            model = hanging("r-0000000", held)
            await issue(bus, prompt(0))
            config = msgspec.structs.replace(CONFIG, drain_ms=60_000)
            async with working(bus, model, config=config):
                await until(lambda: asked(model))
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
                await until(lambda: whole_count(bus, 2))
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
    monkeypatch.setattr(outage, "RETRY_S", 0.01)

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
    monkeypatch.setattr(outage, "RETRY_S", 0.01)

    async def case() -> None:
        async with a_bus() as bus:
            await issue(bus, prompt(0))
            config = msgspec.structs.replace(CONFIG, outage_ms_max=1)
            shaky: Any = Shaky(bus, 2)
            with pytest.raises(BusUnavailable, match="test: away"):
                await Worker(shaky, RUN, config, [Model()], arena(), "w").serve(asyncio.Event())
            assert await bus.committed(GROUP, [PROMPTS.name]) == {}

    asyncio.run(case())

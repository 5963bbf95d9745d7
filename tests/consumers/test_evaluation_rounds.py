"""Held-out rounds: which tasks and seeds, what is written, going on after a kill."""

import asyncio

import msgspec
import pytest
from rollout_doubles import Model, OneTask, Verdicts, a_bus, arena, call

from headrace.bus.protocol import Bus, Message
from headrace.config import RunConfig
from headrace.consumers.config import EvaluationConfig
from headrace.consumers.examiner import Examiner, Round, chosen, evaluations
from headrace.errors import InferenceError, SandboxError
from headrace.rpc.generation import Generation
from headrace.wire.topics import EVALUATIONS

RUN = RunConfig(name="r")
CONFIG = EvaluationConfig(seed=5, tasks_in_flight=2, attempts_max=2)
BEFORE = Round(name="before", version=0, tasks=3, samples=2)
AFTER = Round(name="after", version=9, tasks=3, samples=2)


def held(bus: Bus, model: Model, sandbox: Verdicts | None = None) -> Examiner:
    return Examiner(bus, RUN, CONFIG, model, arena(sandbox), "doctest")


def test_choice_is_spread_over_functions() -> None:
    """The first tasks come from different functions; a smaller choice begins a larger one; the seed fixes
    it."""
    task_ids = [f"{function}:{i}" for function in "abcd" for i in range(5)]
    all_of_them = chosen(task_ids, 99, seed=1)
    assert sorted(all_of_them) == sorted(task_ids)
    for start in range(0, 20, 4):
        assert {task_id[0] for task_id in all_of_them[start : start + 4]} == set("abcd")
    assert chosen(task_ids[::-1], 6, seed=1) == all_of_them[:6]
    assert chosen(task_ids, 6, seed=2) != all_of_them[:6]


def test_round_is_written_down() -> None:
    """Each task has its sampled tries and a greedy one; sample 0 passes at once, sample 1 at its second
    try."""

    async def case() -> None:
        async with a_bus() as bus:
            await held(bus, Model()).hold(BEFORE, asyncio.Event())
            found = await evaluations(bus, "r")
            assert sorted((e.task_id, e.mode, e.sample) for e in found) == sorted(
                (task_id, mode, sample)
                for task_id in OneTask.task_ids
                for mode, sample in (("sampled", 0), ("sampled", 1), ("greedy", 0))
            )
            assert {(e.mode, e.sample): (e.passed, e.passed_first, e.reward) for e in found} == {
                ("sampled", 0): (True, True, 1.0),
                ("sampled", 1): (True, False, 0.5),
                ("greedy", 0): (True, True, 1.0),
            }
            second = next(e for e in found if e.sample == 1)
            assert [(t.call, t.finish) for t in second.turns] == [
                ("<|call|>-<|end|>", "stop"),
                ("<|call|>+<|end|>", "passed"),
            ]
            assert second.turns[0].result == "f(1, 2): expected 3, got -1"
            assert {(e.round, e.version, e.kind) for e in found} == {("before", 0, "operator")}

    asyncio.run(case())


def test_rounds_are_paired() -> None:
    """Two rounds under different names and versions ask for the very same samples, in whatever order."""

    async def case() -> None:
        async with a_bus() as bus:
            first, second = Model(), Model()
            await held(bus, first).hold(BEFORE, asyncio.Event())
            await held(bus, second).hold(AFTER, asyncio.Event())

            def asked(model: Model) -> set[bytes]:
                return {msgspec.json.encode(request) for request in model.requests}

            assert asked(first) == asked(second) and len(first.requests) == 3 * 3
            assert len({request.seed for request in first.requests}) == 3
            assert sum(request.greedy for request in first.requests) == 3

    asyncio.run(case())


def test_goes_on_after_a_kill() -> None:
    """Tries that are on the log for this round and version are not made again; those of others do not
    count."""

    async def case() -> None:
        async with a_bus() as bus:
            await held(bus, Model()).hold(msgspec.structs.replace(BEFORE, tasks=2), asyncio.Event())
            await held(bus, Model()).hold(AFTER, asyncio.Event())
            await bus.produce([Message(EVALUATIONS.name, b"r", b"\xc1 no record")])
            model = Model()
            await held(bus, model).hold(BEFORE, asyncio.Event())
            assert len({request.group_id for request in model.requests}) == 1
            tries = [(e.round, e.mode, e.task_id, e.sample) for e in await evaluations(bus, "r")]
            assert len(tries) == len(set(tries)) == 2 * 9

    asyncio.run(case())


def test_sandbox_fault_is_no_failed_try() -> None:
    """A try that the sandbox spoilt is made again; if it always does, the round ends with that error, and the
    task has no result."""

    async def case() -> None:
        async with a_bus() as bus:
            await held(bus, Model(), Verdicts([SandboxError("sandbox: died")])).hold(BEFORE, asyncio.Event())
            assert all(e.passed for e in await evaluations(bus, "r"))
        async with a_bus() as bus:
            broken = Verdicts([SandboxError("sandbox: died")] * 100)
            with pytest.raises(SandboxError, match="sandbox: died"):
                await held(bus, Model(), broken).hold(BEFORE, asyncio.Event())
            assert await evaluations(bus, "r") == []

    asyncio.run(case())


def test_refused_request_is_not_tried_again() -> None:
    """What the engine refuses for good ends the round at once."""

    async def case() -> None:
        asked = 0

        async def says(request: Generation, member: int) -> tuple[int, ...]:
            nonlocal asked
            asked += 1
            raise InferenceError("request: too long")

        async with a_bus() as bus:
            with pytest.raises(InferenceError, match="request: too long"):
                await held(bus, Model(says)).hold(BEFORE, asyncio.Event())
            assert asked <= CONFIG.tasks_in_flight

    asyncio.run(case())


def test_stop_between_tasks() -> None:
    """A round told to stop ends the tasks in hand and takes no other."""

    async def case() -> None:
        stop = asyncio.Event()

        async def says(request: Generation, member: int) -> tuple[int, ...]:
            stop.set()
            return call("+")

        async with a_bus() as bus:
            await held(bus, Model(says)).hold(BEFORE, stop)
            tried = [e.task_id for e in await evaluations(bus, "r")]
            assert 1 <= len(set(tried)) < 3 and len(tried) == 3 * len(set(tried))

    asyncio.run(case())

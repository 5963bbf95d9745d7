"""A rollout worker beside a test, and what tests wait for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rollout_doubles import (
    WAIT_S,
    Model,
    Verdicts,
    arena,
    plus,
    whole_groups,
)

from headrace.bus.protocol import Bus
from headrace.clock import Clock
from headrace.config import RunConfig
from headrace.consumers.config import RolloutsConfig
from headrace.consumers.rollouts import Worker, group_of
from headrace.rpc.generation import Generation
from headrace.wire.topics import PROMPTS

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
        await asyncio.wait_for(task, WAIT_S)


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


async def whole_count(bus: Bus, count: int, run: str = "r") -> bool:
    return len(await whole_groups(bus, run)) == count


async def moved(worker: Worker, groups: int) -> bool:
    return worker.counts["moved"] == groups


async def asked(model: Model, requests: int = 1) -> bool:
    return len(model.requests) >= requests

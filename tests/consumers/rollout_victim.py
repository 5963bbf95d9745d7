"""A worker that hangs in every group's second turn, to be killed there: `python rollout_victim.py
ADDRESS`."""

import asyncio
import sys

from rollout_doubles import Model, arena, plus

from headrace.bus import open_bus
from headrace.config import RunConfig
from headrace.consumers.config import RolloutsConfig
from headrace.consumers.rollouts import Worker
from headrace.rpc.generation import Generation


async def says(request: Generation, member: int) -> tuple[int, ...]:
    if request.sequences[0].own_tokens:
        await asyncio.Event().wait()
    return await plus(request, member)


async def main() -> None:
    async with open_bus(sys.argv[1], session_ms=1_000) as bus:
        config = RolloutsConfig(groups_in_flight=4)
        worker = Worker(bus, RunConfig(name=sys.argv[2]), config, [Model(says)], arena(), "victim")
        await worker.serve(asyncio.Event())


asyncio.run(main())

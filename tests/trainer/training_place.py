"""A log, a store and a run of the tiny model, for the tests of the trainer's process. Not tests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from trainer_records import experience, pair
from training_process import seed

from headrace.bus import open_bus
from headrace.bus.protocol import Bus, Message
from headrace.config import RunConfig
from headrace.consumers import training
from headrace.consumers.ledger import read_ledger
from headrace.store.blobs import Blobs
from headrace.trainer.config import TrainerConfig
from headrace.wire.codec import decode, encode
from headrace.wire.records import Experience, Rollout, TrainStep
from headrace.wire.topics import EXPERIENCE, TOPICS

CONFIG = TrainerConfig(lr=1e-2, checkpoint_every=2, full_every=2, outage_ms_max=3_000)


class Place:
    """`run`: three steps of two groups each. Logs may be shared: `name` keeps runs apart."""

    def __init__(self, directory: Path, bus: str = "", name: str = "test") -> None:
        directory.mkdir(exist_ok=True)
        self.bus = bus or f"sqlite:{directory}/bus.sqlite"
        self.store = f"file://{directory}/store"
        self.directory = directory
        self.run = RunConfig(name=name, steps_max=3, groups_per_step=2, lag_versions_max=99)

    def until(self, steps_max: int) -> RunConfig:
        return msgspec.structs.replace(self.run, steps_max=steps_max)

    def units(self, count: int) -> list[str]:
        return [f"{self.run.name}-g{index}" for index in range(count)]

    def groups(self, count: int) -> list[Experience]:
        return [
            msgspec.structs.replace(pair(name, first=9 + 3 * index), run=self.run.name)
            for index, name in enumerate(self.units(count))
        ]

    def group(self, group_id: str, rollouts: Sequence[Rollout]) -> Experience:
        return experience(group_id, rollouts, run=self.run.name)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Bus]:
        async with open_bus(self.bus) as bus:
            await bus.create_topics(list(TOPICS.values()))
            yield bus

    async def train(
        self, bus: Any, run: RunConfig | None = None, config: TrainerConfig = CONFIG, blobs: Any = None
    ) -> list[TrainStep]:
        """Trains to `steps_max` and gives the ledger."""
        async with asyncio.timeout(180):
            await training.run(
                bus,
                run or self.run,
                config,
                blobs or Blobs.open(self.store),
                asyncio.Event(),
                seed=seed(),
            )
            return await self.ledger(bus)

    async def ledger(self, bus: Bus) -> list[TrainStep]:
        return (await read_ledger(bus, self.run.name)).steps


def messages(records: Sequence[Experience], partition: int | None = None) -> list[Message]:
    """As the join sends them; in one `partition` their order is fixed."""
    found = []
    for record in records:
        value, headers = encode(record, source="join", now_ms=0, event_id=record.group_id)
        found.append(Message(EXPERIENCE.name, record.group_id.encode(), value, headers, partition))
    return found


async def all_of(bus: Bus, topic: str) -> list[Any]:
    """Every record on a topic now."""
    begins, ends = await bus.begins([topic]), await bus.ends([topic])
    return [
        decode(d.topic, d.value or b"", d.headers)
        for tp, end in ends.items()
        async for d in bus.read_range(tp, begins[tp], end)
    ]


def check_whole(steps: Sequence[TrainStep], units: Sequence[str]) -> None:
    """Steps without a hole, roots in a chain, each unit exactly once."""
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert [step.root_before for step in steps[1:]] == [step.root_after for step in steps[:-1]]
    answered = [u for step in steps for u in (*step.admitted, *(d.group_id for d in step.drops))]
    run = f"{steps[0].run}-"  # a shared log may hold junk that is nobody's
    assert sorted(unit for unit in answered if unit.startswith(run)) == sorted(units)

"""The trainer killed with SIGKILL at every point of its order of effects, then started again."""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
from test_training_consumer import CONFIG, RUN, Place, check_whole, groups, messages

from headrace.consumers.ledger import read_ledger
from headrace.trainer.config import StepSettings
from headrace.wire.records import TrainStep

SCRIPT = Path(__file__).with_name("training_process.py")
SETTINGS = msgspec.json.encode(StepSettings(run=RUN, trainer=CONFIG)).decode()


async def _prepare(place: Place) -> None:
    async with place.opened() as bus:
        await bus.produce(messages(groups(6)))


async def _train(place: Place) -> None:
    async with place.opened() as bus:
        await place.train(bus)


async def _ledger(place: Place) -> list[TrainStep]:
    async with place.opened() as bus:
        return (await read_ledger(bus, "test")).steps


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Killed between blobs, before and after transactions, of the seed and of steps: the ledger is that of a
    run that nobody disturbed."""
    calm, place = Place(tmp_path / "calm"), Place(tmp_path / "killed")
    for each in (calm, place):
        each.directory.mkdir()
        asyncio.run(_prepare(each))
    asyncio.run(_train(calm))
    fuses = ["put:1", "before:1", "after:1", "put:2", "before:1", "after:1", "put:3", "before:1", "never"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), place.bus, place.store, SETTINGS, *fuses],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout.split() == ["-9"] * (len(fuses) - 1) + ["0"], done.stderr
    steps, undisturbed = asyncio.run(_ledger(place)), asyncio.run(_ledger(calm))
    check_whole(steps, {f"g{index}" for index in range(6)})
    assert [step.root_after for step in steps] == [step.root_after for step in undisturbed]
    assert steps[-1].positions == undisturbed[-1].positions

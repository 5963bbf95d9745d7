"""The whole loop under faults on Kafka, the broker's own death among them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_contract import Hurt, LoopContract, play

from faulty_run import FaultyRun, quiet
from headrace.bus import local_kafka
from headrace.cli.process import living

pytestmark = [pytest.mark.timeout(900), pytest.mark.kafka]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, kafka: str) -> Iterator[Path]:
    """The directory of a broker of our own, to be killed."""
    if lack := local_kafka.missing():
        pytest.skip(f"no local broker: {lack}")
    directory = tmp_path_factory.mktemp("loop-broker")
    local_kafka.up(directory)
    yield directory
    local_kafka.down(directory)


@pytest.fixture(scope="module")
def address(broker: Path) -> str:
    return f"kafka:{local_kafka.status(broker).address}"


@pytest.fixture(scope="module")
def hurt(broker: Path, address: str, tmp_path_factory: pytest.TempPathFactory) -> Hurt:
    """The run, played to its end."""

    async def kill_the_broker(run: FaultyRun) -> None:
        """With SIGKILL; it comes back on the same port."""
        async with quiet(list(living(run.run_dir).values())):
            await run.watch.refresh()  # the step to wait for is one after the kill
            await asyncio.to_thread(local_kafka.down, broker, kill=True)
        await asyncio.to_thread(local_kafka.up, broker)
        await run.goes_on()

    return asyncio.run(play(tmp_path_factory.mktemp("loop") / "run", address, kill_the_broker))


class TestLoopOnKafka(LoopContract):
    pass

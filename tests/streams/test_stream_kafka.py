"""The same scenarios and faults on a real Kafka, under the bus host and under Faust."""

import asyncio
import sys
import uuid
from pathlib import Path

import pytest
from stream_faults import ended, join_command, killed_in_mid_work, log, process, zombie_wakes_up
from stream_play import everything, play

from headrace.bus.protocol import Message
from headrace.wire.codec import decode
from headrace.wire.records import DeadLetter
from headrace.wire.topics import DEAD_LETTERS, ROLLOUT_STEPS

pytestmark = [pytest.mark.timeout(400), pytest.mark.kafka]


@pytest.fixture
def prefix() -> str:
    """Of this test's groups: the broker, and what is on it, is shared."""
    return uuid.uuid4().hex[:8]


def test_scenarios_on_kafka(kafka: str, tmp_path: Path, prefix: str) -> None:
    """Every scenario closes on Kafka, under the bus host, as it does in the processor alone."""

    async def main() -> None:
        address = f"kafka:{kafka}"
        async with log(address) as bus:
            with process(join_command(address, tmp_path), tmp_path) as join:
                await play(bus, prefix)
                assert await ended(join) == 0

    asyncio.run(main())


def test_kill_9_on_kafka(kafka: str, tmp_path: Path, prefix: str) -> None:
    """Killed in mid-work on Kafka, the joins together send every group exactly once."""

    async def main() -> None:
        address = f"kafka:{kafka}"
        async with log(address) as bus:
            command = join_command(address, tmp_path)
            found = await killed_in_mid_work(bus, command, tmp_path, prefix, groups=40, kills=2)
            assert {len(experiences) for experiences in found.values()} == {1}

    asyncio.run(main())


def test_zombie_is_fenced_on_kafka(kafka: str, tmp_path: Path, prefix: str) -> None:
    """On Kafka too, a join that hangs before its commit is fenced when it wakes up after another took
    over."""

    async def main() -> None:
        address = f"kafka:{kafka}"
        async with log(address) as bus:
            await zombie_wakes_up(bus, address, tmp_path, prefix)

    asyncio.run(main())


def faust_command(kafka: str, tmp_path: Path, *, store: str) -> tuple[list[str], dict[str, str]]:
    """A Faust worker, and its environment. Static membership: a killed worker is not waited for."""
    return [sys.executable, "-m", "faust", "-A", "headrace.streams.app", "worker", "-l", "info"], {
        "HEADRACE_BUS__ADDRESS": f"kafka:{kafka}",
        "HEADRACE_STORE__URI": f"file://{tmp_path}/blobs",
        "HEADRACE_FAUST__STORE": store,
        "HEADRACE_FAUST__DIRECTORY": str(tmp_path / "faust"),
        "HEADRACE_FAUST__INSTANCE": "one",
        "HEADRACE_FAUST__QUIET_MS": "300",
        "HEADRACE_FAUST__RECORDS_MAX": "20",
    }


def test_scenarios_under_faust(kafka: str, tmp_path: Path, prefix: str) -> None:
    """Every scenario closes under Faust as it does in the processor alone, what is sent again is the same;
    bad records are dead-lettered; SIGTERM ends the worker with 0."""

    async def main() -> None:
        async with log(f"kafka:{kafka}") as bus:
            command, environment = faust_command(kafka, tmp_path, store="memory")
            with process(command, tmp_path, environment) as worker:
                bad = Message(
                    ROLLOUT_STEPS.name, prefix.encode(), b"\xc1", (("ce_type", b"headrace.RolloutStep.v1"),)
                )
                await bus.produce([bad])
                await play(bus, prefix, once=False)
                assert await ended(worker) == 0
            letters = [
                decode(d.topic, d.value or b"", d.headers) for d in await everything(bus, DEAD_LETTERS.name)
            ]
            mine = [w for w in letters if isinstance(w, DeadLetter) and w.key == prefix.encode()]
            [place] = {(w.topic, w.partition, w.offset, w.value) for w in mine}
            assert (place[0], place[3]) == (ROLLOUT_STEPS.name, b"\xc1")

    asyncio.run(main())


def test_kill_9_under_faust(kafka: str, tmp_path: Path, prefix: str) -> None:
    """Killed in mid-work, Faust workers with RocksDB lose no group; what is sent again carries the same id
    and content."""

    async def main() -> None:
        async with log(f"kafka:{kafka}") as bus:
            command, environment = faust_command(kafka, tmp_path, store="rocksdb")
            found = await killed_in_mid_work(
                bus, command, tmp_path, prefix, groups=40, kills=1, environment=environment
            )
            assert all(again == sent[0] for sent in found.values() for again in sent)

    asyncio.run(main())

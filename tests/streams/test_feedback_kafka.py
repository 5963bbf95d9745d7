"""The same scenarios and kills of the feedback join on a real Kafka, under the bus host and under Faust."""

import asyncio
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest
from feedback_faults import judges_killed_in_mid_work
from feedback_play import SETTINGS, play_feedback
from stream_faults import ended, join_command, log, process

pytestmark = [pytest.mark.timeout(400), pytest.mark.kafka]


@pytest.fixture
def prefix() -> str:
    """Of this test's suggestions: the broker, and what is on it, is shared."""
    return uuid.uuid4().hex[:8]


def test_feedback_scenarios_on_kafka(kafka: str, tmp_path: Path, prefix: str) -> None:
    """Every scenario ends on Kafka, under the bus host, as it does in the processors alone."""

    async def main() -> None:
        address = f"kafka:{kafka}"
        async with log(address) as bus:
            with process(join_command(address, tmp_path, "slow"), tmp_path) as join:
                await play_feedback(bus, prefix)
                assert await ended(join) == 0

    asyncio.run(main())


def test_feedback_kill_9_on_kafka(kafka: str, tmp_path: Path, prefix: str) -> None:
    """Killed in mid-work on Kafka, the joins together judge each suggestion exactly once."""

    async def main() -> None:
        address = f"kafka:{kafka}"
        async with log(address) as bus:
            command = join_command(address, tmp_path, "settled")
            await judges_killed_in_mid_work(bus, command, tmp_path, prefix, count=20, kills=1)

    asyncio.run(main())


def test_feedback_scenarios_under_faust(kafka: str, tmp_path: Path, prefix: str) -> None:
    """Every scenario ends under Faust, one worker for each of the two processors, as it does alone; what is
    sent again carries the same id and content."""

    async def main() -> None:
        join = {f"HEADRACE_FEEDBACK_JOIN__JOIN__{name.upper()}": str(ms) for name, ms in SETTINGS.items()}
        environment = {
            "HEADRACE_BUS__ADDRESS": f"kafka:{kafka}",
            "HEADRACE_STORE__URI": f"file://{tmp_path}/blobs",
            "HEADRACE_FAUST__DIRECTORY": str(tmp_path / "faust"),
            "HEADRACE_FAUST__QUIET_MS": "300",
            **join,
        }
        async with log(f"kafka:{kafka}") as bus:
            with ExitStack() as stack:
                faust = [sys.executable, "-m", "faust", "-A"]
                workers = [
                    stack.enter_context(
                        process(
                            [*faust, f"headrace.streams.app:{name}", "worker", "-l", "info"],
                            tmp_path,
                            environment | {"HEADRACE_FAUST__INSTANCE": name},
                        )
                    )
                    for name in ("feedback", "users")
                ]
                await play_feedback(bus, prefix, once=False)
                assert [await ended(worker) for worker in workers] == [0, 0]

    asyncio.run(main())

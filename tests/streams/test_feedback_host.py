"""The feedback join on the bus host and the embedded log: scenarios, kills, restarts; and the way on to
`experience.live`."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from feedback_faults import judges_killed_in_mid_work
from feedback_play import SETTINGS, closed_live, judged, messages, play_feedback
from feedback_records import said, suggestion
from feedback_scenarios import ACCEPTED
from stream_faults import join_command, log
from stream_play import until

from headrace.store.blobs import Blobs
from headrace.streams.feedback import FeedbackConfig
from headrace.streams.hosts.bus import HostConfig
from headrace.streams.run import FeedbackStreamConfig, StreamConfig, run, run_feedback

pytestmark = pytest.mark.timeout(400)

HOST = HostConfig(clock_skew_ms=0)


async def feedback_joined(bus: Any, tmp_path: Path, body: Any, **join: Any) -> None:
    """Awaits `body` while both joins run in this process; a fault of theirs is raised."""
    stop, blobs = asyncio.Event(), Blobs.open(f"file://{tmp_path}/blobs")
    config = FeedbackStreamConfig(join=FeedbackConfig(**join), host=HOST)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_feedback(bus, config, stop, blobs=blobs))
        tasks.create_task(run(bus, StreamConfig(host=HOST), stop, blobs=blobs))
        try:
            await body
        finally:
            stop.set()


def test_feedback_scenarios_on_sqlite(tmp_path: Path) -> None:
    """Every scenario ends on the embedded log as it does in the processors alone, and each unit leaves as one
    live group."""

    async def main() -> None:
        async with log(f"sqlite:{tmp_path}/log.db") as bus:
            await feedback_joined(bus, tmp_path, play_feedback(bus, "s", after=True), **SETTINGS)
            found = await closed_live(bus)
            assert set(found.values()) == {1}
            assert found["s accepted", "complete"] == found["s never shown", "failed"] == 1

    asyncio.run(main())


def test_feedback_kill_9_in_mid_work(tmp_path: Path) -> None:
    """Killed again and again while signals come, the joins together judge each suggestion exactly once."""
    address = f"sqlite:{tmp_path}/log.db"

    async def main() -> None:
        async with log(address) as bus:
            command = join_command(address, tmp_path, "settled")
            await judges_killed_in_mid_work(bus, command, tmp_path, "kill", count=40, kills=2)

    asyncio.run(main())


def test_open_suggestions_survive_a_restart(tmp_path: Path) -> None:
    """What was said before a restart is not forgotten by it; a window that ended meanwhile is judged by the
    time of the log."""

    async def main() -> None:
        async with log("sqlite::memory:") as bus:
            first = [
                suggestion("a"),
                said("a", "accepted"),
                said("b", "accepted"),
                suggestion("c", silent=True),
            ]
            await bus.produce(messages(first))

            async def silent_is_out() -> bool:
                return (await closed_live(bus))["c", "complete"] == 1

            await feedback_joined(bus, tmp_path, until(silent_is_out, "c"), window_ms=500)
            await bus.produce(messages([suggestion("b")]))
            await feedback_joined(bus, tmp_path, judged(bus, ["a", "b"]), window_ms=500)
            assert await judged(bus, ["a", "b"]) == {"a": ACCEPTED, "b": ACCEPTED}

    asyncio.run(main())


def test_an_accept_is_rewarded_within_seconds(tmp_path: Path) -> None:
    """With `settle_ms` an accept is soon a live group, though the window is hours."""

    async def main() -> None:
        async with log("sqlite::memory:") as bus:

            async def body() -> None:
                await bus.produce(messages([suggestion("a"), said("a", "shown"), said("a", "accepted")]))

                async def out() -> bool:
                    return await closed_live(bus) == Counter({("a", "complete"): 1})

                await until(out, "the group", wait_s=60)

            await feedback_joined(bus, tmp_path, body(), window_ms=7_200_000, settle_ms=100)

    asyncio.run(main())

"""Joins as processes that are killed, hang and wake up, on either bus. Not tests."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from stream_play import closed, experiences, far_ms, messages, probe, until
from stream_records import prompt, rollout

from headrace.bus import open_bus
from headrace.bus.protocol import Bus
from headrace.errors import Fenced
from headrace.wire.records import Experience
from headrace.wire.topics import TOPICS


@asynccontextmanager
async def log(address: str) -> AsyncIterator[Bus]:
    async with open_bus(address) as bus:
        await bus.create_topics(list(TOPICS.values()))
        yield bus


def join_command(address: str, tmp_path: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        str(Path(__file__).with_name("stream_process.py")),
        address,
        f"file://{tmp_path}/blobs",
        *more,
    ]


@contextmanager
def process(
    command: Sequence[str], tmp_path: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A join as its own process, killed at the end if it still runs; what it says is in `process.log`."""
    with (
        (tmp_path / "process.log").open("a") as stderr,
        subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as join,
    ):
        try:
            yield join
        finally:
            join.kill()


async def ended(join: subprocess.Popen[str], *, wait_s: float = 60) -> int:
    """Asks `join` to end; its exit status."""
    join.terminate()
    return await asyncio.to_thread(join.wait, wait_s)


async def killed_in_mid_work(
    bus: Bus,
    command: Sequence[str],
    tmp_path: Path,
    prefix: str,
    *,
    groups: int,
    kills: int,
    environment: Mapping[str, str] | None = None,
) -> dict[str, list[Experience]]:
    """Kills the join again and again while records come; returns the experiences once all groups are out and
    complete."""
    names = [f"{prefix}{index}" for index in range(groups)]
    whole, halves = names[::2], names[1::2]

    async def feed() -> None:
        for first, second in zip(whole, halves, strict=True):
            records = [*rollout(first, 0), *rollout(first, 1), *rollout(second, 0)]
            for message in messages(
                [*(prompt(name, deadline_ms=far_ms()) for name in (first, second)), *records]
            ):
                await bus.produce([message])

    feeding = asyncio.create_task(feed())
    for count in range(1, kills + 1):
        with process(command, tmp_path, environment):

            async def enough(share: float = count / (kills + 1)) -> bool:
                return len(set(whole) & (await experiences(bus)).keys()) >= share * len(whole)

            await until(enough, "a part of the groups")
    await feeding
    await bus.produce(messages(record for name in halves for record in rollout(name, 1)))
    with process(command, tmp_path, environment) as join:
        await closed(bus, names)
        await probe(bus, prefix)
        assert await ended(join) == 0
    found = await experiences(bus)
    assert {e.closed for name in names for e in found[name]} == {"complete"}
    return {name: found[name] for name in names}


async def zombie_wakes_up(bus: Bus, address: str, tmp_path: Path, prefix: str) -> None:
    groups = [f"{prefix}{index}" for index in range(12)]
    for group in groups:
        await bus.produce(messages([prompt(group, size=1, deadline_ms=far_ms()), *rollout(group, 0)]))
    with process(join_command(address, tmp_path, "2"), tmp_path) as zombie:
        assert zombie.stdout is not None
        assert await asyncio.to_thread(zombie.stdout.readline) == "hanging\n"
        with process(join_command(address, tmp_path), tmp_path) as heir:
            await closed(bus, groups)
            zombie.send_signal(signal.SIGCONT)
            out, _ = await asyncio.to_thread(zombie.communicate, None, 60)
            assert (zombie.returncode, out[:8]) == (Fenced.exit_code, "Fenced: ")
            await probe(bus, prefix)
            assert await ended(heir) == 0
    found = await experiences(bus)
    assert [len(found[group]) for group in groups] == [1] * len(groups)

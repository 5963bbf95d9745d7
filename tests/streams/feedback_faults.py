"""The feedback join as processes that are killed in mid-work, on either bus. Not tests."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from feedback_play import different, judged, messages, rewards
from feedback_records import said, suggestion
from feedback_scenarios import ACCEPTED, REJECTED
from stream_faults import ended, process
from stream_play import until

from headrace.bus.protocol import Bus


async def judges_killed_in_mid_work(
    bus: Bus,
    command: Sequence[str],
    tmp_path: Path,
    prefix: str,
    *,
    count: int,
    kills: int,
    environment: Mapping[str, str] | None = None,
    once: bool = True,
) -> None:
    """Kills a join that closes what is judged at once, again and again, while suggestions are made and
    judged: every second right away, the others after the last kill."""
    names = [f"{prefix}{index}" for index in range(count)]
    right_away, later = names[::2], names[1::2]

    async def feed() -> None:
        for first, second in zip(right_away, later, strict=True):
            for record in (
                suggestion(second),
                suggestion(first),
                said(second, "shown"),
                said(first, "accepted"),
            ):
                await bus.produce(messages([record]))

    feeding = asyncio.create_task(feed())
    for number in range(1, kills + 1):
        with process(command, tmp_path, environment):

            async def enough(share: float = number / (kills + 1)) -> bool:
                return len(set(right_away) & (await rewards(bus)).keys()) >= share * len(right_away)

            await until(enough, "a part of the judgements")
    await feeding
    await bus.produce(messages(said(name, "rejected") for name in later))
    with process(command, tmp_path, environment) as join:
        found = await judged(bus, names, once=once)
        assert await ended(join) == 0
    wanted = {**dict.fromkeys(right_away, ACCEPTED), **dict.fromkeys(later, REJECTED)}
    assert not different(found, wanted), different(found, wanted)

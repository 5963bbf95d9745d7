"""Plays the scenarios on a real log, whatever host is joining there. Not tests."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from stream_records import prompt, rollout
from stream_scenarios import SCENARIOS, Expected

from headrace.bus.protocol import Bus, Delivery, Message, TopicPartition, partition_of
from headrace.wire.codec import decode, encode
from headrace.wire.records import Experience, Prompt, Record, Reward
from headrace.wire.topics import EXPERIENCE, EXPERIENCE_LIVE, PARTITIONS, PROMPTS, REWARDS, ROLLOUT_STEPS

WAIT_S = 120.0
"""Faust and a broker on a busy machine need most of a minute."""


def messages(records: Iterable[Record]) -> list[Message]:
    """The records of groups as they are sent to their topics."""
    out = []
    for record in records:
        match record:
            case Prompt():
                topic = PROMPTS
            case Reward():
                topic = REWARDS
            case _:
                topic = ROLLOUT_STEPS
        value, headers = encode(record, source="test", now_ms=0)
        out.append(Message(topic.name, record.group_id.encode(), value, headers))  # type: ignore[attr-defined]
    return out


async def experiences(bus: Bus) -> dict[str, list[Experience]]:
    """Every `Experience` on the log, by group."""
    found = defaultdict(list)
    both = [*await everything(bus, EXPERIENCE.name), *await everything(bus, EXPERIENCE_LIVE.name)]
    for delivery in both:
        record = decode(delivery.topic, delivery.value or b"", delivery.headers)
        assert isinstance(record, Experience)
        assert (record.source == "live") == (delivery.topic == EXPERIENCE_LIVE.name)
        assert (delivery.key, delivery.header("ce_id")) == (record.group_id.encode(),) * 2
        found[record.group_id].append(record)
    return found


async def everything(bus: Bus, topic: str) -> list[Delivery]:
    begins, ends = await bus.begins([topic]), await bus.ends([topic])
    return [delivery for tp in begins async for delivery in bus.read_range(tp, begins[tp], ends[tp])]


async def until(condition: Callable[[], Awaitable[bool]], what: str, *, wait_s: float = WAIT_S) -> None:
    """Waits for `condition`; fails with `what` after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"waited {wait_s} s for {what}"
        await asyncio.sleep(0.05)


async def closed(bus: Bus, groups: Sequence[str]) -> dict[str, list[Experience]]:
    """The experiences once all of `groups` have closed."""

    async def all_there() -> bool:
        return set(groups) <= (await experiences(bus)).keys()

    await until(all_there, f"{len(groups)} groups to close")
    return await experiences(bus)


async def probe(bus: Bus, name: str) -> None:
    """Returns when a host has handled all that was sent before to any partition."""
    names = {partition_of(f"{name}{index}".encode(), PARTITIONS): f"{name}{index}" for index in range(64)}
    assert len(names) == PARTITIONS
    for group in names.values():
        await bus.produce(messages([prompt(group, size=1, deadline_ms=far_ms()), *rollout(group, 0)]))
    await closed(bus, list(names.values()))


def far_ms() -> int:
    return time.time_ns() // 1_000_000 + 3_600_000


async def play(bus: Bus, prefix: str, *, once: bool = True) -> None:
    """All scenarios at once, as groups `prefix name`: each closes as expected and stays so after its late
    records; it goes out once, or, if not `once`, again as the same record."""
    deadlines = {}
    for scenario in SCENARIOS:
        group = f"{prefix} {scenario.name}"
        deadlines[group] = time.time_ns() // 1_000_000 + scenario.deadline_in_ms
        for message in messages(scenario.records(group, deadlines[group])):
            await bus.produce([message])
    await closed(bus, list(deadlines))
    for group, scenario in zip(deadlines, SCENARIOS, strict=True):
        await bus.produce(messages(scenario.after(group, deadlines[group])))
    await probe(bus, prefix)
    found = await experiences(bus)
    assert once or all(again == found[group][0] for group in deadlines for again in found[group])
    out = {group: found[group] if once else found[group][:1] for group in deadlines}
    outcomes = {group: [Expected.of(experience) for experience in out[group]] for group in deadlines}
    assert outcomes == {f"{prefix} {scenario.name}": [scenario.expected] for scenario in SCENARIOS}


def state_partition(group: str) -> TopicPartition:
    return TopicPartition("streams.experience.state", partition_of(group.encode(), PARTITIONS))

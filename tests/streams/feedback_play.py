"""Plays the scenarios of live feedback on a real log, whatever host is joining there. Not tests."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from feedback_records import OUTPUTS, Became, about, said, suggestion
from feedback_scenarios import SCENARIOS, expected
from stream_play import everything, until

from headrace.bus.protocol import Bus, Message
from headrace.errors import WireError
from headrace.wire.codec import decode, encode
from headrace.wire.records import DeadLetter, Exposure, Feedback, GroupFailed, Record, Reward
from headrace.wire.topics import EXPERIENCE_LIVE, FEEDBACK, REWARDS, ROLLOUT_STEPS

SETTINGS = {"window_ms": 6_000, "orphan_ms": 4_000}
"""For a busy machine: what is sent on must come before the window ends."""


def messages(records: Iterable[Record]) -> list[Message]:
    """The records as inference and the gateway send them."""
    out = []
    for record in records:
        live = isinstance(record, Feedback)
        key: str = record.suggestion_id if isinstance(record, Feedback) else record.group_id  # type: ignore[attr-defined]
        event_id = record.event_id if isinstance(record, Feedback) else None
        value, headers = encode(record, source="test", now_ms=0, event_id=event_id)
        out.append(Message((FEEDBACK if live else ROLLOUT_STEPS).name, key.encode(), value, headers))
    return out


async def sent(bus: Bus, prefix: str, *, once: bool) -> list[Record]:
    """All that went out for suggestions of `prefix`; of what carries the same id, one, and no more than one
    if `once`."""
    found: dict[tuple[str, str], Record] = {}
    for topic in OUTPUTS:
        for delivery in await everything(bus, topic):
            identity = (topic, (delivery.header("ce_id") or b"").decode())
            try:
                record = decode(topic, delivery.value or b"", delivery.headers)
            except WireError:  # a shared log holds what other tests wrote
                continue
            if not _name(record).startswith(prefix):
                continue
            assert identity not in found or (not once and found[identity] == record), identity
            found[identity] = record
    return list(found.values())


async def judged(bus: Bus, names: Sequence[str], *, once: bool = True) -> dict[str, Became]:
    """What became of `names`, as soon as all of them are exposures, dead letters or part of another."""
    found: dict[str, Became] = {}

    async def all_there() -> bool:
        by_name = defaultdict(list)
        for record in await sent(bus, _start(names), once=once):
            by_name[_name(record)].append(record)
        found.update((name, Became.of(about(name, by_name[name]))) for name in names)
        return all(b.exposed is not None or b.letters or b.failed for b in found.values())

    await until(all_there, f"{len(names)} suggestions to be judged")
    return found


def _start(names: Sequence[str]) -> str:
    """What all of them begin with."""
    first, last = min(names), max(names)
    return next((first[:size] for size in range(len(first), 0, -1) if last.startswith(first[:size])), "")


def different(found: Mapping[str, Became], wanted: Mapping[str, Became]) -> dict[str, tuple[Became, Became]]:
    """What became otherwise than it should: as it is, as it should be."""
    return {name: (is_, wanted[name]) for name, is_ in found.items() if is_ != wanted[name]}


def _name(record: Record) -> str:
    match record:
        case Reward() | GroupFailed() | Exposure():
            return record.group_id
        case DeadLetter():
            return (record.key or b"").decode()
    return ""


async def feedback_probe(bus: Bus, prefix: str, *, once: bool = True) -> None:
    """Returns when all that was sent before has been handled: later suggestions of every partition are
    judged, once their window has ended."""
    names = [f"{prefix} probe {index}" for index in range(24)]
    await bus.produce(
        messages(record for name in names for record in (suggestion(name), said(name, "accepted")))
    )
    await judged(bus, names, once=once)


async def at_work(bus: Bus, prefix: str, *, once: bool) -> None:
    """Returns when a host judges what comes, in every partition: a window must not end while it starts."""
    names = [f"{prefix} ready {index}" for index in range(24)]
    await bus.produce(messages(suggestion(name, silent=True) for name in names))
    await judged(bus, names, once=once)


async def play_feedback(bus: Bus, prefix: str, *, once: bool = True, after: bool = False) -> None:
    """All scenarios at once, as suggestions `prefix name`: each becomes what is expected; and stays so, when
    more comes `after` its window."""
    await at_work(bus, prefix, once=once)
    wanted: dict[str, Became] = {}
    for scenario in SCENARIOS:
        name = f"{prefix} {scenario.name}"
        wanted |= expected(scenario, name)
        await bus.produce(messages(scenario.records(name)))
    await feedback_probe(bus, f"{prefix} 1", once=once)
    if after:
        for scenario in SCENARIOS:
            await bus.produce(messages(scenario.after(f"{prefix} {scenario.name}")))
        await feedback_probe(bus, f"{prefix} 2", once=once)
    something = [name for name, became in wanted.items() if became != Became()]
    found = await judged(bus, something, once=once)
    assert not different(found, wanted), different(found, wanted)
    await _play_bot(bus, f"{prefix} bot", once=once)
    nothing = wanted.keys() - found.keys()
    assert not [record for record in await sent(bus, prefix, once=once) if _name(record) in nothing]


async def _play_bot(bus: Bus, prefix: str, *, once: bool) -> None:
    """Of 60 accepts of one user within a second, or two where the clock's second ends in between, ten a
    second count; the others are in quarantine, and so are their exposures."""
    names, user = [f"{prefix} {index}" for index in range(60)], f"user {prefix}"
    await bus.produce(messages(suggestion(name, user=user) for name in names))
    await bus.produce(messages(said(name, "accepted", user=user) for name in names))
    found = await judged(bus, names, once=once)
    scored = sum(became.reward is not None for became in found.values())
    assert 1 <= scored <= 20
    assert {became.quarantine for became in found.values()} == {
        "",
        "user: more than 10 accepts within a second",
    }
    marked = {
        r.group_id for r in await sent(bus, prefix, once=once) if isinstance(r, Exposure) and r.quarantined
    }
    assert marked == {name for name, became in found.items() if became.quarantine}


async def closed_live(bus: Bus) -> Counter[tuple[str, str]]:
    """(suggestion, how it closed) of all that is on `experience.live`."""
    out: Counter[tuple[str, str]] = Counter()
    for delivery in await everything(bus, EXPERIENCE_LIVE.name):
        record = decode(delivery.topic, delivery.value or b"", delivery.headers)
        out[record.group_id, record.closed] += 1  # type: ignore[attr-defined]
    return out


async def rewards(bus: Bus) -> dict[str, list[float]]:
    found = defaultdict(list)
    for delivery in await everything(bus, REWARDS.name):
        record = decode(delivery.topic, delivery.value or b"", delivery.headers)
        assert isinstance(record, Reward)
        found[record.group_id].append(record.value)
    return found

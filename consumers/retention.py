"""Which records the ledger of a run may still need, and how long the log keeps them.

Needed is what steps after the oldest live checkpoint have read, to compute them again from it, and what no
step has read yet. Pure but for `outlook`, which asks the log; nothing is kept or deleted here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from headrace.bus.protocol import Bus, TopicPartition
from headrace.consumers import kept
from headrace.wire.codec import at
from headrace.wire.records import TrainStep
from headrace.wire.topics import FOR_EVER

WARN_SHARE: Final = 0.1
"""Of the retention time: who has less left is warned. Nine days of ninety."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """`since`: the step of the oldest live checkpoint, 0 for the start of the run. `left_ms`: until retention
    may take the oldest record needed; None when it takes none."""

    since: int
    needed: dict[TopicPartition, int]
    """Oldest offset needed."""
    gone: dict[TopicPartition, int]
    """Where the log begins now, if that is later than what is needed."""
    gone_since_start: bool
    """Whether records that a replay from the very start needs are gone."""
    left_ms: int | None
    retention_ms: int | None
    """Of the topic that `left_ms` speaks of."""

    @property
    def state(self) -> Literal["kept", "soon", "gone"]:
        if self.gone:
            return "gone"
        if self.left_ms is None or self.retention_ms is None:
            return "kept"
        return "soon" if self.left_ms < WARN_SHARE * self.retention_ms else "kept"

    def gone_text(self) -> str:
        """`experience[0]@12..39, experience[2]@7..30`: the offsets that are needed and gone."""
        return ", ".join(
            f"{at(*tp, self.needed[tp])}..{begin - 1}" for tp, begin in sorted(self.gone.items())
        )


def needed(steps: Sequence[TrainStep], since: int) -> dict[TopicPartition, int]:
    """Of each partition, the oldest offset that a step after `since` has read, or the next that none has."""
    if not steps:
        return {}
    found = {_partition(name): offset for name, offset in steps[-1].positions.items()}
    for step in steps:
        for consumed in step.consumed if step.step > since else ():
            tp = TopicPartition(consumed.topic, consumed.partition)
            found[tp] = min(found.get(tp, consumed.offset), consumed.offset)
    return found


async def outlook(bus: Bus, steps: Sequence[TrainStep], *, now_ms: int) -> Outlook:
    """What the log has of what `steps`, a run's whole ledger, may need. Raises BusUnavailable."""
    since = min(kept.live(steps), default=0)
    wanted = needed(steps, since)
    topics = sorted({tp.topic for tp in wanted})
    begins = await bus.begins(topics)
    left = {topic: await _left_ms(bus, topic, wanted, begins, now_ms) for topic in topics}
    shortest = min((spell for spell in left.values() if spell is not None), default=None)
    return Outlook(
        since=since,
        needed=wanted,
        gone=_later(begins, wanted),
        gone_since_start=bool(_later(begins, needed(steps, 0))),
        left_ms=None if shortest is None else shortest[0],
        retention_ms=None if shortest is None else shortest[1],
    )


def _later(
    begins: Mapping[TopicPartition, int], wanted: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    return {tp: begins[tp] for tp, offset in wanted.items() if begins.get(tp, 0) > offset}


async def _left_ms(
    bus: Bus,
    topic: str,
    wanted: Mapping[TopicPartition, int],
    begins: Mapping[TopicPartition, int],
    now_ms: int,
) -> tuple[int, int] | None:
    """(until retention may take the oldest record that is needed, retention), or None when it takes none."""
    kept_ms = await bus.retention_ms(topic)
    if kept_ms == FOR_EVER:
        return None
    ends = await bus.ends([topic])
    times = []
    for tp, end in ends.items():
        start = max(wanted.get(tp, end), begins[tp])
        if start < end:
            async for delivery in bus.read_range(tp, start, end):
                times.append(delivery.timestamp_ms)
                break
    # Never negative: what is overdue goes at the next look of the log, and this clock may be ahead.
    return (max(0, min(times) + kept_ms - now_ms), kept_ms) if times else None


def _partition(name: str) -> TopicPartition:
    topic, _, partition = name.rpartition("/")
    return TopicPartition(topic, int(partition))

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
from headrace.wire.topics import EXPERIENCE, FOR_EVER

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
    retention_ms: int
    left_ms: int | None

    @property
    def state(self) -> Literal["kept", "soon", "gone"]:
        if self.gone:
            return "gone"
        soon = self.left_ms is not None and self.left_ms < WARN_SHARE * self.retention_ms
        return "soon" if soon else "kept"

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
    begins, ends = await bus.begins([EXPERIENCE.name]), await bus.ends([EXPERIENCE.name])
    kept_ms = await bus.retention_ms(EXPERIENCE.name)
    oldest_ms = None if kept_ms == FOR_EVER else await _oldest_ms(bus, wanted, begins, ends)
    return Outlook(
        since=since,
        needed=wanted,
        gone=_later(begins, wanted),
        gone_since_start=bool(_later(begins, needed(steps, 0))),
        retention_ms=kept_ms,
        # Never negative: what is overdue goes at the next look of the log, and this clock may be ahead.
        left_ms=None if oldest_ms is None else max(0, oldest_ms + kept_ms - now_ms),
    )


def _later(
    begins: Mapping[TopicPartition, int], wanted: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    return {tp: begins[tp] for tp, offset in wanted.items() if begins.get(tp, 0) > offset}


async def _oldest_ms(
    bus: Bus,
    wanted: Mapping[TopicPartition, int],
    begins: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> int | None:
    """Append time of the oldest record that is needed and there."""
    times = []
    for tp, offset in wanted.items():
        start, end = max(offset, begins.get(tp, 0)), ends.get(tp, 0)
        if start < end:
            async for delivery in bus.read_range(tp, start, end):
                times.append(delivery.timestamp_ms)
                break
    return min(times, default=None)


def _partition(name: str) -> TopicPartition:
    topic, _, partition = name.rpartition("/")
    return TopicPartition(topic, int(partition))

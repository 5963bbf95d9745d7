"""Which prompts of a partition are taken, finished, and may be committed: work finishes in any order, a
position never passes a prompt that is not finished.

Pure bookkeeping: it reads and commits nothing.
"""

from collections.abc import Iterable

from headrace.bus.protocol import TopicPartition


class Progress:
    """Offsets of several partitions. Deliveries that come again, after a rebalance or a failed commit, are
    known and not taken twice."""

    def __init__(self) -> None:
        self._finished: dict[TopicPartition, dict[int, bool]] = {}
        """Offsets taken and not yet behind the committable position, in the order of the log."""
        self._floor: dict[TopicPartition, int] = {}
        """Everything below is finished."""
        self._committed: dict[TopicPartition, int] = {}

    def take(self, tp: TopicPartition, offset: int) -> bool:
        """Whether this prompt is new; then it counts as unfinished from now on."""
        if offset < self._floor.get(tp, 0):
            self._committed.pop(tp, None)  # our commit had no effect: the partition was away for a moment
            return False
        if offset in self._finished.get(tp, {}):
            return False
        self._finished.setdefault(tp, {})[offset] = False
        return True

    def finish(self, tp: TopicPartition, offset: int) -> None:
        """Moves the position of `tp` over all that is finished without a hole. No effect after `lose`."""
        taken = self._finished.get(tp, {})
        if offset not in taken:
            return
        taken[offset] = True
        for first in sorted(taken):
            if not taken[first]:
                break
            del taken[first]
            self._floor[tp] = first + 1

    def lose(self, tps: Iterable[TopicPartition]) -> None:
        """Forgets partitions that are no longer ours: their new owner begins at the committed position."""
        for tp in tps:
            self._finished.pop(tp, None)
            self._floor.pop(tp, None)
            self._committed.pop(tp, None)

    def partitions(self) -> set[TopicPartition]:
        return self._finished.keys() | self._floor.keys()

    def uncommitted(self) -> dict[TopicPartition, int]:
        """Positions that have moved since `committed` was last told."""
        return {tp: floor for tp, floor in self._floor.items() if floor > self._committed.get(tp, 0)}

    def committed(self, positions: dict[TopicPartition, int]) -> None:
        self._committed.update(positions)

"""The states of one partition: events in, changes out. Pure, and what every host shares.

A host applies events in order of broker time, calls `advance` with the time that *all* inputs have reached,
and commits what `drain` returns together with its positions. Not here: reading, sending, clocks.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.errors import WireError
from headrace.streams.changelog import Cell, Changelog, Entry
from headrace.streams.processor import Event, Output, Processor, Result

KEY_BYTES_MAX = 500
TIMERS_MAX = 64
"""Timers fired by one call of `advance`: bounds what one transaction holds after a long pause."""


@dataclass(slots=True)
class Changes:
    """What happened since the last `drain`."""

    outputs: list[Output] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.outputs or self.entries)


class Fold:
    """`counts` adds up what the processor counted, and `in`; it may be given, to outlive the fold."""

    def __init__(self, processor: Processor, counts: Counter[str] | None = None) -> None:
        self._processor = processor
        self._changelog = Changelog(processor)
        self._cells: dict[str, Cell] = {}
        self._written: dict[str, tuple[int, ...] | None] = {}
        """Of keys changed since the last drain: the chunks that the changelog names, None when it has no
        head."""
        self._timers: list[tuple[int, str]] = []
        self._settled: dict[str, None] = {}
        self._weights: dict[str, int] = {}
        self._entries: list[Entry] = []
        self._outputs: list[Output] = []
        self.open_bytes = 0
        self.counts: Counter[str] = Counter() if counts is None else counts

    @property
    def open(self) -> int:
        return len(self._weights)

    @property
    def settled(self) -> int:
        return len(self._settled)

    @property
    def pending(self) -> int:
        """Outputs that wait for `drain`."""
        return len(self._outputs)

    @property
    def due_ms(self) -> int | None:
        """The earliest timer."""
        while self._timers:
            timer_ms, key = self._timers[0]
            cell = self._cells.get(key)
            if cell is not None and cell.timer_ms == timer_ms:
                return timer_ms
            heapq.heappop(self._timers)
        return None

    def restore(self, entries: Iterable[Entry], now_ms: int) -> None:
        """Takes the states over from a changelog; call once, first. A state that lost a segment is given up:
        the group is accounted, the stream goes on. Raises WireError."""
        restored = self._changelog.restore(entries)
        for key, cell in sorted(restored.cells.items(), key=lambda item: item[1].timer_ms or 0):
            self._cells[key] = cell
            self._weigh(key, cell.state)
            self._schedule(key, cell)
        for key, reason in restored.lost.items():
            self.counts["lost"] += 1
            self._take(key, self._processor.give_up(key, self._cells[key].state, reason, now_ms))
        self.counts["stray"] += len(restored.stray)
        self._entries += [(key, None) for key in restored.stray]

    def apply(self, event: Event) -> None:
        """Raises WireError, with nothing changed, for a record that makes no sense."""
        key = self._processor.key(event.record)
        if not 0 < len(key.encode()) <= KEY_BYTES_MAX or "\0" in key:
            raise WireError(f"key: expected 1 to {KEY_BYTES_MAX} bytes without NUL, got {key[:80]!r}")
        cell = self._cells.get(key)
        self._take(key, self._processor.handle(key, None if cell is None else cell.state, event))
        self.counts["in"] += 1
        self._bound(key, event.at_ms)

    def advance(self, now_ms: int) -> bool:
        """Fires what is due at `now_ms`, at most `TIMERS_MAX`; True when more is due."""
        for _ in range(TIMERS_MAX):
            due_ms = self.due_ms
            if due_ms is None or due_ms > now_ms:
                return False
            _, key = heapq.heappop(self._timers)
            cell = self._cells[key]
            cell.timer_ms = None
            self._take(key, self._processor.on_timer(key, cell.state, now_ms))
        return True

    def drain(self) -> Changes:
        """What must be committed now: each changed state once, however many events changed it."""
        changes = Changes(self._outputs, self._entries)
        for key, written in self._written.items():
            cell = self._cells.get(key)
            if cell is not None:
                changes.entries += self._changelog.write(key, cell, written or ())
            elif written is not None:
                changes.entries += self._changelog.forget(key, written)
        self._outputs, self._entries, self._written = [], [], {}
        return changes

    def _take(self, key: str, result: Result) -> None:
        self.counts.update(result.counts)
        self._outputs += result.outputs
        if not result.changed:
            return
        cell = self._cells.get(key)
        self._written.setdefault(key, None if cell is None else cell.chunks)
        if result.state is None:
            self._cells.pop(key, None)
            self._weigh(key, None)
            return
        if cell is None:
            cell = self._cells[key] = Cell(result.state)
        cell.state = result.state
        if cell.timer_ms != result.timer_ms:
            cell.timer_ms = result.timer_ms
            self._schedule(key, cell)
        self._weigh(key, result.state)

    def _bound(self, key: str, now_ms: int) -> None:
        processor = self._processor
        if key in self._weights:
            reason = ""
            if self.open > processor.open_max:
                reason = f"more than {processor.open_max} open groups in a partition"
            elif self.open_bytes > processor.open_bytes_max:
                reason = f"open groups of a partition hold more than {processor.open_bytes_max} bytes"
            if reason:
                self._take(key, processor.give_up(key, self._cells[key].state, reason, now_ms))
        while self.settled > processor.settled_max:
            self._take(next(iter(self._settled)), Result(None, counts=("forgotten_early",)))

    def _schedule(self, key: str, cell: Cell) -> None:
        if cell.timer_ms is not None:
            heapq.heappush(self._timers, (cell.timer_ms, key))

    def _weigh(self, key: str, state: object | None) -> None:
        weight = 0 if state is None else self._processor.weight(state)
        self.open_bytes += weight - self._weights.get(key, 0)
        if weight:
            self._weights[key] = weight
        else:
            self._weights.pop(key, None)
        if state is not None and not weight:
            self._settled.setdefault(key)
        else:
            self._settled.pop(key, None)

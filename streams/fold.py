"""The states of one partition: events in, changes out. Pure, and what every host shares.

A host applies events in order of broker time, calls `advance` with the time that *all* inputs have reached,
and commits what `drain` returns together with its positions. Not here: reading, sending, clocks.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import WireError
from headrace.streams.changelog import Cell, Changelog, Entry, latest
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
        self._cells: dict[str, Cell | bytes] = {}
        """Of a compact processor, between batches: the bytes of the head."""
        self._thawed: dict[str, bytes] = {}
        """Of a compact processor: what was decoded since the last drain."""
        self._written: dict[str, tuple[int, ...] | None] = {}
        """Of keys changed since the last drain: the chunks that the changelog names, None when it has no
        head."""
        self._times: list[int] = []
        self._keys_at: dict[int, list[str]] = {}
        """By time: whose timers may be due then; some are out of date. A list of many keys costs little for
        each."""
        self._sorted_ms: int | None = None
        """That time in `_keys_at` whose keys are in order."""
        self._settled: dict[str, None] = {}
        self._entries: list[Entry] = []
        self._outputs: list[Output] = []
        self.open = 0
        self.open_bytes = 0
        self.counts: Counter[str] = Counter() if counts is None else counts

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
        while self._times:
            time_ms = self._times[0]
            keys = self._keys_at[time_ms]
            if time_ms != self._sorted_ms:
                keys.sort(reverse=True)
                self._sorted_ms = time_ms
            while keys:
                cell = self._cell(keys[-1])
                if cell is not None and cell.timer_ms == time_ms:
                    return time_ms
                keys.pop()
            heapq.heappop(self._times)
            del self._keys_at[time_ms]
        return None

    def restore(self, entries: Iterable[Entry], now_ms: int) -> None:
        """Takes the states over from a changelog; call once, first. A state that lost a segment is given up:
        the group is accounted, the stream goes on. Raises WireError."""
        if self._processor.compact:
            self._restore_compact(latest(entries))
            return
        restored = self._changelog.restore(entries)
        for key, cell in sorted(restored.cells.items(), key=lambda item: item[1].timer_ms or 0):
            self._cells[key] = cell
            self._weigh(key, cell)
            self._schedule(key, cell)
        for key, reason in restored.lost.items():
            self.counts["lost"] += 1
            self._take(key, self._processor.give_up(key, self._state(key), reason, now_ms))
        self.counts["stray"] += len(restored.stray)
        self._entries += [(key, None) for key in restored.stray]

    def _restore_compact(self, values: dict[bytes, bytes]) -> None:
        """Takes `values` over one by one: never all of them decoded."""
        settled = []
        while values:
            encoded, value = values.popitem()
            key = encoded.decode()
            cell = self._changelog.thawed(key, value)
            self._weigh(key, cell)
            self._schedule(key, cell)
            self._cells[key] = value
            if not cell.weight:
                settled.append((cell.timer_ms or 0, key))
        self._settled = {key: None for _, key in sorted(settled)}

    def apply(self, event: Event) -> None:
        """Raises WireError, with nothing changed, for a record that makes no sense."""
        key = self._processor.key(event.record)
        if not 0 < len(key.encode()) <= KEY_BYTES_MAX or "\0" in key:
            raise WireError(f"key: expected 1 to {KEY_BYTES_MAX} bytes without NUL, got {key[:80]!r}")
        self._take(key, self._processor.handle(key, self._state(key), event))
        self.counts["in"] += 1
        self._bound(key, event.at_ms)

    def advance(self, now_ms: int) -> bool:
        """Fires what is due at `now_ms`, at most `TIMERS_MAX`; True when more is due."""
        for _ in range(TIMERS_MAX):
            due_ms = self.due_ms
            if due_ms is None or due_ms > now_ms:
                return False
            key = self._keys_at[due_ms].pop()
            cell = self._cell(key)
            assert cell is not None, key
            cell.timer_ms = None
            self._take(key, self._processor.on_timer(key, cell.state, now_ms))
        return True

    def drain(self) -> Changes:
        """What must be committed now: each changed state once, however many events changed it."""
        changes = Changes(self._outputs, self._entries)
        for key, written in self._written.items():
            cell = self._cells.get(key)
            if cell is None:
                changes.entries += () if written is None else self._changelog.forget(key, written)
                continue
            assert isinstance(cell, Cell), key
            entries = self._changelog.write(key, cell, written or ())
            changes.entries += entries
            if self._processor.compact:
                ((_, head),) = entries
                assert head is not None, key
                self._thawed[key] = head
        for key, head in self._thawed.items():
            if key in self._cells:
                self._cells[key] = head
        self._outputs, self._entries, self._written, self._thawed = [], [], {}, {}
        return changes

    def _cell(self, key: str) -> Cell | None:
        cell = self._cells.get(key)
        if isinstance(cell, bytes):
            self._thawed[key] = cell
            cell = self._cells[key] = self._changelog.thawed(key, cell)
            cell.weight = self._processor.weight(cell.state)
        return cell

    def _state(self, key: str) -> Any:
        cell = self._cell(key)
        return None if cell is None else cell.state

    def _take(self, key: str, result: Result) -> None:
        self.counts.update(result.counts)
        self._outputs += result.outputs
        if not result.changed:
            return
        cell = self._cell(key)
        self._written.setdefault(key, None if cell is None else cell.chunks)
        if result.state is None:
            self._forget(key, cell)
            return
        if cell is None:
            cell = self._cells[key] = Cell(result.state)
        cell.state = result.state
        if cell.timer_ms != result.timer_ms:
            cell.timer_ms = result.timer_ms
            self._schedule(key, cell)
        self._weigh(key, cell)

    def _forget(self, key: str, cell: Cell | None) -> None:
        if cell is not None:
            self.open -= cell.weight > 0
            self.open_bytes -= cell.weight
        self._cells.pop(key, None)
        self._settled.pop(key, None)

    def _bound(self, key: str, now_ms: int) -> None:
        processor, cell = self._processor, self._cell(key)
        if cell is not None and cell.weight:
            reason = ""
            if self.open > processor.open_max:
                reason = f"more than {processor.open_max} open groups in a partition"
            elif self.open_bytes > processor.open_bytes_max:
                reason = f"open groups of a partition hold more than {processor.open_bytes_max} bytes"
            if reason:
                self._take(key, processor.give_up(key, cell.state, reason, now_ms))
        while self.settled > processor.settled_max:
            self._take(next(iter(self._settled)), Result(None, counts=("forgotten_early",)))

    def _schedule(self, key: str, cell: Cell) -> None:
        if cell.timer_ms is None:
            return
        if cell.timer_ms == self._sorted_ms:
            self._sorted_ms = None
        keys = self._keys_at.get(cell.timer_ms)
        if keys is None:
            keys = self._keys_at[cell.timer_ms] = []
            heapq.heappush(self._times, cell.timer_ms)
        keys.append(key)

    def _weigh(self, key: str, cell: Cell) -> None:
        weight = self._processor.weight(cell.state)
        self.open += (weight > 0) - (cell.weight > 0)
        self.open_bytes += weight - cell.weight
        cell.weight = weight
        self._settled.pop(key, None)
        if not weight:
            self._settled[key] = None

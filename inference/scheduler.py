"""Who gets a slot next: two bounded lanes, live strictly before rollouts. Pure bookkeeping: no tensors, no
clock.

A *slot* is the place of one sequence in the decoder. Rollouts never hold more than `slots - live_slots`, so
a live sequence always finds one that rollouts can't take. While one is at work rollouts stand still, but for
one step in LIVE_STEPS, so that they end too where live ones never do. While the next one is expected
`beside_live` go on, in small, quick steps. Any thread may offer; only the engine's takes.
"""

import threading
from collections import deque
from typing import Final, Generic, TypeVar

from headrace.errors import Overloaded
from headrace.rpc.generation import Lane

_T = TypeVar("_T")

LIVE_ROUNDS: Final = 64
"""Steps after the last live sequence in which the next one is still expected: half a second or so. One that
comes in the middle of a step has to wait for its end."""


LIVE_STEPS: Final = 8
"""Of so many steps with a live sequence one has rollouts in it."""


class Scheduler(Generic[_T]):
    """`T` is whatever waits (the engine's sequences)."""

    def __init__(self, *, slots: int, live_slots: int, beside_live: int, queue_max: int) -> None:
        assert 0 <= live_slots < slots, f"expected 0 <= live_slots < slots, got {live_slots} and {slots}"
        self._queue_max = queue_max
        self._rollout_slots_max = slots - live_slots
        self._beside_live = beside_live
        self._rollout_slots = 0
        self._live_rounds = 0
        self._rounds = 0
        self._free = list(range(slots - 1, -1, -1))
        self._lane_of: dict[int, Lane] = {}
        self._waiting: dict[Lane, deque[_T]] = {"live": deque(), "rollout": deque()}
        self._begun: deque[_T] = deque()
        """Rollouts that wait for a later turn."""
        self._changed = threading.Condition()
        self._woken = False

    def offer(self, lane: Lane, items: list[_T], place: str, *, begun: bool = False) -> None:
        """Queues all of `items`, or none; rollouts that have `begun` before those that have not: what they
        wrote grows old. Raises Overloaded when they don't fit beside those that wait."""
        with self._changed:
            waiting = self.queued(lane)
            if waiting + len(items) > self._queue_max:
                raise Overloaded(
                    f"{place}: expected room for {len(items)} in the {lane} queue, got {waiting} of "
                    f"{self._queue_max} waiting"
                )
            (self._begun if begun and lane == "rollout" else self._waiting[lane]).extend(items)
            self._woken = True
            self._changed.notify()

    def begin_round(self) -> None:
        """Once a step, before `peek`."""
        with self._changed:
            self._live_rounds = max(0, self._live_rounds - 1)
            self._rounds += 1

    def peek(self) -> tuple[Lane, _T] | None:
        """Who is next and may have a slot now."""
        with self._changed:
            if not self._free:
                return None
            if self._waiting["live"]:
                return "live", self._waiting["live"][0]
            allowed = min(self._rollout_slots_max, self.rollouts_max)
            if self.queued("rollout") and self._rollout_slots < allowed:
                return "rollout", self._next("rollout")[0]
            return None

    def take(self, lane: Lane) -> int:
        """The slot for the head of `lane`, which `peek` has named; it leaves the queue."""
        with self._changed:
            self._next(lane).popleft()
            slot = self._free.pop()
            self._lane_of[slot] = lane
            self._rollout_slots += lane == "rollout"
            return slot

    def give_back(self, slot: int) -> None:
        """Makes a taken slot free again."""
        with self._changed:
            lane = self._lane_of.pop(slot)
            self._rollout_slots -= lane == "rollout"
            self._live_rounds = LIVE_ROUNDS if lane == "live" else self._live_rounds
            self._free.append(slot)

    def remove(self, items: list[_T]) -> list[_T]:
        """Those of `items` that still waited; they leave their queue."""
        gone: list[_T] = []
        wanted = {id(item) for item in items}
        with self._changed:
            for lane, waiting in self._waiting.items():
                gone += [item for item in waiting if id(item) in wanted]
                self._waiting[lane] = deque(item for item in waiting if id(item) not in wanted)
            gone += [item for item in self._begun if id(item) in wanted]
            self._begun = deque(item for item in self._begun if id(item) not in wanted)
        return gone

    def wake(self) -> None:
        """Ends this `wait`, or the next: something else than a new sequence wants the engine's attention."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        """Returns at the next `offer`, after a `wake`, or when `timeout_s` is over."""
        with self._changed:
            if not self._woken:
                self._changed.wait(timeout_s)
            self._woken = False

    @property
    def live_near(self) -> bool:
        """A live sequence holds a slot, or did a moment ago."""
        return self._live_rounds > 0 or self._live_runs

    @property
    def rollouts_max(self) -> int:
        """Rollouts that may have a part in a step as things are."""
        if self._live_runs and self._rounds % LIVE_STEPS:
            return 0
        return self._beside_live if self.live_near else self._rollout_slots_max

    @property
    def _live_runs(self) -> bool:
        return len(self._lane_of) > self._rollout_slots

    @property
    def slots_used(self) -> int:
        return len(self._lane_of)

    def queued(self, lane: Lane) -> int:
        return len(self._waiting[lane]) + (len(self._begun) if lane == "rollout" else 0)

    def _next(self, lane: Lane) -> deque[_T]:
        """The queue whose head is the lane's next."""
        return self._begun if lane == "rollout" and self._begun else self._waiting[lane]

"""Slots and lanes, as bookkeeping alone."""

import threading

import pytest

from headrace.errors import Overloaded
from headrace.inference.scheduler import LIVE_ROUNDS, LIVE_STEPS, Scheduler


def scheduler(slots: int = 3, live_slots: int = 1, beside: int = 9, queue_max: int = 4) -> Scheduler[str]:
    return Scheduler(slots=slots, live_slots=live_slots, beside_live=beside, queue_max=queue_max)


def drain(queue: Scheduler[str]) -> list[str]:
    taken = []
    while (head := queue.peek()) is not None:
        queue.take(head[0])
        taken.append(head[1])
    return taken


def test_live_overtakes_and_finds_its_slot() -> None:
    """Of three slots one is live's: two rollouts run, the third waits, and a later live sequence runs at
    once."""
    queue = scheduler()
    queue.offer("rollout", ["r1", "r2", "r3"], "t")
    assert drain(queue) == ["r1", "r2"]
    queue.offer("live", ["l1"], "t")
    assert drain(queue) == ["l1"]
    assert queue.slots_used == 3
    assert queue.queued("rollout") == 1


def test_live_goes_before_older_rollouts() -> None:
    """What is live is served before every rollout that waits, however long it has."""
    queue = scheduler(slots=4)
    queue.offer("rollout", ["r1", "r2"], "t")
    queue.offer("live", ["l1", "l2"], "t")
    assert drain(queue) == ["l1", "l2", "r1", "r2"]


def test_later_turns_go_before_first_ones() -> None:
    """A rollout that has begun goes before all that have not, in its own order, counts in the queue's bound,
    and can be taken out."""
    queue = scheduler(slots=9, queue_max=6)
    queue.offer("rollout", ["r1", "r2"], "t")
    queue.offer("rollout", ["a1", "a2", "a3"], "t", begun=True)
    assert queue.queued("rollout") == 5
    with pytest.raises(Overloaded, match="got 5 of 6 waiting"):
        queue.offer("rollout", ["r3", "r4"], "t")
    assert queue.remove(["a2"]) == ["a2"]
    assert drain(queue) == ["a1", "a3", "r1", "r2"]


def test_few_rollouts_beside_live() -> None:
    """While a live sequence holds a slot rollouts get their few, in one step of LIVE_STEPS; a while after it
    is gone, all of theirs."""
    queue = scheduler(slots=6, beside=2, queue_max=9)
    queue.offer("rollout", [f"r{n}" for n in range(7)], "t")
    queue.offer("live", ["l1"], "t")
    live = queue.peek()
    assert live == ("live", "l1")
    slot = queue.take("live")
    assert drain(queue) == ["r0", "r1"]
    allowed = []
    for _ in range(2 * LIVE_STEPS):
        queue.begin_round()
        allowed.append(queue.rollouts_max)
    assert allowed == 2 * ([0] * (LIVE_STEPS - 1) + [2])
    queue.begin_round()
    assert queue.peek() is None
    queue.give_back(slot)
    for _ in range(LIVE_ROUNDS):
        assert (queue.live_near, queue.rollouts_max) == (True, 2)
        queue.begin_round()
    assert (queue.live_near, queue.rollouts_max) == (False, 5)
    assert drain(queue) == ["r2", "r3", "r4"]


def test_given_back_slots_return() -> None:
    """Ten times the slots taken and given back leave all of them free, to both lanes."""
    queue = scheduler()
    for _ in range(10):
        queue.offer("rollout", ["r1", "r2"], "t")
        queue.offer("live", ["l"], "t")
        slots = []
        while (head := queue.peek()) is not None:
            slots.append(queue.take(head[0]))
        assert sorted(slots) == [0, 1, 2]
        for slot in slots:
            queue.give_back(slot)
    assert queue.slots_used == 0


def test_full_queue_refuses_the_whole_offer() -> None:
    """Three wait of at most four: an offer of two is refused, and none of it queues; the other lane is
    open."""
    queue = scheduler()
    queue.offer("rollout", ["r1", "r2", "r3"], "t")
    with pytest.raises(Overloaded, match=r"t: expected room for 2 in the rollout queue, got 3 of 4 waiting"):
        queue.offer("rollout", ["r4", "r5"], "t")
    queue.offer("live", ["l1", "l2"], "t")
    assert (queue.queued("rollout"), queue.queued("live")) == (3, 2)


def test_remove_takes_only_what_waits() -> None:
    """A running sequence is not in the queue any more; what waited is out, the rest keeps its order."""
    queue = scheduler(slots=2)
    queue.offer("rollout", ["r1", "r2", "r3", "r4"], "t")
    assert drain(queue) == ["r1"]
    assert queue.remove(["r1", "r3"]) == ["r3"]
    assert queue.queued("rollout") == 2


def test_a_wake_before_the_wait_is_not_lost() -> None:
    """`wake`, then `wait`: it returns at once instead of sleeping through its time."""
    queue = scheduler()
    queue.wake()
    waiter = threading.Thread(target=queue.wait, args=(600.0,), daemon=True)
    waiter.start()
    waiter.join(60)
    assert not waiter.is_alive()

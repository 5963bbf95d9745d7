"""Who reads what in a group of the embedded log: balanced, sticky, co-partitioned."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.bus.protocol import TopicPartition
from headrace.bus.sqlite.assignment import assign

BOTH = frozenset({"a", "b"})


def owners(assigned: dict[TopicPartition, str], topic: str) -> str:
    """Owners of the partitions of `topic`, in order: "xxyy"."""
    return "".join(assigned[tp] for tp in sorted(assigned) if tp.topic == topic)


def test_a_member_joins_and_leaves() -> None:
    """x has all; y takes two; when x leaves, y takes the rest. Both topics move together."""
    counts = {"a": 4, "b": 4}
    alone = assign(counts, {"x": BOTH}, {})
    assert owners(alone, "a") == owners(alone, "b") == "xxxx"
    shared = assign(counts, {"x": BOTH, "y": BOTH}, alone)
    assert owners(shared, "a") == owners(shared, "b") == "xxyy"
    assert owners(assign(counts, {"y": BOTH}, shared), "a") == "yyyy"


def test_more_members_than_partitions() -> None:
    """One of three members of a topic with two partitions stays idle, and the others keep what they have."""
    before = assign({"a": 2}, {"x": frozenset("a"), "y": frozenset("a")}, {})
    after = assign({"a": 2}, {m: frozenset("a") for m in "wxy"}, before)
    assert after == before


def test_members_with_different_topics() -> None:
    """A topic goes only to those who read it."""
    assigned = assign({"a": 2, "b": 2}, {"x": BOTH, "y": frozenset("a")}, {})
    assert owners(assigned, "a") == "xy"
    assert owners(assigned, "b") == "xx"


@given(st.lists(st.sets(st.sampled_from("vwxyz"), min_size=1), min_size=2, max_size=6), st.integers(1, 9))
def test_any_sequence_of_members(groups: list[set[str]], partitions: int) -> None:
    """After every change: complete, balanced within one, and no partition moved between two members that both
    stayed unless balance asked for it.
    """
    assigned: dict[TopicPartition, str] = {}
    for members in groups:
        before, assigned = (
            assigned,
            assign({"a": partitions}, dict.fromkeys(members, frozenset("a")), assigned),
        )
        loads = [list(assigned.values()).count(member) for member in members]
        assert sum(loads) == len(assigned) == partitions
        assert max(loads) - min(loads) <= 1
        moved = [tp for tp in assigned if before.get(tp) in members and before[tp] != assigned[tp]]
        share = partitions // len(members)
        for tp in moved:  # its old owner had more than its share
            assert list(before.values()).count(before[tp]) > share

"""Which member of a group reads which partition: a pure function.

Balanced (within one), sticky (a partition moves only when balance asks for it), and co-partitioned: topics
that the same members read are dealt out by partition number, so that whoever has `rollout.steps[2]` has
`rewards[2]` too, as with Kafka's range assignor.
"""

from collections import defaultdict
from collections.abc import Mapping

from headrace.bus.protocol import TopicPartition


def assign(
    partitions: Mapping[str, int],
    subscriptions: Mapping[str, frozenset[str]],
    owners: Mapping[TopicPartition, str],
) -> dict[TopicPartition, str]:
    """Owner of every partition that somebody reads.

    `partitions`: number by topic; `subscriptions`: topics by member id; `owners`: who has them now.
    """
    readers: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for topic in sorted(partitions):
        members = tuple(sorted(member for member, topics in subscriptions.items() if topic in topics))
        if members:
            readers[members].append(topic)
    assigned: dict[TopicPartition, str] = {}
    for members, topics in readers.items():
        for number, member in _deal(members, topics, partitions, owners).items():
            for topic in topics:
                if number < partitions[topic]:
                    assigned[TopicPartition(topic, number)] = member
    return assigned


def _deal(
    members: tuple[str, ...],
    topics: list[str],
    partitions: Mapping[str, int],
    owners: Mapping[TopicPartition, str],
) -> dict[int, str]:
    """Partition numbers over `members`; a number's present owner is that of its first topic that has one."""
    count = max(partitions[topic] for topic in topics)
    share, larger = divmod(count, len(members))
    held: dict[str, list[int]] = {member: [] for member in members}
    free = []
    for number in range(count):
        now = next((o for topic in topics if (o := owners.get(TopicPartition(topic, number))) in held), None)
        if now is None:
            free.append(number)
        else:
            held[now].append(number)
    by_load = sorted(members, key=lambda member: (-len(held[member]), member))
    quota = {member: share + (rank < larger) for rank, member in enumerate(by_load)}
    for member in members:
        while len(held[member]) > quota[member]:
            free.append(held[member].pop())
    free.sort()
    for member in members:
        while len(held[member]) < quota[member]:
            held[member].append(free.pop(0))
    return {number: member for member, numbers in held.items() for number in numbers}

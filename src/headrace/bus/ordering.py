"""The records of several partitions in one order, on either bus."""

from collections.abc import Mapping, Sequence

from headrace.bus.protocol import Delivery, TopicPartition


def in_time_order(
    deliveries: Sequence[Delivery], reached_ms: Mapping[TopicPartition, int]
) -> list[tuple[int, Delivery]]:
    """The deliveries of all partitions merged by broker time, each with its time.

    Within a partition the order stays and time never runs backwards, whatever the broker's clock did;
    `reached_ms` is where each partition stood before.
    """
    latest = dict(reached_ms)
    timed = []
    for delivery in deliveries:
        at_ms = latest[delivery.tp] = max(delivery.timestamp_ms, latest.get(delivery.tp, 0))
        timed.append((at_ms, delivery))
    return sorted(timed, key=lambda pair: pair[0])

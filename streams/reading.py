"""From a delivery to an event of a fold: decoded, checked, in order of broker time. What both hosts do with
what they read."""

from collections.abc import Mapping, Sequence

from headrace.bus.protocol import Delivery, TopicPartition
from headrace.errors import WireError
from headrace.streams.fold import Fold
from headrace.streams.processor import Event, Processor
from headrace.wire.codec import decode


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


def apply(fold: Fold, processor: Processor, delivery: Delivery, at_ms: int) -> str:
    """Folds `delivery` in and returns its key. Raises WireError, with nothing changed, for a record that
    can't be decoded or makes no sense."""
    if delivery.value is None:
        raise WireError("value: expected a record, got a tombstone")
    record = decode(delivery.topic, delivery.value, delivery.headers)
    key = processor.key(record)
    if delivery.key != key.encode():
        raise WireError(f"key: expected {key[:80]!r} as in the record, got {delivery.key!r:.80}")
    fold.apply(Event(delivery.topic, delivery.partition, delivery.offset, at_ms, record))
    return key

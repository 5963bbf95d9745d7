"""From a delivery to an event of a fold: decoded and checked. What both hosts do with what they read."""

from headrace.bus.protocol import Delivery
from headrace.errors import WireError
from headrace.streams.fold import Fold
from headrace.streams.processor import Event, Processor
from headrace.wire.codec import decode


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

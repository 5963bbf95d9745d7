"""What becomes of a record that cannot be decoded or handled: a `DeadLetter` with its bytes and its place,
and the way back.

Not here: the decision to give a record up (each reader), listing (`headrace dead-letters`).
"""

from headrace.bus.protocol import Bus, Delivery, Message, TopicPartition
from headrace.errors import OffsetGone, RecordTooLarge, WireError
from headrace.wire.codec import decode, encode
from headrace.wire.records import DeadLetter, Record
from headrace.wire.topics import DEAD_LETTERS, RECORD_BYTES_MAX

REASON_CHARS_MAX = 2000
CUT_BYTES = (
    RECORD_BYTES_MAX - 60_000
)  # leaves room for key and headers (40,000), the reason and the frame of zstd
CUT_MARK = " [value cut to its beginning]"


def decode_or_dead_letter(delivery: Delivery, *, by: str, now_ms: int) -> Record | Message:
    """The record in `delivery`, or the message that puts it on `dead.letters`: produce it before committing
    past.
    """
    try:
        if delivery.value is None:
            raise WireError("value: expected a record, got a tombstone")
        return decode(delivery.topic, delivery.value, delivery.headers)
    except WireError as error:
        return dead_letter(delivery, error, by, now_ms)


def dead_letter(delivery: Delivery, error: Exception, by: str, now_ms: int) -> Message:
    """The message for `dead.letters`. Its id is the origin's place: sent twice, it is the same letter.

    A value that does not fit beside its headers is cut to its beginning, and the reason says so.
    """
    place = f"{delivery.topic}/{delivery.partition}/{delivery.offset}"
    reason = f"{delivery.place}: {error}"[:REASON_CHARS_MAX]

    def letter(value: bytes, reason: str) -> Message:
        record = DeadLetter(
            topic=delivery.topic,
            partition=delivery.partition,
            offset=delivery.offset,
            key=delivery.key,
            value=value,
            headers=delivery.headers,
            error=type(error).__name__,
            reason=reason,
            by=by,
            at_ms=now_ms,
        )
        encoded, headers = encode(
            record, source=by, now_ms=now_ms, event_id=place, parent=delivery.header("traceparent")
        )
        return Message(DEAD_LETTERS.name, place.encode(), encoded, headers)

    value = delivery.value or b""
    try:
        return letter(value, reason)
    except RecordTooLarge:
        return letter(value[:CUT_BYTES], reason + CUT_MARK)


async def redrive(bus: Bus, letter: DeadLetter) -> int:
    """Sends the original record again, to where its key belongs, and returns its new offset.

    A cut value is read from its origin. Raises OffsetGone when the origin is no longer kept. Not idempotent:
    each call sends.
    """
    value = letter.value
    if letter.reason.endswith(CUT_MARK):
        value = await _original(bus, letter)
    partition = letter.partition if letter.key is None else None
    [offset] = await bus.produce([Message(letter.topic, letter.key, value, letter.headers, partition)])
    return offset


async def _original(bus: Bus, letter: DeadLetter) -> bytes:
    tp = TopicPartition(letter.topic, letter.partition)
    async for delivery in bus.read_range(tp, letter.offset, letter.offset + 1):
        return delivery.value or b""
    raise OffsetGone(f"{tp}@{letter.offset}: expected the record behind a cut dead letter, there is none")

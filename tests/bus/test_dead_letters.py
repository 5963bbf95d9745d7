"""A record that cannot be handled keeps its bytes and its place, and finds its way back."""

import asyncio
import os

import pytest

from headrace.bus import open_bus
from headrace.bus.dead_letters import CUT_BYTES, dead_letter, decode_or_dead_letter, redrive
from headrace.bus.protocol import Delivery, Message
from headrace.errors import OffsetGone, WireError
from headrace.wire.codec import decode, encode
from headrace.wire.records import DeadLetter, Reward
from headrace.wire.topics import DEAD_LETTERS, RECORD_BYTES_MAX, REWARDS

REWARD = Reward(run="r", group_id="g", member=0, attempt=1, component="tests", value=1.0)


def delivery(value: bytes | None, headers: tuple[tuple[str, bytes], ...] = ()) -> Delivery:
    return Delivery("rewards", 2, 41, 1000, b"g", value, headers)


def letter_of(message: Message) -> DeadLetter:
    assert message.value is not None
    record = decode(message.topic, message.value, message.headers)
    assert isinstance(record, DeadLetter)
    return record


def test_good_record_is_decoded() -> None:
    """A record that decodes is returned as such."""
    value, headers = encode(REWARD, source="t", now_ms=5)
    assert decode_or_dead_letter(delivery(value, headers), by="w", now_ms=6) == REWARD


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"\xc1", b"headrace.Reward.v1"),
        (b"\x81", b"headrace.Unheard.v9"),
        (b"\xdd\xff\xff\xff\xff", b"headrace.Reward.v1"),
        (b"\x91" * 5000, b"headrace.Reward.v1"),
        (None, b"headrace.Reward.v1"),
    ],
    ids=["undecodable", "unknown type", "bomb of length", "bomb of depth", "tombstone"],
)
def test_bad_record_becomes_a_letter(value: bytes | None, kind: bytes) -> None:
    """Undecodable bytes, an unknown type, msgpack bombs, a tombstone: a letter with the bytes, the place and
    the reason.
    """
    message = decode_or_dead_letter(delivery(value, (("ce_type", kind),)), by="worker-1", now_ms=9)
    assert isinstance(message, Message)
    assert (message.topic, message.key) == (DEAD_LETTERS.name, b"rewards/2/41")
    letter = letter_of(message)
    assert (letter.topic, letter.partition, letter.offset, letter.key) == ("rewards", 2, 41, b"g")
    assert letter.value == (value or b"")
    assert letter.headers == (("ce_type", kind),)
    assert letter.error == "WireError"
    assert letter.reason.startswith("rewards[2]@41: ")
    assert (letter.by, letter.at_ms) == ("worker-1", 9)


def test_letter_has_a_stable_id_and_the_origins_trace() -> None:
    """Sent twice it has the same id; its span lies in the trace of the record."""
    trace = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
    origin = delivery(b"x", (("traceparent", trace),))
    first, second = (dict(dead_letter(origin, WireError("no"), "w", now).headers) for now in (1, 2))
    assert first["ce_id"] == second["ce_id"] == b"rewards/2/41"
    assert first["traceparent"][3:35] == b"a" * 32


def test_redriven_record_is_the_original() -> None:
    """Key, bytes and headers as they were, in the partition of the key."""

    async def run() -> None:
        async with open_bus("sqlite::memory:") as bus:
            await bus.create_topics([REWARDS])
            letter = letter_of(dead_letter(delivery(b"\xc1", (("h", b"x"),)), WireError("no"), "w", 1))
            offset = await redrive(bus, letter)
            ends = await bus.ends(["rewards"])
            [tp] = [tp for tp, end in ends.items() if end]
            [back] = [d async for d in bus.read_range(tp, offset, offset + 1)]
            assert (back.key, back.value, back.headers) == (b"g", b"\xc1", (("h", b"x"),))

    asyncio.run(run())


def test_largest_record_is_cut_and_still_comes_back_whole() -> None:
    """A value too large to be wrapped is cut, the reason says so, and the redrive takes the whole one from
    its origin.
    """
    value = os.urandom(RECORD_BYTES_MAX)

    async def run() -> None:
        async with open_bus("sqlite::memory:") as bus:
            await bus.create_topics([REWARDS, DEAD_LETTERS])
            headers = (("h", b"x" * 39_000),)
            [at] = await bus.produce([Message("rewards", b"g", value, headers)])
            [tp] = [tp for tp, end in (await bus.ends(["rewards"])).items() if end]
            [origin] = [d async for d in bus.read_range(tp, at, at + 1)]
            message = dead_letter(origin, WireError("no"), "w", 1)
            await bus.produce([message])
            letter = letter_of(message)
            assert letter.value == value[:CUT_BYTES]
            assert "cut" in letter.reason
            again = await redrive(bus, letter)
            [back] = [d async for d in bus.read_range(tp, again, again + 1)]
            assert back.value == value
            elsewhere = DeadLetter(
                **{f: getattr(letter, f) for f in letter.__struct_fields__} | {"offset": 77}
            )
            with pytest.raises(OffsetGone, match="77"):
                await redrive(bus, elsewhere)

    asyncio.run(run())

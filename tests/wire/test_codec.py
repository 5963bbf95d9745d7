"""The format of records: golden vectors, compatibility, limits, hostile bytes."""

import hashlib
import json
import random
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RecordTooLarge, WireError
from headrace.wire import asyncapi, codec, packed
from headrace.wire import records as r
from headrace.wire.examples import EXAMPLES
from headrace.wire.topics import RECORD_BYTES_MAX, TOPICS

GOLDEN = Path(__file__).with_name("golden.json")
DICTIONARY_SHA256 = "97afe555b72ba597f4bbadd382983703f09137249352cba207706c9b32875dff"
TOPIC_OF = {t.__name__: topic.name for topic in TOPICS.values() for t in topic.records}


def test_golden_vectors_hold_the_format_still() -> None:
    """Every example encodes to the recorded bytes, and those bytes decode to the example."""
    golden = json.loads(GOLDEN.read_text())
    assert {name: codec.encode_plain(record).hex() for name, record in EXAMPLES.items()} == golden
    for name, record in EXAMPLES.items():
        assert codec.decode_as(type(record), bytes.fromhex(golden[name])) == record


def test_records_of_an_older_writer_are_read() -> None:
    """Bytes from before a field existed decode, with the field's default."""
    older = json.loads(GOLDEN.with_name("golden_older.json").read_text())
    step = codec.decode_as(r.TrainStep, bytes.fromhex(older["TrainStep"]))
    assert (step.consumed[0].env, step.consumed[0].tokens, step.checkpoints_pruned) == ("", 0, ())
    assert step.checkpoint is not None
    assert (step.checkpoint.step, step.checkpoint.bytes) == (None, 0)
    assert codec.decode_as(r.Experience, bytes.fromhex(older["Experience"])).user == ""
    turn = codec.decode_as(r.RolloutStep, bytes.fromhex(older["RolloutStep"]))
    assert (turn.user, turn.cohort, turn.text_length) == ("", "", 0)
    told = codec.decode_as(r.Feedback, bytes.fromhex(older["Feedback"]))
    assert (told.continues, told.region, told.text) == (None, "local", b"")
    promoted = codec.decode_as(r.WeightsPromoted, bytes.fromhex(older["WeightsPromoted"]))
    assert (promoted.pinned, promoted.by) == (False, "canary")
    assert codec.decode_as(r.WeightsRevoked, bytes.fromhex(older["WeightsRevoked"])).by == "canary"
    ack = codec.decode_as(r.WeightsAck, bytes.fromhex(older["WeightsAck"]))
    assert (ack.role, ack.unfit) == ("", False)
    assert codec.decode_as(r.WeightsPublished, bytes.fromhex(older["WeightsPublished"])).checkpoint is None


def test_every_record_on_a_topic_has_an_example() -> None:
    """A record without a golden vector could change unseen."""
    assert set(TOPIC_OF) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_round_trip_with_headers(name: str) -> None:
    """What was encoded for a topic is what is decoded from it."""
    value, headers = codec.encode(EXAMPLES[name], source="test", now_ms=1_767_225_600_123, event_id="id-1")
    assert codec.decode(TOPIC_OF[name], value, headers) == EXAMPLES[name]
    known = dict(headers)
    assert known["ce_id"] == b"id-1"
    assert known["ce_time"] == b"2026-01-01T00:00:00.123Z"
    assert known["ce_type"] == f"headrace.{name}.v1".encode()


def test_a_reader_ignores_fields_of_a_newer_writer() -> None:
    """A v1 reader takes a record that has one more field."""
    tree = msgspec.to_builtins(EXAMPLES["Reward"]) | {"confidence": 0.5}
    assert codec.decode_as(r.Reward, msgspec.msgpack.encode(tree)) == EXAMPLES["Reward"]


def test_a_missing_field_is_refused_by_name() -> None:
    """The message names the record and the field."""
    tree = msgspec.to_builtins(EXAMPLES["Reward"])
    del tree["component"]
    with pytest.raises(WireError, match=r"Reward: .*component"):
        codec.decode_as(r.Reward, msgspec.msgpack.encode(tree))


def test_a_wrong_type_is_refused_with_its_path() -> None:
    """The message leads to the field inside the record."""
    tree = msgspec.to_builtins(EXAMPLES["TrainStep"], builtin_types=(bytes,))
    tree["consumed"][0]["offset"] = "far"
    with pytest.raises(WireError, match=r"TrainStep: .*int.*str.*consumed\[0\]\.offset|offset"):
        codec.decode_as(r.TrainStep, msgspec.msgpack.encode(tree))


def test_a_type_the_topic_does_not_carry_is_refused() -> None:
    """A reward on `weights` is not decoded as something else."""
    value, headers = codec.encode(EXAMPLES["Reward"], source="test", now_ms=0)
    with pytest.raises(
        WireError, match=r"ce_type: expected one of .*WeightsPublished.*got 'headrace.Reward.v1'"
    ):
        codec.decode("weights", value, headers)


def test_long_values_are_compressed_and_short_ones_are_not() -> None:
    """The compressed form says so in its headers and is smaller."""
    step = EXAMPLES["RolloutStep"]
    assert isinstance(step, r.RolloutStep)
    long = msgspec.structs.replace(step, tokens_in=packed.pack_u32([7] * 1000))
    value, headers = codec.encode(long, source="test", now_ms=0)
    assert dict(headers)["content-encoding"] == codec.ENCODING
    assert len(value) < 1000
    assert codec.decode("rollout.steps", value, headers) == long
    assert "content-encoding" not in dict(codec.encode(EXAMPLES["Reward"], source="test", now_ms=0)[1])


def test_a_record_over_the_limit_is_refused_by_the_writer_and_the_reader() -> None:
    """Nothing over the limit is sent, and nothing over it is decoded."""
    step = EXAMPLES["RolloutStep"]
    noise = random.Random(0).randbytes(1_200_000)
    with pytest.raises(RecordTooLarge, match=f"at most {RECORD_BYTES_MAX}"):
        codec.encode(msgspec.structs.replace(step, tokens_in=noise), source="test", now_ms=0)
    with pytest.raises(RecordTooLarge):
        codec.decode_as(r.Reward, bytes(5_000_000))


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 500_000,
        b"\x81\xa1x" * 300_000,
        b"\xc6\xff\xff\xff\xff",
    ],
    ids=["array32", "map32", "nested arrays", "nested maps", "bin32"],
)
def test_a_messagepack_bomb_is_refused(bomb: bytes) -> None:
    """Announced sizes and depth beyond the input end in an error, not in memory or a crash."""
    with pytest.raises(WireError):
        codec.decode_as(r.Reward, bomb)
    field = codec.encode_plain(EXAMPLES["Reward"])[1:] + b"\xa5bomb!" + bomb
    with pytest.raises(WireError):
        codec.decode_as(r.Reward, bytes([0x8C]) + field)


def test_a_compression_bomb_is_refused() -> None:
    """100 MB of zeros in a few kB are not inflated."""
    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    assert len(bomb) < 20_000
    for encoding in (codec.ENCODING, b"zstd"):
        with pytest.raises(RecordTooLarge, match="decompressed"):
            codec.decode_as(r.Reward, bomb, encoding)


def test_the_dictionary_is_part_of_the_format() -> None:
    """Its bytes never change, a frame made with it decodes, and plain zstd frames are read too."""
    dictionary = Path(codec.__file__).with_name("zstd-1.dict").read_bytes()
    assert hashlib.sha256(dictionary).hexdigest() == DICTIONARY_SHA256
    plain = codec.encode_plain(EXAMPLES["RolloutStep"])
    raw = zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    frame = zstandard.ZstdCompressor(dict_data=raw).compress(plain)
    assert len(frame) < len(plain) / 4
    assert codec.decode_as(r.RolloutStep, frame, codec.ENCODING) == EXAMPLES["RolloutStep"]
    frame = zstandard.ZstdCompressor().compress(plain)
    assert codec.decode_as(r.RolloutStep, frame, b"zstd") == EXAMPLES["RolloutStep"]


def test_a_compressed_stream_that_hides_its_size_is_refused() -> None:
    """Without an announced size nothing is inflated."""
    stream = zstandard.ZstdCompressor().compressobj()
    hidden = stream.compress(bytes(1000)) + stream.flush()
    with pytest.raises(WireError):
        codec.decode_as(r.Reward, hidden, b"zstd")


@given(st.binary(max_size=300), st.sampled_from([None, b"zstd", codec.ENCODING, b"gzip"]))
def test_any_bytes_decode_or_raise_a_wire_error(value: bytes, encoding: bytes | None) -> None:
    """No input ends in another exception."""
    for record_type in (r.RolloutStep, r.TrainStep, r.Experience):
        with pytest.raises(WireError):
            codec.decode_as(record_type, value, encoding)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_tokens_round_trip(tokens: list[int]) -> None:
    """Four bytes a token, the same tokens back."""
    assert len(packed.pack_u32(tokens)) == 4 * len(tokens)
    assert packed.unpack_u32(packed.pack_u32(tokens)) == tokens


def test_packed_bytes_are_little_endian() -> None:
    """The bytes are the same on every machine."""
    assert packed.pack_u32([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert packed.pack_f32([-0.0]) == bytes([0, 0, 0, 0x80])


def test_trace_context_goes_on_in_a_child() -> None:
    """A child keeps the trace id and has a span of its own; rubbish starts a new trace."""
    parent = codec.traceparent()
    child = codec.traceparent(parent)
    assert len(parent) == 55
    assert child[:36] == parent[:36]
    assert child != parent
    assert len(codec.traceparent(b"rubbish")) == 55


def test_reference_page_is_current() -> None:
    """docs/asyncapi.json is the output of `python -m headrace.wire.asyncapi`."""
    page = Path(__file__).parents[2] / "docs" / "asyncapi.json"
    assert page.read_text() == asyncapi.render()


def test_reference_page_has_no_dangling_reference() -> None:
    """Every `$ref` of the AsyncAPI document leads somewhere."""
    document = asyncapi.document()

    def walk(node: object) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                target: object = document
                for part in node["$ref"].removeprefix("#/").split("/"):
                    assert isinstance(target, dict)
                    target = target[part]
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    assert set(document["channels"]) == set(TOPICS)

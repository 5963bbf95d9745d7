"""What a gateway makes of events: what is durable, under which name, what is refused and why."""

import asyncio
import os
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
from gateway_place import Place, event, json_batch, method, on_a_gateway, post, records
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.errors import WireError
from headrace.producers.gateway import over_http
from headrace.rpc import feedback_pb2 as pb
from headrace.rpc.feedback import LENGTH_MAX, Event, fault_of
from headrace.rpc.feedback_messages import SERVICE, request_of
from headrace.streams.suggestion import check
from headrace.wire.records import Feedback

DAY_MS = 86_400_000


def body(*events: Event, number: int = 0) -> bytes:
    return bytes(request_of(events, number).SerializeToString())


def test_acknowledged_is_on_the_topic(tmp_path: Path) -> None:
    """An answer means that the record is there: keyed by suggestion, fields as sent, the user a pseudonym."""

    async def act(place: Place) -> None:
        sent = event(
            1, kind="partially_accepted", accepted_length=7, view_id="v", client="vscode/1.99.0", editor_ms=5
        )
        reply = await place.publish(body(sent, number=42))
        assert (reply.number, reply.accepted, reply.duplicates) == (42, 1, 0)
        [record] = await place.records()
        assert (record.event_id, record.suggestion_id, record.kind) == ("e1", "s0", "partially_accepted")
        assert (record.accepted_length, record.view_id, record.client) == (7, "v", "vscode/1.99.0")
        assert record.user.startswith("r1-")
        assert len(record.user) == 35
        assert "ada" not in str(record)
        assert (record.run, record.region, record.text) == ("demo", "local", b"")

    on_a_gateway(tmp_path, act)


@pytest.mark.parametrize("skew_ms", [-8 * DAY_MS, -2 * DAY_MS, 2 * DAY_MS])
def test_editor_clock_passes_untouched(tmp_path: Path, skew_ms: int) -> None:
    """An editor whose clock is two days off is taken, and an event that waited in it for eight; its time
    stays information."""

    async def act(place: Place) -> None:
        told_ms = 1_790_000_000_000 + skew_ms
        assert (await place.publish(body(event(editor_ms=told_ms)))).accepted == 1
        assert [r.editor_ms for r in await place.records()] == [told_ms]

    on_a_gateway(tmp_path, act)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "loved"}, "kind: expected one of accepted, ignored, partially_accepted"),
        ({"accepted_length": -1}, "accepted_length: expected 0 to 1048576 UTF-16 units, got -1"),
        ({"accepted_length": LENGTH_MAX + 1}, "accepted_length: expected 0 to 1048576"),
        ({"accepted_length": 1 << 62}, "accepted_length: expected 0 to 1048576"),
        ({"kind": "partially_accepted"}, "accepted_length: expected the length so far"),
        ({"event_id": ""}, "event_id: expected 1 to 128 characters"),
        ({"event_id": "x" * 129}, "event_id: expected 1 to 128 characters without spaces and slashes"),
        ({"event_id": "e\x00"}, "event_id: "),
        ({"suggestion_id": "src/secret.py"}, "suggestion_id: "),
        ({"view_id": "C:\\Users\\ada"}, "view_id: "),
        ({"superseded_by": "a b"}, "superseded_by: "),
        ({"client": "Ada's editor"}, "client: expected NAME/VERSION"),
        ({"user": "u" * 300}, "user: expected at most 256 characters, got 300"),
        ({"editor_ms": -5}, "editor_ms: "),
        ({"difference": float("nan")}, "difference: expected 0 to 1, got nan"),
        ({"persisted_s": 86_401}, "persisted_s: expected 0 to 86400 seconds, got 86401"),
        ({"kind": "persisted"}, "persisted_s: expected the seconds since the accept, got none"),
        ({"text": "x" * 65_537}, "text: expected at most 65536 bytes, got 65537"),
    ],
)
def test_one_bad_event_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    """The good ones of a batch are durable; the bad one comes back with its place, its id and the reason."""

    async def act(place: Place) -> None:
        bad = event(1, **fields)
        reply = await place.publish(body(event(0), bad, event(2)))
        assert reply.accepted == 2
        [refused] = reply.refused
        assert (refused.index, refused.event_id) == (1, bad.event_id[:128])
        assert refused.reason.startswith(reason)
        assert sorted(r.event_id for r in await place.records()) == ["e0", "e2"]

    on_a_gateway(tmp_path, act)


def test_invalid_utf8_spoils_its_event_alone(tmp_path: Path) -> None:
    """Of three events one is not UTF-8, over gRPC and over HTTP: the other two are durable."""

    async def act(place: Place) -> None:
        bad = pb.Event(event_id="e1", suggestion_id="s", kind="shown").SerializeToString()
        raw = pb.RawPublishRequest(
            events=[
                pb.Event(event_id="e0", suggestion_id="s", kind="shown").SerializeToString(),
                bad.replace(b"e1", b"\xff\xfe"),
                pb.Event(event_id="e2", suggestion_id="s", kind="shown").SerializeToString(),
            ],
            number=9,
        )
        reply = await place.publish(raw.SerializeToString())
        assert (reply.number, reply.accepted) == (9, 2)
        assert [(r.index, "UTF-8" in r.reason) for r in reply.refused] == [(1, True)]
        answer = await place.post(json_batch([event(3), event(4)]).replace(b'"e3"', b'"\xff\xfe"'))
        assert (answer.status, answer.body["accepted"]) == (200, 1)
        assert [r["index"] for r in answer.body["refused"]] == [0]
        assert sorted(r.event_id for r in await place.records()) == ["e0", "e2", "e4"]

    on_a_gateway(tmp_path, act)


def test_what_a_gateway_takes_no_join_refuses() -> None:
    """Events at every bound: an acknowledgement is no promise if the feedback join dead-letters them."""
    for most in (
        event(1, event_id="\U0001f600" * 125, continues="\U0001f600" * 125, superseded_by="名" * 128),
        event(1, kind="partially_accepted", accepted_length=LENGTH_MAX),
        event(1, kind="persisted", persisted_s=86_400, difference=1.0, editor_ms=1 << 53),
    ):
        assert fault_of(most) == ""
        known = {name: value for name, value in msgspec.structs.asdict(most).items() if name != "text"}
        check(Feedback(run="r", **known))


@pytest.mark.parametrize("open_", [b"[", b'{"x":['])
def test_brackets_in_each_other(open_: bytes) -> None:
    """A hundred thousand of them are no batch, and no fault of the gateway."""
    with pytest.raises(WireError, match="body: expected"):
        over_http.parse(open_ + b"[" * 100_000, now_ms=0, events_max=1)


def test_what_is_no_batch(tmp_path: Path) -> None:
    """Other bytes are refused as a whole, and say so."""

    async def act(place: Place) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await place.publish(b"\xff\xff\xff not a message")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "expected a PublishRequest" in (caught.value.details() or "")
        answer = await place.post(b'{"event": 1}')
        assert answer.status == 400
        assert "Tabby" in answer.body["error"]
        assert (await place.post(json_batch([{"kind": "shown"}]))).status == 422

    on_a_gateway(tmp_path, act)


def test_v2_client(tmp_path: Path) -> None:
    """Fields that this version does not know are accepted and left out, over both protocols."""

    async def act(place: Place) -> None:
        message = pb.Event(event_id="e0", suggestion_id="s", kind="shown").SerializeToString()
        message += bytes([0xFA, 0x07, 3]) + b"new"  # field 127, a string
        raw = pb.RawPublishRequest(events=[message]).SerializeToString() + bytes([0xF8, 0x07, 1])
        assert (await place.publish(raw)).accepted == 1
        answer = await place.post(
            b'{"events": [{"event_id": "e1", "suggestion_id": "s", "kind": "shown", "mood": 1}], "v": 2}'
        )
        assert (answer.status, answer.body["accepted"]) == (200, 1)
        assert sorted(r.event_id for r in await place.records()) == ["e0", "e1"]

    on_a_gateway(tmp_path, act)


def test_same_event_a_thousand_times(tmp_path: Path) -> None:
    """In one batch, in the next, and over the other protocol: always acknowledged, once on the topic."""

    async def act(place: Place) -> None:
        reply = await place.publish(body(*[event(7)] * 500))
        assert (reply.accepted, reply.duplicates) == (500, 499)
        replies = await asyncio.gather(*(place.publish(body(*[event(7)] * 100)) for _ in range(4)))
        assert [(r.accepted, r.duplicates) for r in replies] == [(100, 100)] * 4
        answer = await place.post(json_batch([event(7)] * 100))
        assert answer.body == {"accepted": 100, "duplicates": 100, "refused": []}
        assert [r.event_id for r in await place.records()] == ["e7"]

    on_a_gateway(tmp_path, act)


def test_ids_belong_to_their_user(tmp_path: Path) -> None:
    """Nobody can keep another's event out by sending its id first."""

    async def act(place: Place) -> None:
        await place.publish(body(event(1, user="mallory")))
        reply = await place.publish(body(event(1, user="ada")))
        assert reply.duplicates == 0
        assert len(await place.records()) == 2

    on_a_gateway(tmp_path, act)


def test_stream_answers_in_order_and_keeps_it(tmp_path: Path) -> None:
    """40 batches on one stream, 16 ahead: replies in order, events of a suggestion in order on the topic."""

    async def act(place: Place) -> None:
        async def batches() -> Any:
            for number in range(40):
                yield body(*(event(10 * number + i, suggestion_id="s") for i in range(10)), number=number)

        async with grpc.aio.insecure_channel(place.addresses.grpc) as channel:
            call = method(channel, "PublishStream")
            replies = [(r.number, r.accepted) async for r in call(batches())]
        assert replies == [(number, 10) for number in range(40)]
        assert [r.event_id for r in await place.records()] == [f"e{i}" for i in range(400)]

    on_a_gateway(tmp_path, act)


def test_tabby_speaks_to_the_gateway(tmp_path: Path) -> None:
    """Tabby's own body at Tabby's own path; its user is the sender's name."""

    async def act(place: Place) -> None:
        for kind in ("view", "select"):
            answer = await place.post(b'{"type": "%s", "completion_id": "cmpl-7"}' % kind.encode())
            assert (answer.status, answer.body["accepted"]) == (200, 1)
        assert [(r.suggestion_id, r.kind) for r in await place.records()] == [
            ("cmpl-7", "shown"),
            ("cmpl-7", "accepted"),
        ]

    on_a_gateway(tmp_path, act)


def test_health_reflection_and_page(tmp_path: Path) -> None:
    """What an operator asks first: health over both protocols, reflection, the OpenAPI page."""

    async def act(place: Place) -> None:
        async with grpc.aio.insecure_channel(place.addresses.grpc) as channel:
            asked = health_pb2.HealthCheckRequest(service=SERVICE)
            found = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60)
            assert found.status == health_pb2.HealthCheckResponse.SERVING
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([request]), timeout=60)
            [listed] = [r async for r in call]
            assert SERVICE in {s.name for s in listed.list_services_response.service}
        url = f"http://{place.addresses.http}"
        assert (await asyncio.to_thread(post, f"{url}/healthz", None)).status == 200
        page = (await asyncio.to_thread(post, f"{url}/openapi.json", None)).body
        assert set(page["paths"]) == {"/v1/events", "/healthz"}
        assert {"Event", "TabbyEvent", "Reply", "Refusal"} <= set(page["components"]["schemas"])

    on_a_gateway(tmp_path, act)


@pytest.mark.kafka
def test_on_kafka(tmp_path: Path, kafka: str) -> None:
    """The same on a real broker: durable, in order, a second gateway knows what the first wrote."""
    from gateway_place import gateway

    from headrace.bus import open_bus

    tag = os.urandom(4).hex()
    sent = [event(i, event_id=f"{tag}-{i}", suggestion_id=f"{tag}-s") for i in range(50)]

    async def run() -> None:
        async with open_bus(f"kafka:{kafka}") as bus:
            async with gateway(tmp_path, bus=bus) as place:
                assert (await place.publish(body(*sent[:40]))).duplicates == 0
            async with gateway(tmp_path, bus=bus) as place:
                reply = await place.publish(body(*sent))
                assert (reply.accepted, reply.duplicates) == (50, 40)
            mine = [r.event_id for r in await records(bus) if r.suggestion_id == f"{tag}-s"]
            assert mine == [e.event_id for e in sent]

    asyncio.run(run())

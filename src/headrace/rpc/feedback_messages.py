"""Between the plain events of `rpc.feedback` and the messages of `feedback.proto`, both ways.

Not here: what is a sensible event (`rpc.feedback.fault_of`): only what isn't a message at all is refused.
"""

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from headrace.errors import WireError
from headrace.rpc import feedback_pb2 as pb
from headrace.rpc.feedback import Event, check_count

SERVICE = "headrace.feedback.v1.Feedback"
RETRY_AFTER = "retry-after-ms"
"""Name of the trailing metadata that says when to send again."""


def event_of(message: pb.Event) -> Event:
    """What the message says; an empty field that may be absent is absent."""
    return Event(
        event_id=message.event_id,
        suggestion_id=message.suggestion_id,
        kind=message.kind,
        editor_ms=message.editor_ms,
        view_id=message.view_id,
        user=message.user,
        client=message.client,
        accepted_length=message.accepted_length if message.HasField("accepted_length") else None,
        superseded_by=message.superseded_by or None,
        continues=message.continues or None,
        text=message.text,
        persisted_s=message.persisted_s if message.HasField("persisted_s") else None,
        difference=message.difference if message.HasField("difference") else None,
    )


def request_of(events: Iterable[Event], number: int = 0) -> pb.PublishRequest:
    """The message of a batch. Raises ValueError for a number that does not fit its field."""
    return pb.PublishRequest(events=[_message(event) for event in events], number=number)


def parse(body: bytes, *, events_max: int) -> tuple[int, list[Event | str]]:
    """Number and events of a serialised batch; in place of a malformed event, what is wrong with it. Raises
    WireError when the whole is no batch, FeedbackError when it holds more than `events_max`: known before the
    events are looked at."""
    try:
        request = pb.PublishRequest.FromString(body)
    except DecodeError:
        return _parse_one_by_one(body, events_max)
    check_count(len(request.events), events_max)
    return request.number, [event_of(message) for message in request.events]


def _parse_one_by_one(body: bytes, events_max: int) -> tuple[int, list[Event | str]]:
    try:
        raw = pb.RawPublishRequest.FromString(body)
    except DecodeError as error:
        raise WireError(f"batch: expected a PublishRequest, got {len(body)} bytes: {error}") from error
    check_count(len(raw.events), events_max)
    events: list[Event | str] = []
    for encoded in raw.events:
        try:
            events.append(event_of(pb.Event.FromString(encoded)))
        except DecodeError:
            events.append("event: expected a message with UTF-8 text, got other bytes")
    return raw.number, events


def _message(event: Event) -> pb.Event:
    return pb.Event(
        event_id=event.event_id,
        suggestion_id=event.suggestion_id,
        kind=event.kind,
        editor_ms=event.editor_ms,
        view_id=event.view_id,
        user=event.user,
        client=event.client,
        accepted_length=event.accepted_length,
        superseded_by=event.superseded_by or "",
        continues=event.continues or "",
        text=event.text,
        persisted_s=event.persisted_s,
        difference=event.difference,
    )

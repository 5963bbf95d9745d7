"""Tabby's `POST /v1/events`: view, select and dismiss of a completion (docs/editors/tabby.md).

Tabby sends no clock, but `elapsed`, and no id of the event: one view can be selected once and dismissed once.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from headrace.errors import WireError
from headrace.producers.adapters.made_ids import made_id
from headrace.rpc.feedback import Event

_KINDS: Final = {"view": "shown", "select": "accepted", "dismiss": "rejected"}


class TabbyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The body as Tabby's clients send it."""

    type: Literal["view", "select", "dismiss"]
    completion_id: str
    choice_index: int = 0
    view_id: str | None = None
    elapsed: int | None = None
    """ms since the completion was shown."""
    select_kind: Literal["line"] | None = None
    """Only the first line was taken. Tabby does not say how long it was."""
    accepted_length: int | None = None
    """Of that line, in UTF-16 units: not Tabby's, for a client that can add it."""


def events(body: object, *, now_ms: int = 0, user: str = "", client: str = "") -> list[Event]:
    """One event. `now_ms`: when the body came. Raises WireError."""
    try:
        sent = msgspec.convert(body, TabbyEvent)
    except msgspec.ValidationError as error:
        raise WireError(f"tabby: {error}") from error
    partial = sent.type == "select" and sent.select_kind == "line" and sent.accepted_length is not None
    return [
        Event(
            event_id=made_id(
                "tabby", sent.type, sent.completion_id, sent.choice_index, sent.view_id, partial
            ),
            suggestion_id=suggestion_of(sent.completion_id, sent.choice_index),
            kind="partially_accepted" if partial else _KINDS[sent.type],
            accepted_length=sent.accepted_length if partial else None,
            editor_ms=now_ms,
            view_id=sent.view_id or "",
            user=user,
            client=client,
        )
    ]


def suggestion_of(completion_id: str, choice_index: int) -> str:
    """The first choice of a completion has the completion's own id."""
    return completion_id if choice_index == 0 else f"{completion_id}.{choice_index}"


def log_line(line: object, *, user: str = "", client: str = "") -> list[Event]:
    """A line of a recorded log: the body, with `time_ms` beside it if it was noted. Raises WireError."""
    time_ms = line.get("time_ms", 0) if isinstance(line, Mapping) else 0
    if not isinstance(time_ms, int):
        raise WireError(f"tabby: time_ms: expected a whole number, got {time_ms!a}")
    return events(line, now_ms=time_ms, user=user, client=client)

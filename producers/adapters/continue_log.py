"""Continue's log of autocompletions: one JSON object an outcome, written when it is known
(docs/editors/continue.md).

    {"accepted": true, "completion": "...", "completionId": "...", "timestamp": 1790000000000, ...}

Continue counts a completion as rejected that was on screen for 10,000 ms without being taken, and cancels
that for one that was on screen for less than 500 ms: such lines have no `accepted`. Prompt, prefix, suffix,
path and repository stay where they are.
"""

from datetime import datetime
from typing import Any

import msgspec

from headrace.errors import WireError
from headrace.producers.adapters.made_ids import made_id
from headrace.rpc.feedback import Event, utf16_length


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    completion_id: str = msgspec.field(name="completionId")
    completion: str = ""
    accepted: bool | None = None
    timestamp: int | str = 0


def events(line: object, *, user: str = "", client: str = "", with_text: bool = False) -> list[Event]:
    """`shown`, and what became of it if that is known. Raises WireError."""
    try:
        told = msgspec.convert(line, _Outcome)
    except msgspec.ValidationError as error:
        raise WireError(f"continue: {error}") from error
    common: dict[str, Any] = {
        "suggestion_id": told.completion_id,
        "editor_ms": _ms(told.timestamp),
        "user": user,
        "client": client,
    }
    shown_id = made_id("continue", told.completion_id, "shown")
    text = told.completion if with_text else ""
    found = [Event(event_id=shown_id, kind="shown", text=text, **common)]
    if told.accepted is not None:
        kind = "accepted" if told.accepted else "rejected"
        length = utf16_length(told.completion) if told.accepted else None
        event_id = made_id("continue", told.completion_id, kind)
        found.append(Event(event_id=event_id, kind=kind, accepted_length=length, **common))
    return found


log_line = events


def _ms(timestamp: int | str) -> int:
    """Milliseconds since 1970 of a number, or of ISO 8601 text. Raises WireError."""
    if isinstance(timestamp, int):
        return timestamp
    try:
        return round(datetime.fromisoformat(timestamp).timestamp() * 1000)
    except ValueError as error:
        raise WireError(f"continue: timestamp: expected ms or ISO 8601, got {timestamp!a}") from error

"""What an editor reports of a suggestion, before a gateway has seen it: the plain type of `feedback.proto`
and of the JSON body, and what makes one acceptable.

Here a user still has a name and code is still readable; neither leaves the gateway (`producers.gateway`). Not
here: transport, and the record on the topic (`wire.records.Feedback`). Imports nothing heavy: editors embed
it.
"""

import re
from typing import Final, get_args

import msgspec

from headrace.errors import FeedbackError
from headrace.wire.records import Feedback

KINDS: Final[frozenset[str]] = frozenset(
    get_args(next(field.type for field in msgspec.structs.fields(Feedback) if field.name == "kind"))
)
LENGTH_MAX: Final = 1 << 20
"""UTF-16 units of one suggestion: a thousand times what an editor shows."""
TEXT_BYTES_MAX: Final = 65_536
PERSISTED_S_MAX: Final = 86_400
TIME_MS_MAX: Final = 1 << 53
USER_CHARS_MAX: Final = 256
ID_BYTES_MAX: Final = 500
"""What the streams take as a key."""
_ID: Final = re.compile(r"[^\s/\\\x00-\x1f\x7f\ud800-\udfff]{1,128}")
"""Of events, suggestions and views. Slashes and spaces are what paths and names are made of; lone surrogates
have no UTF-8."""
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_CLIENT: Final = re.compile(r"[A-Za-z0-9._+-]{1,48}(/[A-Za-z0-9._+-]{1,48})?")


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One report. Fields that a reader does not know are ignored."""

    event_id: str
    """Unique for the user; a resend carries the same."""
    suggestion_id: str
    kind: str
    """One of `KINDS`."""
    editor_ms: int = 0
    """The editor's clock, ms since 1970: information, never an order."""
    view_id: str = ""
    user: str = ""
    """Whom the editor belongs to. Empty: the name of the token."""
    client: str = ""
    """`vscode/1.99.0`."""
    accepted_length: int | None = None
    """UTF-16 code units from the start of the suggestion, cumulative."""
    superseded_by: str | None = None
    continues: str | None = None
    text: str = ""
    """Code; only when the user opted in."""
    persisted_s: int | None = None
    difference: float | None = None
    """Between the accepted text and what is left of it, 0 to 1."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a batch that is not taken, for good."""

    index: int
    event_id: str
    reason: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a batch: what isn't refused is durable."""

    accepted: int
    """Durable now or before."""
    duplicates: int = 0
    """Of those: durable before."""
    refused: tuple[Refusal, ...] = ()


def fault_of(event: Event) -> str:
    """What is wrong with `event`: the field, what was expected, what came. Empty if nothing is."""
    if not is_id(event.event_id):
        return _no_id("event_id", event.event_id)
    if not is_id(event.suggestion_id):
        return _no_id("suggestion_id", event.suggestion_id)
    if event.kind not in KINDS:
        return f"kind: expected one of {', '.join(sorted(KINDS))}, got {_shown(event.kind)}"
    if not 0 <= event.editor_ms <= TIME_MS_MAX:
        return f"editor_ms: expected milliseconds since 1970, got {event.editor_ms}"
    length = event.accepted_length
    if length is not None and not 0 <= length <= LENGTH_MAX:
        return f"accepted_length: expected 0 to {LENGTH_MAX} UTF-16 units, got {length}"
    if length is None and event.kind == "partially_accepted":
        return "accepted_length: expected the length so far in UTF-16 units, got none"
    if event.view_id and not is_id(event.view_id):
        return _no_id("view_id", event.view_id)
    if event.client and not _CLIENT.fullmatch(event.client):
        return f"client: expected NAME/VERSION of letters, digits and ._+-, got {_shown(event.client)}"
    if not event.user.isascii() and _SURROGATE.search(event.user):
        return f"user: expected text that has UTF-8, got {_shown(event.user)}"
    if len(event.user) > USER_CHARS_MAX:
        return f"user: expected at most {USER_CHARS_MAX} characters, got {len(event.user)}"
    if event.text or event.superseded_by or event.continues:
        return _fault_of_rare(event)
    return _fault_of_measures(event)


def check_count(events: int, events_max: int) -> None:
    """Raises FeedbackError for a batch that is too long: it is none, and not to be sent again."""
    if events > events_max:
        raise FeedbackError(f"batch: expected at most {events_max} events, got {events}")


def is_id(value: str) -> bool:
    """Of an event, a suggestion or a view: one that a gateway takes."""
    fits = _ID.fullmatch(value) is not None
    return fits and (value.isascii() or len(value.encode()) <= ID_BYTES_MAX)


def utf16_length(text: str) -> int:
    """Length as editors count it: characters beyond U+FFFF (emoji, some CJK) are two units."""
    return len(text) + sum(character > "\uffff" for character in text)


def _fault_of_rare(event: Event) -> str:
    """Of the fields that most events leave empty."""
    for name, value in (("superseded_by", event.superseded_by), ("continues", event.continues)):
        if value and not is_id(value):
            return _no_id(name, value)
    text_bytes = len(event.text.encode(errors="replace"))
    if text_bytes > TEXT_BYTES_MAX:
        return f"text: expected at most {TEXT_BYTES_MAX} bytes, got {text_bytes}"
    return _fault_of_measures(event)


def _fault_of_measures(event: Event) -> str:
    if event.persisted_s is None and event.kind == "persisted":
        return "persisted_s: expected the seconds since the accept, got none"
    if event.persisted_s is not None and not 0 <= event.persisted_s <= PERSISTED_S_MAX:
        return f"persisted_s: expected 0 to {PERSISTED_S_MAX} seconds, got {event.persisted_s}"
    if event.difference is not None and not 0 <= event.difference <= 1:  # NaN is neither
        return f"difference: expected 0 to 1, got {event.difference}"
    return ""


def _no_id(name: str, value: str) -> str:
    return (
        f"{name}: expected 1 to 128 characters without spaces and slashes, at most {ID_BYTES_MAX} bytes, "
        f"got {_shown(value)}"
    )


def _shown(value: str) -> str:
    return ascii(value) if len(value) <= 60 else f"{value[:60]!a}... ({len(value)} characters)"

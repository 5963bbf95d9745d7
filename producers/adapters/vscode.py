"""The life of a VS Code inline completion, as a provider's call-backs tell it (docs/editors/vscode.md).

A plug-in writes one JSON object a call-back, or calls `events` with it:

    {"call": "handleDidShowCompletionItem", "id": "demo-live-7", "time_ms": 1790000000000}
    {"call": "handleDidPartiallyAcceptCompletionItem", "id": ..., "info": {"kind": 1, "acceptedLength": 12}}
    {"call": "handleEndOfLifetime", "id": ..., "reason": {"kind": 1, "supersededBy": {"id": ...}}}

`id` is what the plug-in keeps with its item: the suggestion's. Lengths are UTF-16 units and cumulative, as
JavaScript's strings are.
"""

from typing import Any, Final

import msgspec

from headrace.errors import WireError
from headrace.producers.adapters.made_ids import made_id
from headrace.rpc.feedback import Event, utf16_length

ACCEPTED, REJECTED, IGNORED = 0, 1, 2
_ENDS: Final = {ACCEPTED: "accepted", REJECTED: "rejected", IGNORED: "ignored"}


class _Item(msgspec.Struct, frozen=True):
    id: str


class _Partial(msgspec.Struct, frozen=True, rename="camel"):
    accepted_length: int
    kind: int = 0
    """Unknown 0, Word 1, Line 2, Suggest 3: not kept, the length says it."""


class _Reason(msgspec.Struct, frozen=True, rename="camel"):
    kind: int
    superseded_by: _Item | None = None
    user_typing_disagreed: bool = False


class _Call(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    call: str
    id: str
    time_ms: int = msgspec.field(default=0, name="time_ms")
    session: str = ""
    """Of the editor: becomes the view's id."""
    updated_insert_text: str = ""
    info: _Partial | int | None = None
    """A bare number is the older form of the call-back."""
    reason: _Reason | None = None
    continues: str | None = None


def events(call: object, *, user: str = "", client: str = "", with_text: bool = False) -> list[Event]:
    """One event. `with_text`: the user opted in to code being kept. Raises WireError."""
    try:
        told = msgspec.convert(call, _Call)
    except msgspec.ValidationError as error:
        raise WireError(f"vscode: {error}") from error
    what = _what(told, with_text)
    return [
        Event(
            event_id=made_id("vscode", told.call, told.id, told.session, told.time_ms, what),
            suggestion_id=told.id,
            editor_ms=told.time_ms,
            view_id=told.session,
            user=user,
            client=client,
            **what,
        )
    ]


log_line = events


def _what(told: _Call, with_text: bool) -> dict[str, Any]:
    if told.call == "handleDidShowCompletionItem":
        text = {"text": told.updated_insert_text} if with_text and told.updated_insert_text else {}
        return {"kind": "shown", "continues": told.continues, **text}
    if told.call == "handleDidPartiallyAcceptCompletionItem" and told.info is not None:
        length = told.info if isinstance(told.info, int) else told.info.accepted_length
        return {"kind": "partially_accepted", "accepted_length": length}
    if told.call == "handleEndOfLifetime" and told.reason is not None and told.reason.kind in _ENDS:
        return _end(told, told.reason)
    raise WireError(
        "vscode: call: expected handleDidShowCompletionItem, handleDidPartiallyAcceptCompletionItem with info"
        f" or handleEndOfLifetime with a reason of kind 0, 1 or 2, got {told.call!a}"
    )


def _end(told: _Call, reason: _Reason) -> dict[str, Any]:
    """An ignored item that another took the place of was typed over: `superseded_by` says so."""
    what: dict[str, Any] = {"kind": _ENDS[reason.kind]}
    if reason.kind == ACCEPTED and told.updated_insert_text:
        what["accepted_length"] = utf16_length(told.updated_insert_text)
    if reason.kind == IGNORED and reason.superseded_by is not None:
        what["superseded_by"] = reason.superseded_by.id
    return what

"""The fields of an event as a plug-in gives them, for type checkers; the meaning of each: `rpc.feedback`."""

from typing import Literal, Required, TypedDict


class EventFields(TypedDict, total=False):
    suggestion_id: Required[str]
    kind: Required[
        Literal["shown", "accepted", "partially_accepted", "rejected", "ignored", "undone", "persisted"]
    ]
    event_id: str
    user: str
    client: str
    editor_ms: int
    view_id: str
    accepted_length: int
    superseded_by: str
    continues: str
    text: str
    persisted_s: int
    difference: float

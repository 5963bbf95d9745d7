"""Copilot-style logs: the JSON-RPC messages that an editor sends to a completion language server
(docs/editors/copilot.md).

    {"method": "textDocument/didShowCompletion", "params": {"item": {"command": {"arguments": ["ID"]}}}}
    {"method": "textDocument/didPartiallyAcceptCompletion", "params": {"item": ..., "acceptedLength": 9}}
    {"method": "workspace/executeCommand", "params": {"command": "...didAcceptCompletionItem",
     "arguments": ["ID"]}}
    {"method": "notifyShown", "params": {"uuid": "ID"}}, notifyAccepted, notifyRejected {"uuids": [...]}

`acceptedLength` is in UTF-16 units and cumulative. A recorder may add `time_ms`.
"""

from collections.abc import Mapping
from typing import Any, Final

from headrace.errors import WireError
from headrace.producers.adapters.made_ids import made_id
from headrace.rpc.feedback import Event, utf16_length

ACCEPT_COMMAND: Final = "didAcceptCompletionItem"


def events(message: object, *, user: str = "", client: str = "", with_text: bool = False) -> list[Event]:
    """One event a suggestion that the message names; none for a message about something else. Raises
    WireError for one that is about a suggestion and does not say which."""
    if not isinstance(message, Mapping) or not isinstance(message.get("params", {}), Mapping):
        raise WireError("copilot: expected a JSON-RPC message with params, got something else")
    method, params = message.get("method"), message.get("params", {})
    time_ms = message.get("time_ms", 0)
    if not isinstance(time_ms, int):
        raise WireError(f"copilot: time_ms: expected a whole number, got {time_ms!a}")
    found = []
    for suggestion_id, what in _what(method, params, with_text):
        if not isinstance(suggestion_id, str):
            raise WireError(f"copilot: {method}: expected the id of a completion, got {suggestion_id!a}")
        event_id = made_id("copilot", method, suggestion_id, time_ms, what)
        found.append(
            Event(
                event_id=event_id,
                suggestion_id=suggestion_id,
                editor_ms=time_ms,
                user=user,
                client=client,
                **what,
            )
        )
    return found


log_line = events


def _what(method: object, params: Mapping[str, Any], with_text: bool) -> list[tuple[object, dict[str, Any]]]:
    """Suggestion and event fields of each."""
    match method:
        case "textDocument/didShowCompletion":
            text = _text(params)
            return [(_item(params), {"kind": "shown", **({"text": text} if with_text and text else {})})]
        case "textDocument/didPartiallyAcceptCompletion":
            return [(_item(params), {"kind": "partially_accepted", "accepted_length": _length(params)})]
        case "workspace/executeCommand":
            if not str(params.get("command", "")).endswith(ACCEPT_COMMAND):
                return []
            return [(_first(params.get("arguments")), {"kind": "accepted"})]
        case "notifyShown":
            return [(params.get("uuid"), {"kind": "shown"})]
        case "notifyAccepted" if params.get("acceptedLength") is not None:
            return [(params.get("uuid"), {"kind": "partially_accepted", "accepted_length": _length(params)})]
        case "notifyAccepted":
            return [(params.get("uuid"), {"kind": "accepted"})]
        case "notifyRejected":
            uuids = params.get("uuids")
            return [(uuid, {"kind": "rejected"}) for uuid in (uuids if isinstance(uuids, list) else [None])]
        case _:
            return []


def _item(params: Mapping[str, Any]) -> object:
    item = params.get("item")
    command = item.get("command") if isinstance(item, Mapping) else None
    return _first(command.get("arguments")) if isinstance(command, Mapping) else None


def _first(arguments: object) -> object:
    return arguments[0] if isinstance(arguments, list) and arguments else None


def _length(params: Mapping[str, Any]) -> int:
    length = params.get("acceptedLength")
    if not isinstance(length, int) or isinstance(length, bool):
        raise WireError(f"copilot: acceptedLength: expected a whole number, got {length!a}")
    return length


def _text(params: Mapping[str, Any]) -> str:
    item = params.get("item")
    text = item.get("insertText") if isinstance(item, Mapping) else None
    return text if isinstance(text, str) and utf16_length(text) else ""

"""What editors send today, as events: hand-made samples, field by field; nothing that names a person or a
place."""

import json
from typing import Any

import pytest

from headrace.errors import WireError
from headrace.producers.adapters import continue_log, copilot, tabby, vscode
from headrace.rpc.feedback import Event, fault_of, utf16_length

CODE = "print('🎉 名')"  # 11 characters, of which one is two UTF-16 units


def short(events: list[Event]) -> list[tuple[Any, ...]]:
    for event in events:
        assert fault_of(event) == ""
    return [(e.suggestion_id, e.kind, e.accepted_length) for e in events]


@pytest.mark.parametrize(
    ("text", "units"),
    [("", 0), ("abc", 3), ("é", 1), ("名前", 2), ("🎉", 2), ("𠮷野", 3), ("👩‍💻", 5), (CODE, 13)],
)
def test_lengths_are_utf16(text: str, units: int) -> None:
    """Emoji and rare CJK are two units, a joined emoji is what its parts are; as JavaScript has it."""
    assert utf16_length(text) == units == len(text.encode("utf-16-le")) // 2


def test_tabby() -> None:
    """View, select and dismiss; another choice is another suggestion; a line with no length is an accept."""
    base = {"completion_id": "cmpl-1", "choice_index": 0, "view_id": "view-9", "elapsed": 400}
    assert short(tabby.events({"type": "view", **base})) == [("cmpl-1", "shown", None)]
    assert short(tabby.events({"type": "select", **base})) == [("cmpl-1", "accepted", None)]
    assert short(tabby.events({"type": "dismiss", **base, "choice_index": 2})) == [
        ("cmpl-1.2", "rejected", None)
    ]
    line = {"type": "select", "select_kind": "line", **base}
    assert short(tabby.events(line)) == [("cmpl-1", "accepted", None)]
    assert short(tabby.events({**line, "accepted_length": 9})) == [("cmpl-1", "partially_accepted", 9)]
    [event] = tabby.log_line({"type": "view", **base, "time_ms": 77}, user="ada", client="tabby/1")
    assert (event.editor_ms, event.view_id, event.user, event.client) == (77, "view-9", "ada", "tabby/1")
    assert tabby.events({"type": "view", **base})[0].event_id == event.event_id


def vscode_call(call: str, **more: Any) -> dict[str, Any]:
    return {"call": call, "id": "s1", "time_ms": 5, "session": "w1", **more}


@pytest.mark.parametrize("line", [[1], "x", None, {"type": "view", "completion_id": "c", "time_ms": "noon"}])
def test_a_line_of_a_tabby_log_that_is_none(line: object) -> None:
    """What is no object, or has no clock where one should be, is a named error."""
    with pytest.raises(WireError, match="tabby: "):
        tabby.log_line(line)


def test_vscode_life_cycle() -> None:
    """Shown, two words, all of it: lengths stay cumulative UTF-16 units, through emoji and CJK."""
    partial = "handleDidPartiallyAcceptCompletionItem"
    calls = [
        vscode_call("handleDidShowCompletionItem", updatedInsertText=CODE),
        vscode_call(partial, info={"kind": 1, "acceptedLength": 9}),  # print('🎉
        vscode_call(partial, info={"kind": 1, "acceptedLength": 13}),
        vscode_call("handleEndOfLifetime", reason={"kind": 0}, updatedInsertText=CODE),
    ]
    events = [event for call in calls for event in vscode.events(call, user="ada")]
    assert short(events) == [
        ("s1", "shown", None),
        ("s1", "partially_accepted", 9),
        ("s1", "partially_accepted", 13),
        ("s1", "accepted", 13),
    ]
    assert utf16_length("print('🎉") == 9
    assert {e.text for e in events} == {""}
    assert len({e.event_id for e in events}) == 4
    assert {(e.user, e.view_id, e.editor_ms) for e in events} == {("ada", "w1", 5)}
    assert vscode.events(calls[0], with_text=True)[0].text == CODE
    assert short(vscode.events(vscode_call(partial, info=4))) == [("s1", "partially_accepted", 4)]


def test_vscode_ends() -> None:
    """Rejected is a judgement; ignored is none, and says which suggestion took the place."""
    ends = "handleEndOfLifetime"
    rejected = {"kind": 1, "userTypingDisagreed": True}
    assert short(vscode.events(vscode_call(ends, reason=rejected))) == [("s1", "rejected", None)]
    [event] = vscode.events(vscode_call(ends, reason={"kind": 2, "supersededBy": {"id": "s2"}}))
    assert (event.kind, event.superseded_by) == ("ignored", "s2")
    [event] = vscode.events(vscode_call("handleDidShowCompletionItem", continues="s0"))
    assert event.continues == "s0"


def test_continue_log() -> None:
    """One line is a shown and its outcome; one that was on screen too briefly to count has no outcome."""
    line = {
        "accepted": True,
        "completion": CODE,
        "completionId": "c1",
        "timestamp": "2026-11-30T00:00:00Z",
        "filepath": "/private/ada/secret.py",
        "prefix": "import os",
        "gitRepo": "acme",
    }
    events = continue_log.events(line, user="ada")
    assert short(events) == [("c1", "shown", None), ("c1", "accepted", 13)]
    assert {e.editor_ms for e in events} == {1_795_996_800_000}
    assert "secret" not in str(events)
    assert "acme" not in str(events)
    assert short(continue_log.events({**line, "accepted": False})) == [
        ("c1", "shown", None),
        ("c1", "rejected", None),
    ]
    del line["accepted"]
    [shown] = continue_log.events(line, with_text=True)
    assert (shown.kind, shown.text) == ("shown", CODE)


def test_copilot_messages() -> None:
    """Both generations of the protocol; messages about something else are passed over."""
    item = {"insertText": CODE, "command": {"command": "x", "arguments": ["u1"]}}
    messages = [
        {"method": "textDocument/didShowCompletion", "params": {"item": item}, "time_ms": 3},
        {
            "method": "textDocument/didPartiallyAcceptCompletion",
            "params": {"item": item, "acceptedLength": 9},
        },
        {
            "method": "workspace/executeCommand",
            "params": {"command": "github.copilot.didAcceptCompletionItem", "arguments": ["u1"]},
        },
        {"method": "workspace/executeCommand", "params": {"command": "other", "arguments": []}},
        {"method": "textDocument/didOpen", "params": {}},
        {"method": "notifyShown", "params": {"uuid": "u2"}},
        {"method": "notifyAccepted", "params": {"uuid": "u2", "acceptedLength": 4}},
        {"method": "notifyAccepted", "params": {"uuid": "u2"}},
        {"method": "notifyRejected", "params": {"uuids": ["u3", "u4"]}},
    ]
    assert short([event for message in messages for event in copilot.events(message)]) == [
        ("u1", "shown", None),
        ("u1", "partially_accepted", 9),
        ("u1", "accepted", None),
        ("u2", "shown", None),
        ("u2", "partially_accepted", 4),
        ("u2", "accepted", None),
        ("u3", "rejected", None),
        ("u4", "rejected", None),
    ]
    assert copilot.events(messages[0])[0].text == ""
    assert copilot.events(messages[0], with_text=True)[0].text == CODE


@pytest.mark.parametrize(
    ("adapter", "line"),
    [
        (tabby, {"type": "like", "completion_id": "c"}),
        (tabby, {"type": "view"}),
        (tabby, [1]),
        (vscode, vscode_call("handleEndOfLifetime", reason={"kind": 7})),
        (vscode, vscode_call("handleDidPartiallyAcceptCompletionItem")),
        (vscode, {"call": "handleDidShowCompletionItem"}),
        (continue_log, {"accepted": True}),
        (continue_log, {"completionId": "c", "timestamp": "yesterday"}),
        (copilot, "notifyShown"),
        (copilot, {"method": "notifyShown", "params": {}}),
        (copilot, {"method": "notifyRejected", "params": {}}),
        (copilot, {"method": "textDocument/didPartiallyAcceptCompletion", "params": {"item": {}}}),
    ],
)
def test_lines_that_say_nothing(adapter: Any, line: Any) -> None:
    """A line that cannot be understood is an error that begins with the editor's name."""
    with pytest.raises(WireError, match=r"^(tabby|vscode|continue|copilot): "):
        adapter.events(json.loads(json.dumps(line)))


def test_replayed_logs_have_the_same_ids() -> None:
    """The same line gives the same event ids, and another moment another id: a log can be replayed twice."""
    call = vscode_call("handleDidShowCompletionItem")
    assert vscode.events(call) == vscode.events(dict(call))
    assert vscode.events(call)[0].event_id != vscode.events({**call, "time_ms": 6})[0].event_id

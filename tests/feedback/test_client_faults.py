"""The editor's client on a bad day: answers that are none, a spoiled, full or shared file, code of a plug-in
that raises. Nothing stops it, and nothing leaves the file unanswered."""

import asyncio
import os
import socket
import sqlite3
import stat
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from gateway_place import Place, event, on_a_gateway
from test_feedback_client import DEADLINE_S, Scripted, ready

from headrace.errors import FeedbackUnavailable
from headrace.producers.client import FeedbackClient, client
from headrace.producers.client.transport import transport_to
from headrace.rpc.feedback import Event, Refusal, Reply

NOWHERE = "http://localhost:1"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S_MIN", 0.001)
    monkeypatch.setattr(client, "BACKOFF_S_MAX", 0.01)
    monkeypatch.setattr(client, "END_S", 20.0)  # a machine that stands still is no thread that hangs


class AwayUntil(Scripted):
    """Away until it is `back`."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()

    def send(self, events: Sequence[Event], *, timeout_s: float) -> Reply:
        if not self.back.is_set():
            raise FeedbackUnavailable("away")
        return super().send(events, timeout_s=timeout_s)


def refusal(index: int) -> Refusal:
    return Refusal(index=index, event_id="", reason="no")


@pytest.mark.parametrize(
    "answer",
    [
        Reply(accepted=1, refused=(refusal(99),)),
        Reply(accepted=1, refused=(refusal(-1),)),
        Reply(accepted=0, refused=(refusal(0), refusal(0))),
        Reply(accepted=-1, refused=(refusal(0), refusal(1), refusal(2))),
        Reply(accepted=3),
    ],
)
def test_answers_that_are_none(tmp_path: Path, answer: Reply) -> None:
    """Places that are not in the batch, twice the same, fewer than nothing: the batch is sent again, nothing
    is refused, and the client goes on."""
    path = tmp_path / "b.db"
    ready(path, count=2)
    transport, refused = Scripted(answer), list[Any]()
    one = FeedbackClient(NOWHERE, buffer=path, transport=transport, on_refused=refused.extend)
    assert one.flush(DEADLINE_S)
    assert (one.status().sent, one.status().refused, refused) == (2, 0, [])
    one.close()
    assert transport.got == [["e0", "e1"]] * 2


def test_spoiled_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    """What the disk made of an event is let go, with a count; the others are sent, in order."""
    path = tmp_path / "b.db"
    ready(path, count=5)
    db = sqlite3.connect(path)
    for number, body in ((1, b"\x00\xff"), (2, None), (4, b'{"event_id": 7}')):
        db.execute("UPDATE events SET body = ? WHERE number = ?", (body, number))
    db.commit()
    db.close()
    transport = Scripted()
    one = FeedbackClient(NOWHERE, buffer=path, batch_max=2, transport=transport)
    assert one.flush(DEADLINE_S)
    assert transport.got == [["e2"], ["e4"]]
    assert (one.status().sent, one.status().dropped, one.status().waiting) == (2, 3, 0)
    one.close()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """Other bytes, a directory: said at once, by its place."""
    (tmp_path / "b.db").write_bytes(b"not a database" * 100)
    for path in (tmp_path / "b.db", tmp_path):
        with pytest.raises(FeedbackUnavailable, match=f"^{path}: expected a buffer"):
            FeedbackClient(NOWHERE, buffer=path, transport=Scripted())


def test_a_file_that_breaks_meanwhile(tmp_path: Path) -> None:
    """A table that is gone is told with every publish and in the status; `close` ends the client all the
    same."""
    path = tmp_path / "b.db"
    transport = Scripted()
    one = FeedbackClient(NOWHERE, buffer=path, transport=transport)
    assert one.flush(DEADLINE_S)
    db = sqlite3.connect(path)
    db.execute("DROP TABLE events")
    db.close()
    with pytest.raises(FeedbackUnavailable, match=r"b\.db: append: no such table"):
        one.publish(suggestion_id="s", kind="shown")
    with pytest.raises(FeedbackUnavailable, match=r"b\.db: count"):
        one.close()
    assert not one._thread.is_alive()
    assert transport.got == []


def test_a_full_disk(tmp_path: Path) -> None:
    """`publish` raises and keeps nothing of the event; what was in the file is sent, which makes room."""
    path = tmp_path / "b.db"
    transport = AwayUntil()
    one = FeedbackClient(NOWHERE, buffer=path, transport=transport)
    one._buffer._db.execute("PRAGMA max_page_count = 12")
    kept = []
    with pytest.raises(FeedbackUnavailable, match=r"append: database or disk is full"):
        for number in range(10_000):
            one.publish(event_id=f"e{number}", suggestion_id="s", kind="shown")
            kept.append(f"e{number}")
    assert kept
    transport.back.set()
    assert one.flush(DEADLINE_S), one.status()
    one.publish(event_id="after", suggestion_id="s", kind="shown")
    assert one.flush(DEADLINE_S)
    one.close()
    sent = [i for batch in transport.got for i in batch]
    assert list(dict.fromkeys(sent)) == [*kept, "after"]


def test_two_clients_with_one_file(tmp_path: Path) -> None:
    """Two processes' worth of clients share a file: all is on the topic, once, whoever sent it."""

    async def act(place: Place) -> None:
        def play() -> None:
            clients = [
                FeedbackClient(f"http://{place.addresses.http}", buffer=tmp_path / "b.db", batch_max=7)
                for _ in range(2)
            ]
            for number in range(100):
                clients[number % 2].publish(event_id=f"e{number}", suggestion_id="s", kind="shown")
            for one in clients:
                assert one.flush(DEADLINE_S), one.status()
            assert [one.close() for one in clients] == [0, 0]

        await asyncio.to_thread(play)
        found = Counter(record.event_id for record in await place.records())
        assert found == Counter(f"e{number}" for number in range(100))

    on_a_gateway(tmp_path / "gw", act)


def test_the_file_is_its_owners(tmp_path: Path) -> None:
    """Nobody else can read who reported what; what was answered is not left behind in it."""
    path = tmp_path / "b.db"
    before = os.umask(0o022)
    try:
        one = FeedbackClient(NOWHERE, buffer=path, user="ada@example.org", transport=Scripted())
        one.publish(suggestion_id="s", kind="shown", text="def secret(): pass")
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.glob("b.db*")}
        assert set(modes) == {"b.db", "b.db-wal", "b.db-shm"}
        assert set(modes.values()) == {0o600}
        assert one.flush(DEADLINE_S)
        one.close()
    finally:
        os.umask(before)
    assert [p.name for p in tmp_path.glob("b.db*")] == ["b.db"]
    assert b"secret" not in path.read_bytes()
    assert b"ada@" not in path.read_bytes()


def test_close_does_not_wait_for_a_gateway_that_hangs(tmp_path: Path) -> None:
    """A gateway that takes the connection and never answers: `close` ends the sending, and its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        one = FeedbackClient(address, buffer=tmp_path / "b.db")
        one.publish(suggestion_id="s", kind="shown")
        connection, _ = server.accept()
        with connection:
            assert connection.recv(4)
            assert one.close(0.0) == 1
            assert not one._thread.is_alive()
            connection.settimeout(DEADLINE_S)
            while connection.recv(65_536):
                pass


def test_another_service_is_no_gateway(tmp_path: Path) -> None:
    """A gRPC server that does not know the method, as behind a proxy that lost its way, refuses no event for
    good: it is sent again."""

    async def run() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        transport = transport_to(f"grpc://127.0.0.1:{port}", token="", ca_file=None)
        with pytest.raises(FeedbackUnavailable):
            await asyncio.to_thread(transport.send, [event(1)], timeout_s=60)
        transport.close()
        with pytest.raises(FeedbackUnavailable, match="closed channel"):
            transport.send([event(1)], timeout_s=1)
        await server.stop(0)

    asyncio.run(run())


def test_what_the_join_would_not_take_is_refused_at_once() -> None:
    """A gateway acknowledges nothing that the join could only put among the dead letters."""
    from headrace.rpc.feedback import fault_of

    def of(**fields: Any) -> Event:
        return event(1, **fields)

    assert fault_of(of(event_id="𠮷" * 128)).startswith("event_id: expected 1 to 128 characters")
    assert fault_of(of(event_id="𠮷" * 125)) == ""
    assert fault_of(of(kind="persisted")).startswith("persisted_s: expected the seconds")
    assert fault_of(of(kind="persisted", persisted_s=86_401)).startswith("persisted_s: expected 0 to 86400")
    assert fault_of(of(kind="persisted", persisted_s=86_400, difference=0.5)) == ""

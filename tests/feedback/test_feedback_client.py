"""The editor's client: nothing leaves its file before a gateway has answered for it, whatever happens."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from gateway_place import GatewayProcess, Place, event, on_a_gateway

from headrace.errors import (
    ConfigError,
    FeedbackError,
    FeedbackOverloaded,
    FeedbackUnauthenticated,
    FeedbackUnavailable,
)
from headrace.producers.client import FeedbackClient, client
from headrace.producers.client.buffer import Buffer
from headrace.producers.client.transport import HttpTransport
from headrace.rpc.feedback import Event, Refusal, Reply

DEADLINE_S = 20.0


class Scripted:
    """A transport that answers what it is told to, then accepts everything; it notes what it got."""

    def __init__(self, *answers: Exception | Reply) -> None:
        self.got: list[list[str]] = []
        self.answers = list(answers)
        self.asked = threading.Event()

    def send(self, events: Sequence[Event], *, timeout_s: float) -> Reply:
        self.got.append([e.event_id for e in events])
        self.asked.set()
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return Reply(accepted=len(events))

    def interrupt(self) -> None:
        self.asked.set()

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_S_MIN", 0.001)
    monkeypatch.setattr(client, "BACKOFF_S_MAX", 0.01)
    monkeypatch.setattr(client, "END_S", 20.0)  # a machine that stands still is no thread that hangs


def ready(path: Path, *, count: int) -> None:
    """A file with events of an earlier process."""
    buffer = Buffer(path, events_max=1000)
    for number in range(count):
        buffer.append(event(number))
    buffer.close()


def test_exactly_the_answered_leave(tmp_path: Path) -> None:
    """Refused and accepted leave the file, each with its count and the refused with a call; order is kept."""
    path = tmp_path / "b.db"
    ready(path, count=5)
    bad = Refusal(index=1, event_id="e1", reason="kind: no")
    transport = Scripted(FeedbackUnavailable("away"), Reply(accepted=2, refused=(bad,)))
    refused: list[tuple[str, str]] = []
    one = FeedbackClient(
        "http://localhost:1",
        buffer=path,
        batch_max=3,
        transport=transport,
        on_refused=lambda events: refused.extend((e.event_id, why) for e, why in events),
    )
    assert one.flush(DEADLINE_S)
    status = one.status()
    assert (status.sent, status.refused, status.waiting, status.last_error) == (4, 1, 0, "")
    assert one.close() == 0
    assert transport.got == [["e0", "e1", "e2"], ["e0", "e1", "e2"], ["e3", "e4"]]
    assert refused == [("e1", "kind: no")]


@pytest.mark.parametrize(
    "error",
    [
        FeedbackUnavailable("away", retry_after_ms=1),
        FeedbackOverloaded("full", retry_after_ms=1),
        FeedbackUnauthenticated("who?"),
    ],
)
def test_what_passes_is_tried_again(tmp_path: Path, error: Exception) -> None:
    """Twenty refusals that may pass lose nothing."""
    path = tmp_path / "b.db"
    ready(path, count=3)
    transport = Scripted(*[error] * 20)
    one = FeedbackClient("http://localhost:1", buffer=path, transport=transport)
    assert one.flush(DEADLINE_S)
    assert one.close() == 0
    assert transport.got == [["e0", "e1", "e2"]] * 21


def test_a_batch_that_no_gateway_takes(tmp_path: Path) -> None:
    """It is halved until the event at fault stands alone; that one is refused, aloud; the others go on."""
    path = tmp_path / "b.db"
    ready(path, count=4)
    never = FeedbackError("400: no")
    refused: list[str] = []
    transport = Scripted(never, never, never)
    one = FeedbackClient(
        "http://localhost:1",
        buffer=path,
        transport=transport,
        on_refused=lambda events: refused.extend(e.event_id for e, _ in events),
    )
    assert one.flush(DEADLINE_S)
    one.close()
    assert transport.got == [["e0", "e1", "e2", "e3"], ["e0", "e1"], ["e0"], ["e1"], ["e2", "e3"]]
    assert refused == ["e0"]


def test_full_buffer_says_what_it_dropped(tmp_path: Path) -> None:
    """At its bound of 3 the oldest go, are counted over restarts, and are told."""
    dropped: list[str] = []
    path = tmp_path / "b.db"
    for numbers in (range(5), range(5, 7)):
        one = FeedbackClient(
            "http://localhost:1",
            buffer=path,
            events_max=3,
            transport=Scripted(*[FeedbackUnavailable("away", retry_after_ms=60_000)] * 100),
            on_dropped=lambda events: dropped.extend(e.event_id for e in events),
        )
        for number in numbers:
            one.publish_event(event(number))
        assert one.close(0.0) == 3
    assert dropped == ["e0", "e1", "e2", "e3"]
    buffer = Buffer(path, events_max=3)
    assert [item.event.event_id for item in buffer.head(events_max=9, bytes_max=1 << 20)] == [
        "e4",
        "e5",
        "e6",
    ]
    assert buffer.counts() == {"sent": 0, "refused": 0, "dropped": 4, "waiting": 3}
    buffer.close()


@pytest.mark.parametrize("refused", [(), (2,), (-1,), (0, 0)])
def test_an_answer_that_does_not_fit_is_none(tmp_path: Path, refused: tuple[int, ...]) -> None:
    """Two events and an answer for one, or for others: nothing leaves, the batch is sent again."""
    path = tmp_path / "b.db"
    ready(path, count=2)
    named = tuple(Refusal(index=index, event_id="e0", reason="no") for index in refused)
    transport = Scripted(Reply(accepted=2 - len(named) if named else 1, refused=named))
    one = FeedbackClient("http://localhost:1", buffer=path, transport=transport)
    assert one.flush(DEADLINE_S)
    one.close()
    assert transport.got == [["e0", "e1"]] * 2


def test_a_call_back_that_fails_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The plug-in's own fault is logged; what was refused has left, and what waits behind it is sent."""
    path = tmp_path / "b.db"
    ready(path, count=3)

    def broken(events: object) -> None:
        raise RuntimeError("no such window")

    transport = Scripted(Reply(accepted=1, refused=(Refusal(index=0, event_id="e0", reason="kind: no"),)))
    one = FeedbackClient(
        "http://localhost:1", buffer=path, batch_max=2, transport=transport, on_refused=broken
    )
    assert one.flush(DEADLINE_S)
    assert one.close() == 0
    assert transport.got == [["e0", "e1"], ["e2"]]
    assert "no such window" in caplog.text


def test_closed_twice(tmp_path: Path) -> None:
    """The second time changes nothing and says the same."""
    transport = Scripted(*[FeedbackUnavailable("away")] * 1000)
    with FeedbackClient("http://localhost:1", buffer=tmp_path / "b.db", transport=transport) as one:
        one.publish(suggestion_id="s", kind="shown")
        assert one.close(0.0) == 1
        assert one.close() == 1


def test_nothing_stays_open(tmp_path: Path) -> None:
    """A batch that is on its way while the client closes opens the connection again; the end closes that
    one too."""

    class Slow(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.going = threading.Event()
            self.open = False

        def send(self, events: Sequence[Event], *, timeout_s: float) -> Reply:
            self.asked.set()
            assert self.going.wait(DEADLINE_S)
            self.open = True
            raise FeedbackUnauthenticated("who?")

        def interrupt(self) -> None:
            self.going.set()

        def close(self) -> None:
            self.open = False

    transport = Slow()
    one = FeedbackClient("http://localhost:1", buffer=tmp_path / "b.db", transport=transport)
    one.publish(suggestion_id="s", kind="shown")
    assert transport.asked.wait(DEADLINE_S)
    assert one.close(0.0) == 1
    assert not transport.open


def test_half_a_character(tmp_path: Path) -> None:
    """Editors cut text between the two halves of an emoji: that half is a question mark. In an id it is a
    fault."""
    transport = Scripted(*[FeedbackUnavailable("away")] * 1000)
    one = FeedbackClient("http://localhost:1", buffer=tmp_path / "b.db", transport=transport)
    one.publish(suggestion_id="s", kind="shown", text="名\ud83d")
    for fields in ({"suggestion_id": "\ud83d"}, {"user": "\ud83d"}):
        with pytest.raises(FeedbackError, match="expected"):
            one.publish_event(event(1, **fields))
    one.close(0.0)
    buffer = Buffer(tmp_path / "b.db", events_max=9)
    assert [item.event.text for item in buffer.head(events_max=9, bytes_max=1)] == ["名?"]
    buffer.close()


def test_publish_tells_what_no_gateway_takes(tmp_path: Path) -> None:
    """A wrong event is the caller's fault, at once; a good one gets id, time, user and client."""
    transport = Scripted(*[FeedbackUnavailable("away")] * 1000)
    one = FeedbackClient(
        "http://localhost:1", buffer=tmp_path / "b.db", user="ada", client="vim/9", transport=transport
    )
    with pytest.raises(FeedbackError, match="accepted_length: expected 0 to"):
        one.publish(suggestion_id="s", kind="accepted", accepted_length=-3)
    event_id = one.publish(suggestion_id="s", kind="accepted")
    one.close(0.0)
    buffer = Buffer(tmp_path / "b.db", events_max=9)
    [(_, kept)] = buffer.head(events_max=9, bytes_max=1)
    buffer.close()
    assert (kept.event_id, kept.user, kept.client) == (event_id, "ada", "vim/9")
    assert kept.editor_ms > 1_700_000_000_000


def test_close_keeps_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gateway that is away for good, `close` comes back in time and the event stays for the next."""
    monkeypatch.setattr(client, "BACKOFF_S_MAX", 3600.0)
    transport = Scripted(*[FeedbackUnavailable("away", retry_after_ms=3_600_000)] * 100)
    one = FeedbackClient("http://localhost:1", buffer=tmp_path / "b.db", transport=transport)
    one.publish(suggestion_id="s", kind="shown")
    assert transport.asked.wait(DEADLINE_S)
    assert not one.flush(0.05)
    while not one.status().last_error:  # the sending thread has asked, and may not have heard
        assert not one.flush(0.05)
    assert one.status().last_error == "away"
    assert one.close(0.05) == 1


CHILD = """
import sys
from headrace.producers.client import FeedbackClient
client = FeedbackClient("http://127.0.0.1:9", buffer=sys.argv[1])
for number in range(100):
    client.publish(event_id=f"e{number}", suggestion_id="s", kind="shown")
print("published", flush=True)
sys.stdin.read()
"""


def test_killed_editor_loses_nothing(tmp_path: Path) -> None:
    """kill -9 right after 100 events: the next client finds them all, in order, once."""
    path = tmp_path / "b.db"
    command = [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"published\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait(60)
        transport = Scripted()
        one = FeedbackClient("http://localhost:1", buffer=path, transport=transport)
        assert one.flush(DEADLINE_S)
        one.close()
    assert [i for batch in transport.got for i in batch] == [f"e{n}" for n in range(100)]


def test_over_both_wires(tmp_path: Path) -> None:
    """Against a real gateway by HTTP and by gRPC: sent, refused by name; wrong tokens keep the event."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ada {'t' * 20}\n")
    words = ("--gateway.tokens_file", str(tokens))
    from headrace.bus import open_bus
    from headrace.wire.topics import FEEDBACK

    async def made() -> None:
        async with open_bus(f"sqlite:{tmp_path / 'log'}") as bus:
            await bus.create_topics([FEEDBACK])

    asyncio.run(made())
    process = GatewayProcess(tmp_path / "run", f"sqlite:{tmp_path / 'log'}", *words)
    process.start()
    try:
        for address in (process.http, f"grpc://{process.grpc}"):
            good = FeedbackClient(address, buffer=tmp_path / f"{address[:4]}.db", token="t" * 20)
            good.publish(suggestion_id="s", kind="accepted", accepted_length=3)
            assert good.flush(DEADLINE_S), good.status()
            assert good.status().sent == 1
            good.close()
            bad = FeedbackClient(address, buffer=tmp_path / f"{address[:4]}-bad.db", token="x" * 20)
            bad.publish(suggestion_id="s", kind="shown")
            while not bad.status().last_error:
                assert not bad.flush(0.05)
            assert "expected a token of this gateway" in bad.status().last_error
            assert bad.close(0.0) == 1
    finally:
        assert process.end() == 0


def test_a_quiet_connection_is_opened_again(tmp_path: Path) -> None:
    """The gateway closed the connection since the last batch: the next one goes through at the first try."""

    async def act(place: Place) -> None:
        host, port = place.addresses.http.split(":")
        transport = HttpTransport(host, int(port), token="", tls=None)

        def twice() -> list[Reply]:
            first = transport.send([event(1)], timeout_s=60)
            assert transport._connection.sock is not None
            select.select([transport._connection.sock], [], [], DEADLINE_S)  # readable: its end
            return [first, transport.send([event(2)], timeout_s=60)]

        replies = await asyncio.to_thread(twice)
        assert [r.accepted for r in replies] == [1, 1]
        transport.close()

    on_a_gateway(tmp_path, act, head_ms_max=200)


@pytest.mark.parametrize("address", ["", "localhost:1", "ftp://x:1", "http://x", "http://x:y"])
def test_addresses_that_are_none(tmp_path: Path, address: str) -> None:
    """An address without scheme or port is named as such."""
    with pytest.raises(ConfigError, match="expected http://, https://, grpc:// or grpcs://HOST:PORT"):
        FeedbackClient(address, buffer=tmp_path / "b.db")


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
def test_certificates_that_are_none(tmp_path: Path, scheme: str) -> None:
    """A missing file and one that holds something else are named when the client is made."""
    other = tmp_path / "other.pem"
    other.write_text("no certificate")
    for path in (other, tmp_path / "missing.pem"):
        with pytest.raises(ConfigError, match=f"{path.name}: expected certificates"):
            FeedbackClient(f"{scheme}://x:1", buffer=tmp_path / "b.db", ca_file=path)


def test_a_token_that_no_header_carries(tmp_path: Path) -> None:
    """It is refused at once, and not shown."""
    with pytest.raises(ConfigError, match="token: expected printable ASCII") as caught:
        FeedbackClient("http://x:1", buffer=tmp_path / "b.db", token="secret-of-ada\n")
    assert "secret" not in str(caught.value)


def test_client_imports_light() -> None:
    """What a plug-in embeds brings neither torch, numpy, grpc, aiokafka nor aiohttp."""
    code = (
        "import sys, headrace.producers.client, headrace.producers.adapters.vscode\n"
        "heavy = {'torch', 'numpy', 'grpc', 'aiokafka', 'aiohttp', 'zstandard', 'google.protobuf'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"

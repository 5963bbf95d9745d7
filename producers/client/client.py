"""The feedback client: what is published is in the file before `publish` returns, and leaves it when a
gateway has answered for it.

One thread sends batch after batch, in order, and backs off with jitter while the gateway is away, however
long. Not here: the file (`buffer`), the wire (`transport`).
"""

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, Unpack

import msgspec

from headrace.errors import FeedbackError, FeedbackOverloaded, FeedbackUnauthenticated, FeedbackUnavailable
from headrace.producers.client.buffer import Buffer, Waiting
from headrace.producers.client.fields import EventFields
from headrace.producers.client.transport import Transport, transport_to
from headrace.rpc.feedback import Event, Refusal, Reply, fault_of

BATCH_BYTES_MAX: Final = 500_000
SEND_S_MAX: Final = 40.0
"""A gateway whose broker restarts answers within 30 s."""
BACKOFF_S_MIN: Final = 0.25
BACKOFF_S_MAX: Final = 60.0
END_S: Final = 1.0
"""`close` waits so long for the sending thread, whose call it has cut short: no editor hangs when it ends."""

Dropped = Callable[[Sequence[Event]], None]
Refused = Callable[[Sequence[tuple[Event, str]]], None]

_logger = logging.getLogger(__name__)


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How things stand. All but `waiting` count since the buffer file was made."""

    waiting: int
    sent: int
    refused: int
    dropped: int
    last_error: str = ""
    """Why the newest try failed; empty when it did not."""


class FeedbackClient:
    """`address`: `http(s)://` or `grpc(s)://HOST:PORT`. `buffer`: a file of this client. `on_dropped` and
    `on_refused` are called with what is lost because the buffer is full or the gateway does not want it; from
    the caller's thread and the sending one, and must return soon. What `on_refused` raises is logged.

    Raises ConfigError for an address that is none, FeedbackUnavailable for a buffer that can't be opened.
    """

    def __init__(
        self,
        address: str,
        *,
        buffer: str | Path,
        user: str = "",
        client: str = "",
        token: str = "",
        ca_file: Path | None = None,
        events_max: int = 100_000,
        batch_max: int = 100,
        on_dropped: Dropped | None = None,
        on_refused: Refused | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._transport = transport or transport_to(address, token=token, ca_file=ca_file)
        self._buffer = Buffer(Path(buffer).expanduser(), events_max=events_max)
        self._user, self._client = user, client
        self._batch_max = self._batch_now = batch_max
        self._on_dropped, self._on_refused = on_dropped, on_refused
        self._work = threading.Event()
        self._idle = threading.Condition()
        self._sending = False
        self._closing = False
        self._left: int | None = None
        self._hurry = False
        self._last_error = ""
        self._random = random.Random()
        self._thread = threading.Thread(target=self._run, name="headrace-feedback", daemon=True)
        self._work.set()  # what an earlier process left behind
        self._thread.start()

    def publish(self, **fields: Unpack[EventFields]) -> str:
        """Reports one event (`EventFields`); its id. It is in the file when this returns. Raises
        FeedbackError for an event that no gateway would take, FeedbackUnavailable when the file can't."""
        known: dict[str, Any] = {
            "event_id": uuid.uuid4().hex,
            "user": self._user,
            "client": self._client,
            "editor_ms": time.time_ns() // 1_000_000,
            **fields,
        }
        event = Event(**known)
        self.publish_event(event)
        return event.event_id

    def publish_event(self, event: Event) -> None:
        """Reports `event` as it is: for adapters, whose events have ids. Raises as `publish`; calling it
        twice is safe."""
        if not event.text.isascii():  # editors cut text anywhere: half a character has no UTF-8
            event = msgspec.structs.replace(event, text=event.text.encode(errors="replace").decode())
        fault = fault_of(event)
        if fault:
            raise FeedbackError(f"feedback {event.event_id[:128]!a}: {fault}")
        dropped = self._buffer.append(event)
        self._work.set()
        if dropped:
            _logger.warning("feedback buffer full: dropped=%d", len(dropped))
            if self._on_dropped is not None:
                self._on_dropped(dropped)

    def status(self) -> Status:
        return Status(**self._buffer.counts(), last_error=self._last_error)

    def flush(self, deadline_s: float) -> bool:
        """Tries at once, whatever pause is under way, and waits until everything is acknowledged; False when
        it isn't by then. Loses nothing."""
        end_s = time.monotonic() + deadline_s
        self._hurry = True
        self._work.set()
        with self._idle:
            while self._sending or self._buffer.counts()["waiting"]:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not self._thread.is_alive():
                    return False
                self._idle.wait(min(left_s, 0.1))
        return True

    def close(self, deadline_s: float = 2.0) -> int:
        """Flushes for `deadline_s`, then stops; how many events stay in the file for the next client. Calling
        it twice is safe."""
        if self._left is not None:
            return self._left
        try:
            if self._thread.is_alive():
                self.flush(deadline_s)
        finally:
            self._closing = True
            self._work.set()
            self._transport.interrupt()
            self._thread.join(END_S)
        try:
            self._left = self._buffer.counts()["waiting"]
        finally:
            if not self._thread.is_alive():
                self._buffer.close()
        return self._left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        failures = 0
        while not self._closing:
            self._work.wait()
            self._work.clear()
            while not self._closing:
                try:
                    if not self._send_one():
                        break
                except Exception as error:
                    if not isinstance(error, FeedbackError):  # a call-back's: the others go on
                        _logger.exception("feedback client")
                    self._last_error = str(error)
                    failures = failures + 1 if self._pause(failures, error) else 0
                else:
                    self._last_error, failures = "", 0
        self._transport.close()

    def _send_one(self) -> bool:
        """One batch from the head of the file to its answer; False when there is none."""
        with self._idle:
            self._sending = True
        try:
            batch = self._buffer.head(events_max=self._batch_now, bytes_max=BATCH_BYTES_MAX)
            if not batch:
                return False
            self._settle(batch, self._answer(batch))
            return True
        finally:
            with self._idle:
                self._sending = False
                self._idle.notify_all()

    def _answer(self, batch: Sequence[Waiting]) -> Reply:
        """The gateway's. A batch that it will never take is sent in halves; an event alone that it will never
        take is refused."""
        try:
            reply = self._transport.send([item.event for item in batch], timeout_s=SEND_S_MAX)
        except FeedbackError as error:
            if error.retriable or isinstance(error, FeedbackUnauthenticated):
                raise
            if len(batch) > 1:
                self._batch_now = len(batch) // 2
                raise
            alone = Refusal(index=0, event_id=batch[0].event.event_id, reason=str(error))
            return Reply(accepted=0, refused=(alone,))
        self._batch_now = min(self._batch_max, 2 * self._batch_now)
        return reply

    def _settle(self, batch: Sequence[Waiting], reply: Reply) -> None:
        named = {item.index for item in reply.refused}
        fits = reply.accepted >= 0 and len(named) == len(reply.refused) and named <= set(range(len(batch)))
        if not fits or reply.accepted + len(named) != len(batch):
            raise FeedbackUnavailable(
                f"gateway: expected an answer for {len(batch)} events, got {reply.accepted} accepted and "
                f"{sorted(named)} refused"
            )
        refused = [(batch[item.index].event, item.reason) for item in reply.refused]
        self._buffer.remove([item.number for item in batch], sent=reply.accepted, refused=len(refused))
        if refused:
            _logger.warning("feedback refused: events=%d first=%s", len(refused), refused[0][1])
            if self._on_refused is not None:
                self._on_refused(refused)

    def _pause(self, failures: int, error: Exception) -> bool:
        """Doubles up to `BACKOFF_S_MAX`, of which a random half is waited; never less than the gateway asked
        for. False when `flush` or `close` cut it short."""
        base_s = min(BACKOFF_S_MIN * 2 ** min(failures, 16), BACKOFF_S_MAX)
        if isinstance(error, FeedbackUnauthenticated):
            base_s = BACKOFF_S_MAX  # a token does not mend itself within a second
        wait_s = base_s * (0.5 + 0.5 * self._random.random())
        if isinstance(error, FeedbackOverloaded | FeedbackUnavailable):
            wait_s = max(wait_s, min(error.retry_after_ms / 1000, BACKOFF_S_MAX))
        end_s = time.monotonic() + wait_s
        while not self._closing and not self._hurry and (left_s := end_s - time.monotonic()) > 0:
            self._work.wait(left_s)
            self._work.clear()
        cut, self._hurry = self._hurry, False
        return not cut

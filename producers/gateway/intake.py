"""From reported events to records: checked one by one, users under their pseudonyms, code encrypted or left
out.

Pure but for the key file of users' code. Not here: who may send (`keys`), writing (`writer`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.bus.protocol import Message
from headrace.clock import Clock
from headrace.producers.gateway.recent import name_of
from headrace.producers.gateway.text_keys import Text, TextKeys
from headrace.rpc.feedback import Event, Refusal, fault_of
from headrace.wire.codec import encode_batch
from headrace.wire.pseudonyms import Pseudonyms
from headrace.wire.records import Feedback
from headrace.wire.topics import FEEDBACK


class Taken(NamedTuple):
    """What a batch comes to."""

    names: list[str]
    """Of the good events: who says what, for the memory of resends."""
    messages: list[Message]
    refused: list[Refusal]


class Intake:
    """`text_keys` None: code is not stored, whoever sends it."""

    def __init__(
        self, *, run: str, region: str, pseudonyms: Pseudonyms, text_keys: TextKeys | None, clock: Clock
    ) -> None:
        self._run = run
        self._region = region
        self._source = f"gateway/{region}"
        self._pseudonyms = pseudonyms
        self._text_keys = text_keys
        self._clock = clock

    def take(self, events: Sequence[Event | str], *, sender: str, own: bool = False) -> Taken:
        """`events` as messages in their order; those that are at fault as refusals. An event without a user
        is of `sender`'s; with `own` it must be."""
        good: list[Event] = []
        refused: list[Refusal] = []
        for index, event in enumerate(events):
            fault = event if isinstance(event, str) else fault_of(event)
            if own and not isinstance(event, str) and event.user not in ("", sender):
                fault = f"user: expected none or {sender}, whose token this is, got another"
            if fault or isinstance(event, str):
                event_id = "" if isinstance(event, str) else event.event_id[:128]
                refused.append(Refusal(index=index, event_id=_clean(event_id), reason=_clean(fault)))
            else:
                good.append(event)
        records = self._records(good, sender)
        encoded = encode_batch(
            records, [r.event_id for r in records], source=self._source, now_ms=self._clock.now_ms()
        )
        messages = [
            Message(FEEDBACK.name, record.suggestion_id.encode(), value, headers)
            for record, (value, headers) in zip(records, encoded, strict=True)
        ]
        return Taken([name_of(record.user, record.event_id) for record in records], messages, refused)

    def _records(self, events: Sequence[Event], sender: str) -> list[Feedback]:
        users = [self._pseudonyms.of(event.user or sender) for event in events]
        sealed: Iterator[bytes] = iter(())
        if self._text_keys is not None:
            texts = [Text(e.text, user, e.event_id) for e, user in zip(events, users, strict=True) if e.text]
            sealed = iter(self._text_keys.sealed(texts))
        return [
            self._record(event, user, next(sealed, b"") if event.text else b"")
            for event, user in zip(events, users, strict=True)
        ]

    def _record(self, event: Event, user: str, text: bytes) -> Feedback:
        return Feedback(
            run=self._run,
            event_id=event.event_id,
            suggestion_id=event.suggestion_id,
            kind=event.kind,  # type: ignore[arg-type]  # checked by fault_of
            editor_ms=event.editor_ms,
            view_id=event.view_id,
            user=user,
            client=event.client,
            accepted_length=event.accepted_length,
            superseded_by=event.superseded_by or None,
            continues=event.continues or None,
            region=self._region,
            text=text,
            persisted_s=event.persisted_s,
            difference=event.difference,
        )


def _clean(text: str) -> str:
    """Text of an answer: what cannot be UTF-8 (lone surrogates) is replaced."""
    return text.encode(errors="replace").decode()

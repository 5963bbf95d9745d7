"""The way of one batch through a gateway, whichever protocol brought it: who sends, how much, what is good,
into the queue, and the answer when it is durable.

Not here: transport (`over_grpc`, `over_http`).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.producers.config import GatewayConfig
from headrace.producers.gateway.intake import Intake
from headrace.producers.gateway.keys import Key, Keys
from headrace.producers.gateway.writer import Lane, Writer
from headrace.rpc.feedback import Event, Refusal, Reply


@dataclass(frozen=True, slots=True)
class Ticket:
    """A batch in the queue."""

    number: int
    good: int
    refused: Sequence[Refusal]
    done: "asyncio.Future[int] | None"
    """None when nothing of the batch is good."""

    async def reply(self) -> Reply:
        """When the batch is durable. Raises FeedbackUnavailable: its outcome is unknown."""
        duplicates = 0 if self.done is None else await self.done
        return Reply(accepted=self.good, duplicates=duplicates, refused=tuple(self.refused))


class Door:
    """What both protocols share."""

    def __init__(self, config: GatewayConfig, keys: Keys, intake: Intake, writer: Writer) -> None:
        self.config = config
        self._keys = keys
        self._intake = intake
        self._writer = writer

    @property
    def open(self) -> bool:
        """Nobody needs a token."""
        return self._keys.open

    @property
    def serving(self) -> bool:
        """The log takes events."""
        return not self._writer.away

    def sender(self, authorization: str | bytes | None) -> Key:
        """Raises FeedbackUnauthenticated."""
        if isinstance(authorization, bytes):
            authorization = authorization.decode(errors="replace")
        return self._keys.of(authorization or "")

    def take(self, key: Key, lane: Lane, events: Sequence[Event | str], number: int = 0) -> Ticket:
        """Puts the good ones of `events` in the queue. Raises FeedbackOverloaded, FeedbackUnavailable (send
        the batch again)."""
        self._writer.room_for(len(events))
        key.bucket.take(len(events), asyncio.get_running_loop().time())
        names, messages, refused = self._intake.take(events, sender=key.name, own=key.own)
        done = self._writer.submit(lane, names, messages) if messages else None
        return Ticket(number, len(messages), refused, done)

"""Events that wait for their suggestion: editors' words are often read before what they speak of.

Not here: what becomes of an event whose suggestion is known (`streams.feedback`).

Each event waits for itself, so that the outcome doesn't depend on which topic is read first; what has waited
for too long is an orphan, a dead letter with its place.
"""

from collections.abc import Sequence

import msgspec

from headrace.errors import WireError
from headrace.streams.processor import Output
from headrace.wire.codec import CONTENT_TYPE, at, encode_plain, type_name
from headrace.wire.records import DeadLetter, Feedback
from headrace.wire.topics import DEAD_LETTERS, FEEDBACK


class Waiting(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """An event at its place in the log."""

    at_ms: int
    partition: int
    offset: int
    event: Feedback

    def letter(self, reason: str, at_ms: int) -> Output:
        """For an event that is given up. Its bytes are those of the record: unknown fields of a later version
        stay at its place in the log."""
        place = f"{FEEDBACK.name}/{self.partition}/{self.offset}"
        letter = DeadLetter(
            topic=FEEDBACK.name,
            partition=self.partition,
            offset=self.offset,
            key=self.event.suggestion_id.encode(),
            value=encode_plain(self.event),
            headers=(
                ("ce_id", self.event.event_id.encode()),
                ("ce_type", type_name(Feedback).encode()),
                ("content-type", CONTENT_TYPE),
            ),
            error=WireError.__name__,
            reason=f"{at(FEEDBACK.name, self.partition, self.offset)}: {reason}",
            by="streams.feedback",
            at_ms=at_ms,
        )
        return Output(DEAD_LETTERS.name, place, letter, place)

    def repeats(self, other: "Waiting") -> bool:
        """The same event again, of the same user: nobody can take an id from somebody else."""
        return (self.event.event_id, self.event.user) == (other.event.event_id, other.event.user)


class Held(msgspec.Struct, tag="h", array_like=True):
    """Events of one suggestion, in the order of the log."""

    events: list[Waiting]
    bytes: int = 0

    def drop_older(self, than_ms: int) -> list[Waiting]:
        """Takes those out that the log took before `than_ms`."""
        old = [waiting for waiting in self.events if waiting.at_ms < than_ms]
        if old:
            self.events = self.events[len(old) :]
            self.bytes = _bytes(self.events)
        return old

    def holds(self, waiting: Waiting, wait_ms: int) -> bool:
        """A repetition counts for itself once the first may be an orphan."""
        return any(waiting.repeats(held) and held.at_ms + wait_ms >= waiting.at_ms for held in self.events)

    def add(self, waiting: Waiting, *, events_max: int, bytes_max: int) -> None:
        """Raises WireError, with nothing changed, when it is one too many."""
        size = _bytes([waiting])
        if len(self.events) >= events_max or self.bytes + size > bytes_max:
            raise WireError(
                f"suggestion: expected one that was made, or at most {events_max} events and {bytes_max} "
                "bytes that wait for it, got more"
            )
        self.events.append(waiting)
        self.bytes += size


def _bytes(events: Sequence[Waiting]) -> int:
    return sum(len(encode_plain(waiting.event)) for waiting in events)

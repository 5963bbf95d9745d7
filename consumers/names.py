"""Which blobs a log still needs: every one that a record on it names.

| record | names |
|---|---|
| `experience`, `experience.live`, and what of it lies in `dead.letters` | the blob of its claim |
| `weights` | the manifest, every encoding, and the state that a run began with |
| `train.steps` | the checkpoints that are live, of every run |

A record of a kind that this version does not know may name anything: then nothing can be told, and that is an
error. Who acts on it: `consumers.sweep`.
"""

from collections import deque
from collections.abc import Iterator

from headrace.bus.protocol import Bus, Delivery, TopicPartition
from headrace.consumers import kept
from headrace.errors import WireError
from headrace.wire.codec import decode, decode_as, type_name
from headrace.wire.records import (
    Checkpoint,
    Claim,
    DeadLetter,
    Experience,
    Record,
    TrainStep,
    WeightsPublished,
)
from headrace.wire.topics import DEAD_LETTERS, EXPERIENCE, EXPERIENCE_LIVE, TOPICS, TRAIN_STEPS, WEIGHTS

READ = (EXPERIENCE.name, EXPERIENCE_LIVE.name, DEAD_LETTERS.name, WEIGHTS.name, TRAIN_STEPS.name)


class _Claiming(Record, frozen=True, kw_only=True):
    """An `Experience` of which only the claim is read."""

    claim: Claim | None = None


class Names:
    """The URIs that the log of `bus` names, as of the last `refresh`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._positions: dict[TopicPartition, int] = {}
        self._claims: dict[TopicPartition, deque[tuple[int, str]]] = {}
        """(offset, URI), oldest first: retention takes the record and with it the name."""
        self._announced: set[str] = set()
        self._live: dict[str, dict[int, Checkpoint]] = {}
        """By run."""

    async def refresh(self) -> set[str]:
        """Reads what is new on the log; every URI that it names now. Raises WireError that names the place of
        a record whose kind is not known, OffsetGone when retention overtook the reading, BusUnavailable."""
        known = await self._bus.topics()
        topics = [name for name in READ if name in known]
        begins, ends = await self._bus.begins(topics), await self._bus.ends(topics)
        for tp, end in sorted(ends.items()):
            start = max(self._positions.get(tp, 0), begins[tp])
            if end > start:
                async for delivery in self._bus.read_range(tp, start, end):
                    self._apply(delivery)
            self._positions[tp] = max(start, end)
            claims = self._claims.get(tp, deque())
            while claims and claims[0][0] < begins[tp]:
                claims.popleft()
        return {*self._announced, *self._uris_of_claims(), *self._uris_of_checkpoints()}

    def _apply(self, delivery: Delivery) -> None:
        _check_known(delivery)
        match delivery.topic:
            case EXPERIENCE.name | EXPERIENCE_LIVE.name | DEAD_LETTERS.name:
                uri = _claimed(delivery)
                if uri is not None:
                    self._claims.setdefault(delivery.tp, deque()).append((delivery.offset, uri))
            case WEIGHTS.name:
                record = _record(delivery)
                if isinstance(record, WeightsPublished):
                    self._announced |= announced(record)
            case TRAIN_STEPS.name:
                record = _record(delivery)
                if isinstance(record, TrainStep):
                    kept.fold(self._live.setdefault(record.run, {}), record)

    def _uris_of_claims(self) -> Iterator[str]:
        return (uri for claims in self._claims.values() for _, uri in claims)

    def _uris_of_checkpoints(self) -> Iterator[str]:
        return (saved.uri for live in self._live.values() for saved in live.values())


def announced(record: WeightsPublished) -> set[str]:
    """The blobs that an announcement names."""
    start = {record.checkpoint.uri} if record.checkpoint is not None else set()
    return {record.manifest_uri, *(encoding.uri for encoding in record.encodings), *start}


def _check_known(delivery: Delivery) -> None:
    kind = (delivery.header("ce_type") or b"").decode(errors="replace")
    known = {type_name(record) for record in TOPICS[delivery.topic].records}
    if kind.startswith("headrace.") and kind not in known:
        raise WireError(
            f"{delivery.place}: expected one of {', '.join(sorted(known))}, got {kind!r}:"
            " what it names can't be told"
        )


def _record(delivery: Delivery) -> Record | None:
    """None for bytes that nobody says are a record: they name nothing."""
    if not (delivery.header("ce_type") or b"").startswith(b"headrace."):
        return None
    try:
        return decode(delivery.topic, delivery.value or b"", delivery.headers)
    except WireError as error:
        raise WireError(f"{delivery.place}: {error}: what it names can't be told") from error


def _claimed(delivery: Delivery) -> str | None:
    """The URI that an experience claims, or one in a dead letter: it may be sent again. What can't be read is
    not trained by anyone."""
    try:
        value, encoding = delivery.value or b"", delivery.header("content-encoding")
        if delivery.topic == DEAD_LETTERS.name:
            letter = decode_as(DeadLetter, value, encoding)
            headers = dict(letter.headers)
            if headers.get("ce_type") != type_name(Experience).encode():
                return None
            value, encoding = letter.value, headers.get("content-encoding")
        claim = decode_as(_Claiming, value, encoding).claim
    except WireError:
        return None
    return None if claim is None else claim.uri

"""The log as Headrace sees it: a small protocol with two implementations (`bus.sqlite`, `bus.kafka`).

Not here: what a record means (`wire`), who reads what (`producers`, `consumers`, `streams`). Nothing in this
module does I/O.

Guarantees that the contract suite (tests/bus/contract.py) holds both implementations to:

- `produce` returns when the batch is durable; records of one partition keep their order.
- The partition of a key is `partition_of(key, partitions)` on both buses.
- Offsets grow, with gaps: the next position after a record is `offset + 1`, but the record there may have a
  larger offset.
- Readers see committed transactions only, whole or not at all.
- `Transactor.start` fences every earlier holder of the same id: its next commit raises `Fenced` and leaves
  nothing behind.
- A consumer group's committed position never moves past a record that its member did not commit.
"""

import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, Protocol, Self

from headrace.errors import RecordTooLarge, TopicMismatch
from headrace.wire.codec import Headers
from headrace.wire.topics import RECORD_BYTES_MAX, Topic

HEAD_BYTES_MAX = 40_000
"""Key and headers of one message together. With a value of RECORD_BYTES_MAX and the framing it stays below
aiokafka's 1,048,576.
"""


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


Positions = Mapping[TopicPartition, int]
"""Next offset to read, by partition."""


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent. `partition` None: by key."""

    topic: str
    key: bytes | None
    value: bytes | None
    """None is a tombstone on a compacted topic."""
    headers: Headers = ()
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """What is read: a message at its place in the log. `timestamp_ms` is log-append time."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers

    @property
    def place(self) -> str:
        """`rollout.steps[3]@1042`."""
        return f"{self.topic}[{self.partition}]@{self.offset}"

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    def header(self, name: str) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    begin: int
    """Oldest offset still kept."""
    end: int
    """Next offset to be written."""
    records: int
    bytes: int | None
    """None where the broker does not tell."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A topic whose settings on the bus are not those of its definition."""

    topic: str
    setting: str
    expected: str
    found: str


class Reader(Protocol):
    """Reads assigned partitions from given positions. No group, no commits."""

    async def read(self, *, records_max: int = 500, wait_ms: int = 1000) -> list[Delivery]:
        """The next deliveries (in order within a partition), or [] after `wait_ms` without any, or at once
        when the positions have moved past a gap.

        Raises OffsetGone when a position has left the log (retention, or a topic made anew): never skips
        silently.
        """
        ...

    def positions(self) -> dict[TopicPartition, int]:
        """Where the next `read` goes on. Moves past gaps too."""
        ...

    def seek(self, positions: Positions) -> None: ...


class GroupMember(Protocol):
    """A member of a consumer group: partitions come and go between calls of `poll`."""

    async def poll(self, *, records_max: int = 500, wait_ms: int = 1000) -> list[Delivery]:
        """Next deliveries from the partitions that are ours now, or [] after `wait_ms`. A partition that the
        group never committed starts at its oldest record.

        Heart-beats go on between calls, however long a handler takes (one that blocks the event loop blocks
        them too). Raises OffsetGone when a position has left the log: `seek` to where the policy says, and go
        on. Raises Fenced when another process joined under the same stable id (embedded log only).
        """
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that were ours at the last `poll`."""
        ...

    def seek(self, positions: Positions) -> None:
        """Reads on from there. Partitions that are not ours are left out."""
        ...

    async def commit(self, positions: Positions) -> None:
        """Commits next positions. Partitions no longer ours are left out, never an error: their new owner
        reads them again.

        Raises nothing for a rebalance under way; returns when the broker answered.
        """
        ...


class Transactor(Protocol):
    """Sends transactions under one transactional id."""

    async def commit(
        self, messages: Sequence[Message], *, group: str | None = None, positions: Positions | None = None
    ) -> list[int]:
        """Appends `messages` and commits `positions` for `group`, all or nothing. Returns the offsets.

        Raises Fenced when a newer holder of the id exists, BusUnavailable when the outcome is unknown: start
        anew and look.
        """
        ...


class Bus(Protocol):
    """One log. Use as `async with open_bus(address) as bus`."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...

    async def create_topics(self, topics: Sequence[Topic]) -> list[Difference]:
        """Creates those that are missing; reports, and leaves alone, settings that differ. Safe to call
        twice."""
        ...

    async def topics(self) -> dict[str, list[PartitionInfo]]:
        """Every topic on the bus, partitions in order."""
        ...

    async def retention_ms(self, topic: str) -> int:
        """How long this bus keeps the records of a topic, whatever its definition says; `FOR_EVER` when none
        leaves by age. Raises TopicMismatch (no such topic), BusUnavailable."""
        ...

    async def groups(self) -> dict[str, dict[TopicPartition, int]]:
        """Committed positions of every consumer group."""
        ...

    async def produce(self, messages: Sequence[Message]) -> list[int]:
        """Appends a batch; returns each message's offset. Raises RecordTooLarge, TopicMismatch (no such
        topic), BusUnavailable."""
        ...

    def reader(self, positions: Positions) -> AbstractAsyncContextManager[Reader]: ...

    def member(
        self, group: str, topics: Sequence[str], *, member_id: str | None = None
    ) -> AbstractAsyncContextManager[GroupMember]:
        """Joins `group`. A stable `member_id` (static membership) takes its partitions back at once after a
        restart."""
        ...

    def transactor(self, transactional_id: str) -> AbstractAsyncContextManager[Transactor]:
        """Fences earlier holders of the id on entry."""
        ...

    async def committed(self, group: str, topics: Sequence[str]) -> dict[TopicPartition, int]:
        """Committed positions of `group`; partitions never committed are absent. A commit under way counts as
        not yet made, or is waited for: read after `transactor` of the same id has started, the answer is
        final."""
        ...

    async def ends(self, topics: Sequence[str]) -> dict[TopicPartition, int]:
        """End of the committed log of each partition: a reader that reached it has seen everything committed
        so far."""
        ...

    async def begins(self, topics: Sequence[str]) -> dict[TopicPartition, int]:
        """Oldest position still kept."""
        ...

    async def offsets_at(self, topic: str, timestamp_ms: int) -> dict[TopicPartition, int]:
        """First position of each partition with log-append time >= `timestamp_ms`; the end when there is
        none."""
        ...

    def read_range(self, tp: TopicPartition, start: int, end: int) -> AsyncIterator[Delivery]:
        """Committed records with start <= offset < end, then stops (bounded by a deadline, never waits for
        new ones). Raises OffsetGone."""
        ...


def check_size(message: Message) -> int:
    """Bytes of key and value. Raises RecordTooLarge: the same limits on both buses."""
    key, value = message.key or b"", message.value or b""
    head_bytes = len(key) + sum(map(len, chain.from_iterable(message.headers)))
    if len(value) > RECORD_BYTES_MAX:
        raise RecordTooLarge(
            f"{message.topic}: expected a value of at most {RECORD_BYTES_MAX} bytes, got {len(value)}"
            f" (key {key[:80]!r})"
        )
    if head_bytes > HEAD_BYTES_MAX:
        raise RecordTooLarge(
            f"{message.topic}: expected key and headers of at most {HEAD_BYTES_MAX} bytes, got {head_bytes}"
            f" (key {key[:80]!r})"
        )
    return len(key) + len(value)


def partition_for(message: Message, partitions: int) -> int:
    """Where `message` goes. Raises TopicMismatch for a partition that is not there, or when neither key nor
    partition is given.
    """
    if message.partition is not None:
        if not 0 <= message.partition < partitions:
            raise TopicMismatch(
                f"{message.topic}: expected a partition below {partitions}, got {message.partition}"
            )
        return message.partition
    if message.key is None:
        raise TopicMismatch(f"{message.topic}: expected a key or a partition, got neither")
    return partition_of(message.key, partitions)


def partition_of(key: bytes, partitions: int) -> int:
    """Kafka's default partitioner: positive murmur2 of the key modulo the partitions."""
    return (_murmur2(key) & 0x7FFFFFFF) % partitions


@lru_cache(maxsize=16_384)  # records of a group share their key; the hash costs as much as an append
def _murmur2(data: bytes) -> int:
    """MurmurHash2 with Kafka's seed (org.apache.kafka.common.utils.Utils.murmur2), as unsigned 32 bits."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    words = len(data) // 4
    for k in struct.unpack_from(f"<{words}I", data):
        k = (k * m) & mask
        h = ((h * m) & mask) ^ (((k ^ (k >> 24)) * m) & mask)
    tail = data[words * 4 :]
    if tail:
        h = ((h ^ int.from_bytes(tail, "little")) * m) & mask
    h = ((h ^ (h >> 13)) * m) & mask
    return h ^ (h >> 15)

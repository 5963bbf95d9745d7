"""Records in the file: append, read, look up, retention. Plain functions of a connection inside a transaction
that the caller opened.

Not here: who reads (`groups`), threads and locks (`file`).

A record's row number is `partition id << OFFSET_BITS | offset`: each partition is one contiguous, ordered
range of one B-tree. Log-append time never falls within a partition, so a lookup by time is a binary search
and needs no index.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.bus.protocol import (
    Delivery,
    Difference,
    Message,
    PartitionInfo,
    TopicPartition,
    check_size,
    partition_for,
)
from headrace.errors import OffsetGone, TopicMismatch
from headrace.wire.codec import Headers
from headrace.wire.topics import FOR_EVER, Topic

OFFSET_BITS = 40
READ_BYTES_MAX = 16 << 20
TOMBSTONE_MS = (
    86_400_000  # how long a reader may take to read back a compacted topic and still see every deletion
)
SWEEP_RECORDS_MAX = 5_000  # a sweep holds the write lock: 25 us a record on a busy two-core machine

_pack_headers = msgspec.msgpack.Encoder().encode
_unpack_headers = msgspec.msgpack.Decoder(Headers).decode


@dataclass(slots=True)
class Tail:
    """Where a partition begins and ends."""

    tp: TopicPartition
    id: int
    begin: int
    next: int
    last_ms: int
    compacted: bool

    def row(self, offset: int) -> int:
        return self.id << OFFSET_BITS | offset


def tails(db: sqlite3.Connection, topic: str) -> list[Tail]:
    """Partitions of `topic` in order. Raises TopicMismatch when there is no such topic."""
    rows = db.execute(
        "SELECT partition, id, begin, next, last_ms, compacted FROM partitions JOIN topics ON name = topic"
        " WHERE topic = ? ORDER BY partition",
        (topic,),
    ).fetchall()
    if not rows:
        raise TopicMismatch(f"{topic}: expected a topic of this log, there is none (headrace topics create)")
    return [Tail(TopicPartition(topic, p), i, b, n, ms, bool(c)) for p, i, b, n, ms, c in rows]


def append(
    db: sqlite3.Connection, messages: Sequence[Message], now_ms: int, *, control: bool = False
) -> list[int]:
    """Offsets of the appended messages, in their order.

    `control` leaves one offset unused behind the records of each partition, as Kafka's transaction marker
    does.
    """
    by_topic = {topic: tails(db, topic) for topic in {message.topic for message in messages}}
    rows, offsets = [], []
    written: dict[int, tuple[Tail, int, int]] = {}
    for message in messages:
        partitions = by_topic[message.topic]
        size = check_size(message)
        tail = partitions[partition_for(message, len(partitions))]
        offset, row = tail.next, tail.row(tail.next)
        tail.next += 1
        tail.last_ms = max(tail.last_ms, now_ms)
        rows.append((row, tail.last_ms, message.key, message.value, _pack_headers(message.headers)))
        offsets.append(offset)
        _, count, volume = written.get(tail.id, (tail, 0, 0))
        written[tail.id] = (tail, count + 1, volume + size)
    db.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", rows)
    for tail, count, volume in written.values():
        tail.next += control
        db.execute(
            "UPDATE partitions SET next = ?, last_ms = ?, records = records + ?, bytes = bytes + ?"
            " WHERE id = ?",
            (tail.next, tail.last_ms, count, volume, tail.id),
        )
        if tail.compacted:
            _compact(db, tail, (row for row in rows if row[0] >> OFFSET_BITS == tail.id))
    return offsets


def read(
    db: sqlite3.Connection, positions: Mapping[TopicPartition, int], records_max: int
) -> tuple[list[Delivery], dict[TopicPartition, int]]:
    """Deliveries from `positions` on, and the positions after them (past gaps too). Earlier partitions go
    first.

    Stops at `records_max` records or READ_BYTES_MAX bytes. Raises OffsetGone, TopicMismatch.
    """
    known = {tail.tp: tail for topic in {tp.topic for tp in positions} for tail in tails(db, topic)}
    after = dict(positions)
    deliveries: list[Delivery] = []
    bytes_left = READ_BYTES_MAX
    for tp, position in positions.items():
        tail = existing(known, tp)
        check_position(tp, position, tail.begin, tail.next)
        if position == tail.next:
            continue
        if len(deliveries) >= records_max or bytes_left <= 0:
            break
        after[tp] = tail.next
        for delivery in scan(db, tail, position, tail.next):
            deliveries.append(delivery)
            bytes_left -= len(delivery.value or b"")
            if len(deliveries) >= records_max or bytes_left <= 0:
                after[tp] = delivery.offset + 1
                break
    return deliveries, after


def scan(db: sqlite3.Connection, tail: Tail, start: int, end: int) -> Iterator[Delivery]:
    """Records of one partition with start <= offset < end."""
    mask = (1 << OFFSET_BITS) - 1
    for row, ms, key, value, headers in db.execute(
        "SELECT * FROM records WHERE place >= ? AND place < ? ORDER BY place",
        (tail.row(start), tail.row(end)),
    ):
        yield Delivery(tail.tp.topic, tail.tp.partition, row & mask, ms, key, value, _unpack_headers(headers))


def check_position(tp: TopicPartition, position: int, begin: int, end: int) -> None:
    if not begin <= position <= end:
        raise OffsetGone(
            f"{tp}@{position}: expected a position in [{begin}, {end}], the log no longer holds it"
        )


def existing(known: Mapping[TopicPartition, Tail], tp: TopicPartition) -> Tail:
    if tp not in known:
        raise TopicMismatch(f"{tp}: expected a partition of this log, {tp.topic} has fewer")
    return known[tp]


def offset_at(db: sqlite3.Connection, tail: Tail, timestamp_ms: int) -> int:
    """First offset with log-append time >= `timestamp_ms`; the end when there is none. Binary search over the
    rows.
    """
    low, high = tail.begin, tail.next
    while low < high:
        middle = (low + high) // 2
        found = db.execute(
            "SELECT place, timestamp_ms FROM records WHERE place >= ? AND place < ? ORDER BY place LIMIT 1",
            (tail.row(middle), tail.row(high)),
        ).fetchone()
        if found is None or found[1] >= timestamp_ms:
            high = middle
        else:
            low = found[0] - tail.row(0) + 1
    first = db.execute(
        "SELECT place FROM records WHERE place >= ? AND place < ? ORDER BY place LIMIT 1",
        (tail.row(low), tail.row(tail.next)),
    ).fetchone()
    return tail.next if first is None else int(first[0] - tail.row(0))


def create_topics(db: sqlite3.Connection, topics: Iterable[Topic]) -> list[Difference]:
    """Creates those that are missing; the settings of existing ones that differ, left as they are."""
    differences = []
    for topic in topics:
        wanted = {
            "partitions": topic.partitions,
            "retention_ms": topic.retention_ms,
            "compacted": int(topic.compacted),
        }
        found = db.execute(
            "SELECT (SELECT count(*) FROM partitions WHERE topic = name), retention_ms, compacted"
            " FROM topics WHERE name = ?",
            (topic.name,),
        ).fetchone()
        if found is None:
            db.execute(
                "INSERT INTO topics VALUES (?, ?, ?)", (topic.name, topic.retention_ms, topic.compacted)
            )
            db.executemany(
                "INSERT INTO partitions (topic, partition) VALUES (?, ?)",
                [(topic.name, partition) for partition in range(topic.partitions)],
            )
            continue
        for (setting, expected), value in zip(wanted.items(), found, strict=True):
            if expected != value:
                differences.append(Difference(topic.name, setting, str(expected), str(value)))
    return differences


def list_topics(db: sqlite3.Connection) -> dict[str, list[PartitionInfo]]:
    found: dict[str, list[PartitionInfo]] = {}
    for topic, *info in db.execute(
        "SELECT topic, begin, next, records, bytes FROM partitions ORDER BY topic, partition"
    ):
        found.setdefault(topic, []).append(PartitionInfo(*info))
    return found


def retention_ms(db: sqlite3.Connection, topic: str) -> int:
    """FOR_EVER if nothing leaves by age. Raises TopicMismatch."""
    tails(db, topic)
    kept_ms, compacted = db.execute(
        "SELECT retention_ms, compacted FROM topics WHERE name = ?", (topic,)
    ).fetchone()
    return FOR_EVER if compacted else int(kept_ms)


def sweep(db: sqlite3.Connection, now_ms: int, records_max: int = SWEEP_RECORDS_MAX) -> bool:
    """Deletes what is older than its topic keeps, oldest first. True when `records_max` was reached and more
    may be left.
    """
    left = records_max
    for topic, retention_ms, compacted in db.execute("SELECT * FROM topics").fetchall():
        if retention_ms == FOR_EVER or compacted:
            continue
        for tail in tails(db, topic):
            kept = min(offset_at(db, tail, now_ms - retention_ms), tail.begin + left)
            if kept > tail.begin:
                _forget(db, tail.id, tail.row(tail.begin), tail.row(kept))
                db.execute("UPDATE partitions SET begin = ? WHERE id = ?", (kept, tail.id))
                left -= kept - tail.begin
    dead = db.execute(
        "SELECT partition_id, key, offset FROM newest WHERE dies_ms <= ? ORDER BY dies_ms LIMIT ?",
        (now_ms, left),
    ).fetchall()
    for partition_id, key, offset in dead:
        row = partition_id << OFFSET_BITS | offset
        _forget(db, partition_id, row, row + 1)
        db.execute("DELETE FROM newest WHERE partition_id = ? AND key = ?", (partition_id, key))
    return left - len(dead) <= 0


def _compact(db: sqlite3.Connection, tail: Tail, rows: Iterable[Sequence[object]]) -> None:
    """Keeps the newest record of each key. A tombstone stays for TOMBSTONE_MS."""
    find: Callable[..., sqlite3.Cursor] = db.execute
    for row, ms, key, value, _ in rows:
        assert isinstance(row, int) and isinstance(ms, int)
        if key is None:
            raise TopicMismatch(f"{tail.tp}: expected a key, the topic is compacted")
        older = find(
            "SELECT offset FROM newest WHERE partition_id = ? AND key = ?", (tail.id, key)
        ).fetchone()
        if older is not None:
            _forget(db, tail.id, tail.row(older[0]), tail.row(older[0]) + 1)
        dies_ms = ms + TOMBSTONE_MS if value is None else None
        db.execute(
            "INSERT OR REPLACE INTO newest VALUES (?, ?, ?, ?)", (tail.id, key, row - tail.row(0), dies_ms)
        )


def _forget(db: sqlite3.Connection, partition_id: int, first_row: int, end_row: int) -> None:
    count, volume = db.execute(
        "SELECT count(*), coalesce(sum(coalesce(length(key), 0) + coalesce(length(value), 0)), 0)"
        " FROM records WHERE place >= ? AND place < ?",
        (first_row, end_row),
    ).fetchone()
    db.execute("DELETE FROM records WHERE place >= ? AND place < ?", (first_row, end_row))
    db.execute(
        "UPDATE partitions SET records = records - ?, bytes = bytes - ? WHERE id = ?",
        (count, volume, partition_id),
    )

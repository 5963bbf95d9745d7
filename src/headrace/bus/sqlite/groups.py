"""Consumer groups in the file: members, assignment, committed positions, and transactional ids. Plain
functions inside a transaction.

Not here: heart-beats and polling (`readers`), the choice of owners (`assignment`).

A member lives until `alive_until_ms`, on the machine's monotonic clock, which all processes share and nobody
sets back. Every heart-beat also buries the others that are late. An owner's right to commit is the pair
(incarnation of the member, generation since which the partition is its own): a member that lost a partition,
even if it came back, can't commit what it read before.
"""

import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from headrace.bus.protocol import Positions, TopicPartition
from headrace.bus.sqlite.assignment import assign
from headrace.bus.sqlite.log import tails
from headrace.errors import Fenced


@dataclass(frozen=True, slots=True)
class Membership:
    """Who a member is. `incarnation` tells two processes with the same stable id apart."""

    group: str
    member_id: str
    incarnation: str
    topics: frozenset[str]
    session_ms: int


def join(db: sqlite3.Connection, me: Membership) -> None:
    """Enters the group. Under a stable id of an earlier process: takes its place and partitions, and fences
    it.
    """
    for topic in me.topics:
        tails(db, topic)
    db.execute("INSERT OR IGNORE INTO groups VALUES (?, 0)", (me.group,))
    topics = msgspec.msgpack.encode(sorted(me.topics))
    before = db.execute(
        "SELECT topics FROM members WHERE group_name = ? AND member_id = ?", (me.group, me.member_id)
    ).fetchone()
    db.execute(
        "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?)",
        (me.group, me.member_id, me.incarnation, topics, me.session_ms, _now_ms() + me.session_ms),
    )
    if _bury(db, me) or before is None or before[0] != topics:
        _rebalance(db, me.group)


def heartbeat(db: sqlite3.Connection, me: Membership) -> None:
    """Stays alive, or comes back after having been buried. Raises Fenced."""
    alive = db.execute(
        "UPDATE members SET alive_until_ms = ? WHERE group_name = ? AND member_id = ? AND incarnation = ?",
        (_now_ms() + me.session_ms, me.group, me.member_id, me.incarnation),
    ).rowcount
    if not alive:
        check_incarnation(db, me)
        join(db, me)
    elif _bury(db, me):
        _rebalance(db, me.group)


def leave(db: sqlite3.Connection, me: Membership) -> None:
    gone = db.execute(
        "DELETE FROM members WHERE group_name = ? AND member_id = ? AND incarnation = ?",
        (me.group, me.member_id, me.incarnation),
    ).rowcount
    if gone:
        _rebalance(db, me.group)


def check_incarnation(db: sqlite3.Connection, me: Membership) -> bool:
    """True when we are in the group, False when we were buried. Raises Fenced when another process has our
    id.
    """
    row = db.execute(
        "SELECT incarnation FROM members WHERE group_name = ? AND member_id = ?", (me.group, me.member_id)
    ).fetchone()
    if row is not None and row[0] != me.incarnation:
        raise Fenced(
            f"{me.group}: expected to be member {me.member_id!r}, another process joined under that id"
        )
    return row is not None


def generation(db: sqlite3.Connection, group: str) -> int:
    return int(db.execute("SELECT generation FROM groups WHERE name = ?", (group,)).fetchone()[0])


def owned(db: sqlite3.Connection, me: Membership) -> dict[TopicPartition, int]:
    """Our partitions and the generation since which each is ours."""
    return {
        TopicPartition(topic, partition): since
        for topic, partition, since in db.execute(
            "SELECT topic, partition, since FROM assignments WHERE group_name = ? AND member_id = ?",
            (me.group, me.member_id),
        )
    }


def commit_owned(
    db: sqlite3.Connection, me: Membership, positions: Positions, since: Mapping[TopicPartition, int]
) -> None:
    """Commits those of `positions` whose partition has been ours since `since`; leaves the others out."""
    row = db.execute(
        "SELECT incarnation FROM members WHERE group_name = ? AND member_id = ?", (me.group, me.member_id)
    ).fetchone()
    if row is None or row[0] != me.incarnation:
        return
    ours = owned(db, me)
    commit(db, me.group, {tp: p for tp, p in positions.items() if tp in ours and ours[tp] == since.get(tp)})


def commit(db: sqlite3.Connection, group: str, positions: Positions) -> None:
    db.execute("INSERT OR IGNORE INTO groups VALUES (?, 0)", (group,))
    db.executemany(
        "INSERT OR REPLACE INTO positions VALUES (?, ?, ?, ?)",
        [(group, tp.topic, tp.partition, position) for tp, position in positions.items()],
    )


def committed(db: sqlite3.Connection, group: str) -> dict[TopicPartition, int]:
    rows = db.execute("SELECT topic, partition, position FROM positions WHERE group_name = ?", (group,))
    return {TopicPartition(topic, partition): position for topic, partition, position in rows}


def all_committed(db: sqlite3.Connection) -> dict[str, dict[TopicPartition, int]]:
    groups: dict[str, dict[TopicPartition, int]] = {
        name: {} for (name,) in db.execute("SELECT name FROM groups")
    }
    for name, topic, partition, position in db.execute("SELECT * FROM positions ORDER BY topic, partition"):
        groups[name][TopicPartition(topic, partition)] = position
    return groups


def start_epoch(db: sqlite3.Connection, transactional_id: str) -> int:
    """A new epoch of the id: every holder of an older one is fenced."""
    db.execute("INSERT OR IGNORE INTO transactional VALUES (?, 0)", (transactional_id,))
    db.execute("UPDATE transactional SET epoch = epoch + 1 WHERE id = ?", (transactional_id,))
    return int(db.execute("SELECT epoch FROM transactional WHERE id = ?", (transactional_id,)).fetchone()[0])


def check_epoch(db: sqlite3.Connection, transactional_id: str, epoch: int) -> None:
    row = db.execute("SELECT epoch FROM transactional WHERE id = ?", (transactional_id,)).fetchone()
    if row is None or row[0] != epoch:
        raise Fenced(f"{transactional_id}: expected to hold epoch {epoch}, the newest is {row and row[0]}")


def _bury(db: sqlite3.Connection, me: Membership) -> bool:
    """Removes members that are late. A deadline further away than a session was written before the machine
    last started.
    """
    now_ms = _now_ms()
    return bool(
        db.execute(
            "DELETE FROM members WHERE group_name = ? AND member_id != ?"
            " AND (alive_until_ms < ? OR alive_until_ms > ? + session_ms)",
            (me.group, me.member_id, now_ms, now_ms),
        ).rowcount
    )


def _rebalance(db: sqlite3.Connection, group: str) -> None:
    db.execute("UPDATE groups SET generation = generation + 1 WHERE name = ?", (group,))
    new = generation(db, group)
    subscriptions = {
        member: frozenset(msgspec.msgpack.decode(topics, type=list[str]))
        for member, topics in db.execute(
            "SELECT member_id, topics FROM members WHERE group_name = ?", (group,)
        )
    }
    rows = db.execute(
        "SELECT topic, partition, member_id, since FROM assignments WHERE group_name = ?", (group,)
    ).fetchall()
    before = {TopicPartition(topic, partition): (member, since) for topic, partition, member, since in rows}
    counts = dict(db.execute("SELECT topic, count(*) FROM partitions GROUP BY topic"))
    after = assign(counts, subscriptions, {tp: member for tp, (member, _) in before.items()})
    db.execute("DELETE FROM assignments WHERE group_name = ?", (group,))
    db.executemany(
        "INSERT INTO assignments VALUES (?, ?, ?, ?, ?)",
        [
            (group, *tp, member, before[tp][1] if tp in before and before[tp][0] == member else new)
            for tp, member in after.items()
        ],
    )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000

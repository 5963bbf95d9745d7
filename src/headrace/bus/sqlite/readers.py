"""Reading the embedded log: a reader of given positions, and a member of a consumer group with its
heart-beats.

Not here: what a rebalance does (`groups`), how a row is found (`log`).
"""

import asyncio
import contextlib
import logging
import sqlite3
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from headrace import failpoints
from headrace.bus.protocol import Delivery, Positions, TopicPartition
from headrace.bus.sqlite import groups, log
from headrace.bus.sqlite.file import Heads, LogFile
from headrace.errors import BusUnavailable, Fenced

_logger = logging.getLogger(__name__)


class SqliteReader:
    def __init__(self, file: LogFile, positions: Positions) -> None:
        self._file = file
        self._positions = dict(positions)

    async def read(self, *, records_max: int = 500, wait_ms: int = 1000) -> list[Delivery]:
        deadline_s = asyncio.get_running_loop().time() + wait_ms / 1000
        while True:
            order = _rotated(self._positions)
            deliveries, after = await self._file.read(lambda db: log.read(db, order, records_max))  # noqa: B023 - awaited here
            passed_gap = after != self._positions
            self._positions = after
            if deliveries or passed_gap:
                return deliveries
            if not await self._file.wait(lambda heads: heads.beyond(self._positions), deadline_s):
                return deliveries

    def positions(self) -> dict[TopicPartition, int]:
        return dict(self._positions)

    def seek(self, positions: Positions) -> None:
        self._positions.update(positions)


@dataclass(frozen=True, slots=True)
class _Ownership:
    """What a member owns as of one generation, and where the group's committed positions are."""

    generation: int
    since: Mapping[TopicPartition, int]
    start: Mapping[TopicPartition, int]


class SqliteMember:
    def __init__(self, file: LogFile, me: groups.Membership) -> None:
        self._file = file
        self._me = me
        self._owned = _Ownership(-1, {}, {})
        self._positions: dict[TopicPartition, int] = {}
        self._fenced: Fenced | None = None

    async def poll(self, *, records_max: int = 500, wait_ms: int = 1000) -> list[Delivery]:
        deadline_s = asyncio.get_running_loop().time() + wait_ms / 1000
        while True:
            if self._fenced is not None:
                raise self._fenced
            found = await self._file.read(lambda db: self._look(db, records_max))
            if found is None:
                await self._file.write(lambda db: groups.heartbeat(db, self._me))
            elif isinstance(found, _Ownership):
                self._take(found)
            else:
                deliveries, self._positions = found
                if deliveries or not await self._file.wait(self._moved, deadline_s):
                    return deliveries

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._positions)

    def seek(self, positions: Positions) -> None:
        self._positions.update({tp: position for tp, position in positions.items() if tp in self._positions})

    async def commit(self, positions: Positions) -> None:
        since = self._owned.since
        await self._file.write(lambda db: groups.commit_owned(db, self._me, positions, since))

    async def beat(self) -> None:
        """Heart-beats until cancelled, or fenced. A locked file is no reason to stop: the next beat tries
        again.
        """
        while self._fenced is None:
            await asyncio.sleep(self._me.session_ms / 4000)
            try:
                await self._file.write(lambda db: groups.heartbeat(db, self._me))
            except Fenced as error:
                self._fenced = error
            except BusUnavailable as error:
                _logger.warning(
                    "heart-beat missed: group=%s member=%s %s", self._me.group, self._me.member_id, error
                )

    def _moved(self, heads: Heads) -> bool:
        return (
            heads.beyond(self._positions) or heads.generations.get(self._me.group) != self._owned.generation
        )

    def _look(
        self, db: sqlite3.Connection, records_max: int
    ) -> _Ownership | tuple[list[Delivery], dict[TopicPartition, int]] | None:
        """Records, or our new partitions if the group has changed, or None if it has buried us."""
        if not groups.check_incarnation(db, self._me):
            return None
        generation = groups.generation(db, self._me.group)
        if generation == self._owned.generation:
            return log.read(db, _rotated(self._positions), records_max)
        since = groups.owned(db, self._me)
        committed = groups.committed(db, self._me.group)
        begins = {tail.tp: tail.begin for topic in self._me.topics for tail in log.tails(db, topic)}
        return _Ownership(generation, since, {tp: committed.get(tp, begins[tp]) for tp in since})

    def _take(self, found: _Ownership) -> None:
        """Goes on where we were in partitions that stayed ours, and from the committed position in those that
        came.
        """
        failpoints.reach(f"bus.rebalance/{self._me.group}")
        kept = {tp for tp in self._positions if found.since.get(tp) == self._owned.since[tp]}
        self._positions = {
            tp: self._positions[tp] if tp in kept else start for tp, start in found.start.items()
        }
        self._owned = found


@contextlib.asynccontextmanager
async def membership(
    file: LogFile, group: str, topics: Sequence[str], member_id: str | None, session_ms: int
) -> AsyncIterator[SqliteMember]:
    """A joined member. A dynamic one leaves at the end; a stable one keeps its place until its session ends,
    as in Kafka.
    """
    incarnation = uuid.uuid4().hex
    me = groups.Membership(group, member_id or incarnation, incarnation, frozenset(topics), session_ms)
    await file.write(lambda db: groups.join(db, me))
    member = SqliteMember(file, me)
    heart = asyncio.create_task(member.beat())
    try:
        yield member
    finally:
        heart.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await heart
        if member_id is None:
            await file.write(lambda db: groups.leave(db, me))


def _rotated(positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """The first becomes the last, so that a busy partition cannot starve the others."""
    items = list(positions.items())
    return dict(items[1:] + items[:1])

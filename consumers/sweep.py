"""Removes the blobs that nobody names: what a crash between an upload and its transaction leaves behind.

Removed is what no record of the log names (`consumers.names`) and was last written longer ago than the grace
period, by the store's own clock. A blob that is just being uploaded is younger; one that is put again is
written again. The listing is made before the log is read, so a blob that is named meanwhile is seen.

A store says which logs use it: a trainer leaves a mark in its store when it starts (`register`). A sweep is
refused unless the log is the only one, and was the first: of what another log names, this one knows nothing.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from headrace import log
from headrace.bus.protocol import Bus
from headrace.consumers.names import Names, announced
from headrace.errors import HeadraceError, StoreError, StoreUnavailable
from headrace.store.blobs import Blobs, Stored
from headrace.wire.records import WeightsPublished
from headrace.wire.topics import WEIGHTS

_logger = logging.getLogger(__name__)

OWNERS: Final = "owners"
ALONE: Final = b"alone"
SHARED: Final = b"shared"


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found. `removed` would be removed by a dry one. `missing`: named, but not there."""

    stored: int
    stored_bytes: int
    named: int
    missing: tuple[str, ...]
    young: int
    """Named by nobody yet, within the grace period."""
    removed: tuple[Stored, ...]
    unfinished: int
    """Files of writers that were killed, removed too."""

    @property
    def removed_bytes(self) -> int:
        return sum(blob.bytes for blob in self.removed)


async def log_id(bus: Bus) -> str | None:
    """What tells one log from any other, wherever it lies: the hash of its first announcement, whose trace
    header is random and which is kept for ever. None before there is one."""
    topics = await bus.topics()
    if WEIGHTS.name not in topics:
        return None
    for tp, begin in sorted((await bus.begins([WEIGHTS.name])).items()):
        async for first in bus.read_range(tp, begin, (await bus.ends([WEIGHTS.name]))[tp]):
            parts = [
                first.value or b"",
                *(part for name, value in first.headers for part in (name.encode(), value)),
            ]
            return hashlib.sha256(
                b"\0".join([f"{first.place} {first.timestamp_ms}".encode(), *parts])
            ).hexdigest()[:32]
    return None


async def register(bus: Bus, blobs: Blobs, first: WeightsPublished) -> None:
    """Notes in the store that this log uses it. It has it alone if no other log has said so and nothing lies
    there but `first`, version 0 of its run. Safe to call twice."""
    own = await log_id(bus)
    assert own is not None, "called once version 0 is announced"
    owners = await blobs.marks(OWNERS)
    if own in owners:
        return
    alone = not owners and not await _holds_others(blobs, announced(first))
    await blobs.mark(f"{OWNERS}/{own}", ALONE if alone else SHARED)


async def adopt(bus: Bus, blobs: Blobs) -> None:
    """Takes the store for this log alone, whatever other logs have noted: a person says so. Raises
    StoreError."""
    own = await log_id(bus)
    if own is None:
        raise StoreError(f"{blobs.address}: expected a log with announced weights, this one has none")
    for other in await blobs.marks(OWNERS):
        if other != own:
            await blobs.delete(f"marks/{OWNERS}/{other}")
    await blobs.mark(f"{OWNERS}/{own}", ALONE)


async def sweep(bus: Bus, blobs: Blobs, names: Names, *, grace_ms: int, dry: bool = False) -> Swept:
    """Removes what nobody names. `names` is of `bus` and may have been used before.

    Raises StoreError when other logs may use the store, WireError when a record can't be understood;
    OffsetGone, BusUnavailable, StoreUnavailable. Safe to call at any time, beside any process of a run.
    """
    await _check_alone(bus, blobs)
    now_ms = (await blobs.mark("swept", b"")).modified_ms
    stored = {found.uri: found async for found in blobs.listing()}
    needed = await names.refresh()
    unnamed = [found for uri, found in sorted(stored.items()) if uri not in needed]
    old = [found for found in unnamed if now_ms - found.modified_ms > grace_ms]
    removed = old if dry else [found for found in old if await _remove(blobs, found)]
    unfinished = blobs.unfinished(now_ms - grace_ms)
    for path in () if dry else unfinished:
        path.unlink(missing_ok=True)
    return Swept(
        stored=len(stored),
        stored_bytes=sum(found.bytes for found in stored.values()),
        named=len(stored) - len(unnamed),
        missing=tuple(sorted(needed - stored.keys())),
        young=len(unnamed) - len(old),
        removed=tuple(removed),
        unfinished=len(unfinished),
    )


@asynccontextmanager
async def sweeping(bus: Bus, blobs: Blobs, *, every_ms: int, grace_ms: int) -> AsyncIterator[None]:
    """Sweeps every `every_ms` (0: never) in the background while the body runs."""
    task = asyncio.create_task(_sweep_again_and_again(bus, blobs, every_ms, grace_ms)) if every_ms else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _sweep_again_and_again(bus: Bus, blobs: Blobs, every_ms: int, grace_ms: int) -> None:
    names = Names(bus)
    while True:
        await asyncio.sleep(every_ms / 1000)
        try:
            swept = await sweep(bus, blobs, names, grace_ms=grace_ms)
        except HeadraceError as error:  # the steps go on; orphans only take room
            log.event(_logger, "alarm", level=logging.WARNING, kind="sweep_refused", reason=error)
            continue
        log.event(
            _logger,
            "swept",
            stored=swept.stored,
            named=swept.named,
            young=swept.young,
            removed=len(swept.removed),
            removed_bytes=swept.removed_bytes,
        )


async def _check_alone(bus: Bus, blobs: Blobs) -> None:
    own, owners = await log_id(bus), await blobs.marks(OWNERS)
    if own is not None and owners == {own: ALONE}:
        return
    others = sorted(owners.keys() - {own})
    reason = (
        f"{len(others)} other log(s) use it too ({', '.join(others)})"
        if others
        else "it may have been in use before this log was"
        if own in owners
        else "no trainer of this log has noted that it uses it"
    )
    raise StoreError(
        f"{blobs.address}: expected a store that this log has alone: {reason}; if it does, say so with"
        " `headrace sweep --adopt`"
    )


async def _holds_others(blobs: Blobs, own: set[str]) -> bool:
    async for found in blobs.listing():
        if found.uri not in own:
            return True
    return False


async def _remove(blobs: Blobs, found: Stored) -> bool:
    """Unless it was written again since it was listed."""
    try:
        if await blobs.look(found.uri) != found:
            return False
    except StoreUnavailable:
        raise
    except StoreError:  # gone already
        return False
    await blobs.delete(found.uri)
    return True

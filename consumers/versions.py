"""The weights a region holds: announced versions, and the way from what is held to the newest one.

A version is built from the delta whose base is held, from a chain of deltas, or from the nearest full
snapshot and the deltas after it, whichever still checks out; every link must have its announced root. Not
here: who needs it (`consumers.weights`), how a delta is coded (`kernels.delta`).
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import NamedTuple

from headrace import log
from headrace.errors import PolicyError, StoreError, StoreUnavailable
from headrace.kernels import delta
from headrace.policy.checkpoint import from_bytes, to_bf16, weights_root
from headrace.policy.model import Weights
from headrace.store.blobs import BlobReader
from headrace.wire.records import Encoding, WeightsPublished

_logger = logging.getLogger(__name__)


class Held(NamedTuple):
    """Verified weights in bf16."""

    version: int
    root: str
    weights: Weights


class Link(NamedTuple):
    """One step of a way: apply `encoding` and have `announced`."""

    announced: WeightsPublished
    encoding: Encoding


class Versions:
    """Announcements and the weights held. One caller at a time builds, the others wait for it."""

    def __init__(self, blobs: BlobReader, versions_max: int) -> None:
        self._blobs = blobs
        self._versions_max = versions_max
        self._announced: dict[int, WeightsPublished] = {}
        self._building = asyncio.Lock()
        self._held: Held | None = None

    @property
    def newest(self) -> WeightsPublished | None:
        return self._announced[max(self._announced)] if self._announced else None

    def announce(self, record: WeightsPublished) -> None:
        """Remembers an announcement; the oldest makes room above `versions_max`."""
        self._announced[record.version] = record
        if len(self._announced) > self._versions_max:
            del self._announced[min(self._announced)]

    async def obtain(self) -> Held:
        """The newest announced version. What was held stays held until another is verified.

        Raises StoreError when no way to it checks out, StoreUnavailable.
        """
        async with self._building:
            target = self.newest
            assert target is not None, "asked before the first announcement"
            if self._held is not None and self._held[:2] == (target.version, target.root):
                return self._held
            failures = []
            for way in self._ways(target):
                try:
                    self._held = await self._follow(way)
                    return self._held
                except StoreUnavailable:
                    raise
                except (StoreError, PolicyError) as error:
                    failures.append(str(error))
                    log.event(
                        _logger,
                        "way_refused",
                        level=logging.WARNING,
                        version=target.version,
                        first=f"{way[0].encoding.kind}@{way[0].announced.version}",
                        reason=error,
                    )
            raise StoreError(
                f"weights {target.version}: expected a way to root {target.root} that checks out, got"
                f" {len(failures)} that do not: {'; '.join(failures) or 'no snapshot is announced'}"
            )

    def _ways(self, target: WeightsPublished) -> Iterator[list[Link]]:
        """From what is held, then from each full snapshot at or before `target`, the nearest first."""
        held = self._held
        chain: list[Link] = []
        record: WeightsPublished | None = target
        snapshots: list[list[Link]] = []
        while record is not None:
            full = _encoding(record, "full")
            if full is not None:
                snapshots.append([Link(record, full), *reversed(chain)])
            step = _encoding(record, "delta")
            if step is None or step.base_version is None or step.base_version >= record.version:
                break  # a base that is not older would lead round in a circle
            chain.append(Link(record, step))
            if held is not None and step.base_root == held.root:
                yield list(reversed(chain))
                held = None
            record = self._announced.get(step.base_version)
        yield from snapshots

    async def _follow(self, way: list[Link]) -> Held:
        held = self._held
        for announced, encoding in way:
            data = await self._fetch(encoding)
            base = None if encoding.kind == "full" else held
            held = await asyncio.to_thread(_built, announced, encoding, data, base)
        assert held is not None, "a way has at least one link"
        return held

    async def _fetch(self, encoding: Encoding) -> bytes:
        """Fetched again, once, when the bytes are not what their hash says: they may have been damaged on the
        way."""
        try:
            return await self._blobs.get(encoding.uri, encoding.sha256)
        except StoreUnavailable:
            raise
        except StoreError as error:
            log.event(_logger, "refetch", level=logging.WARNING, uri=encoding.uri, reason=error)
            return await self._blobs.get(encoding.uri, encoding.sha256)


def _built(announced: WeightsPublished, encoding: Encoding, data: bytes, base: Held | None) -> Held:
    """The announced weights, or StoreError / PolicyError: a replica never sees anything else."""
    place = f"weights {announced.version}: {encoding.kind} {encoding.uri}"
    if encoding.kind == "full":
        weights = to_bf16(from_bytes(data, place))
    elif base is None:
        raise StoreError(f"{place}: expected base {encoding.base_root} to be held, got nothing")
    else:
        weights = to_bf16(delta.apply(base.weights, data, weights_root))
    root = weights_root(weights)
    if root != announced.root:
        raise StoreError(f"{place}: expected root {announced.root}, got {root}")
    return Held(announced.version, root, weights)


def _encoding(record: WeightsPublished, kind: str) -> Encoding | None:
    return next((encoding for encoding in record.encodings if encoding.kind == kind), None)

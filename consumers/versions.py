"""The weights a region holds: announced versions, and the way from what is held to the newest one.

A version is built from the delta whose base is held, from a chain of deltas, or from the nearest full
snapshot and the deltas after it, whichever still checks out; every link must have its announced root. Not
here: who needs it (`consumers.weights`), how a delta is coded (`kernels.delta`).
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
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
        self._side: Held | None = None
        """The last one obtained that was not the newest."""
        self._needed: tuple[int, ...] = ()

    @property
    def newest(self) -> WeightsPublished | None:
        return self._announced[max(self._announced)] if self._announced else None

    def announce(self, record: WeightsPublished) -> None:
        """Remembers an announcement; above `versions_max` the oldest that is not needed makes room."""
        self._announced[record.version] = record
        if len(self._announced) > self._versions_max:
            needed = {link for version in self._needed for link in self._chain(version)}
            gone = next((version for version in sorted(self._announced) if version not in needed), None)
            if gone is not None:
                del self._announced[gone]

    def need(self, versions: Iterable[int]) -> None:
        """These, and the way to each, stay remembered however old they are: users are served with them."""
        self._needed = tuple(versions)

    def root_of(self, version: int) -> str | None:
        """As announced; None for a version that is not remembered."""
        found = self._announced.get(version)
        return None if found is None else found.root

    async def obtain(self, version: int | None = None) -> Held:
        """The newest announced version, or the given one. What was held stays held until another is verified.

        Raises StoreError when no way to it checks out, StoreUnavailable.
        """
        async with self._building:
            target = self.newest if version is None else self._announced.get(version)
            if target is None:
                raise StoreError(f"weights {version}: expected a remembered announcement, got none")
            for held in (self._held, self._side):
                if held is not None and held[:2] == (target.version, target.root):
                    return held
            failures = []
            for way in self._ways(target):
                try:
                    built = await self._follow(way)
                    if version is None:
                        self._held = built
                    else:
                        self._side = built
                    return built
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

    def _chain(self, version: int) -> Iterator[int]:
        """`version`, and those that its deltas lead back to, as far as a snapshot."""
        record = self._announced.get(version)
        while record is not None:
            yield record.version
            step = _encoding(record, "delta")
            if _encoding(record, "full") or step is None or step.base_version is None:
                return
            record = self._announced.get(step.base_version) if step.base_version < record.version else None

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

"""The region's cache as the relay's process is given it."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from headrace.cli import settings as tree
from headrace.cli.options import Place
from headrace.cli.processes import blobs, region_blobs
from headrace.errors import StoreError
from headrace.store import cache
from headrace.store.blobs import Blob


def test_relays_of_a_region_share_what_one_has_fetched(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second relay has the blob though the store has lost it; one without `relay.cache` has not."""
    # a busy machine must not look like a Redis that is away
    patient = partial(cache.CachedBlobs.open, timeout_s=20.0)
    monkeypatch.setattr(cache.CachedBlobs, "open", staticmethod(patient))

    def relay(**flags: str) -> Place:
        names = {"store.uri": f"file://{tmp_path}/store", **flags}
        return Place(tree.load(None, environment={}, flags=names), None)

    async def fetch(place: Place, blob: Blob) -> bytes:
        async with region_blobs(place) as found:
            return await found.get(blob.uri, blob.sha256)

    async def scenario() -> None:
        with_cache = relay(**{"relay.cache": redis_url})
        store = blobs(with_cache)
        blob = await store.put(b"weights")
        assert await fetch(with_cache, blob) == b"weights"
        await store.delete(blob.uri)
        assert await fetch(with_cache, blob) == b"weights"
        with pytest.raises(StoreError, match="found none"):
            await fetch(relay(), blob)

    asyncio.run(scenario())

"""The region's cache against a real Redis: one fetch for all, and never the cause of a fault."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from headrace.errors import ConfigError, StoreError
from headrace.store import cache
from headrace.store.blobs import Blob, Blobs
from headrace.store.cache import TOO_LARGE, CachedBlobs
from local_redis import LocalRedis

PATIENT = {"timeout_s": 20.0, "lock_ms": 60_000}
"""Where the test is not about a slow Redis or a dead relay: a busy machine must not look like one."""
DEADLINE_S = 60.0


class Store:
    """A store that counts what is fetched, and may do something in the middle of it."""

    def __init__(self, directory: Path) -> None:
        self.blobs = Blobs.open(f"file://{directory}/store")
        self.fetches = 0
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def get(self, uri: str, sha256: str) -> bytes:
        self.fetches += 1
        if self.meanwhile is not None:
            await self.meanwhile()
        return await self.blobs.get(uri, sha256)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


async def relays(
    stack: AsyncExitStack, store: Store, url: str, count: int = 1, **settings: Any
) -> list[CachedBlobs]:
    opened = [CachedBlobs.open(store, url, **(PATIENT | settings)) for _ in range(count)]
    return [await stack.enter_async_context(relay) for relay in opened]


async def peer(stack: AsyncExitStack, url: str) -> Any:
    """A plain client, to look and to damage."""
    return await stack.enter_async_context(Redis.from_url(url))


def run(scenario: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
            await scenario(stack)

    asyncio.run(within())


def key(blob: Blob) -> str:
    return f"headrace:blob:{blob.sha256}"


def lock(blob: Blob) -> str:
    return f"headrace:fetch:{blob.sha256}"


def test_ten_relays_fetch_once(store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten relays want a blob of three and a half pieces at once: one fetch, all have it whole; a later relay
    has it from Redis too, and it does not stay for ever."""
    monkeypatch.setattr(cache, "PIECE_BYTES", 1000)

    async def scenario(stack: AsyncExitStack) -> None:
        blob = await store.blobs.put(bytes(range(250)) * 14)
        store.meanwhile = lambda: asyncio.sleep(0.2)  # long enough that all others miss it
        answers = await asyncio.gather(
            *(relay.get(blob.uri, blob.sha256) for relay in await relays(stack, store, redis_url, 10))
        )
        assert answers == [bytes(range(250)) * 14] * 10
        [late] = await relays(stack, store, redis_url)
        assert await late.get(blob.uri, blob.sha256) == answers[0]
        assert store.fetches == 1
        client = await peer(stack, redis_url)
        assert 0 < await client.pttl(key(blob)) <= cache.KEPT_MS
        assert await client.keys() == [key(blob).encode()]  # no lock, nothing half done

    run(scenario)


@pytest.mark.parametrize("damaged", [b"abd", b"a", b"abc" * 100])
def test_a_corrupt_value_is_replaced(
    store: Store, redis_url: str, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Other bytes in Redis than the hash says: ten relays get the right ones, by one fetch that heals."""

    async def scenario(stack: AsyncExitStack) -> None:
        blob = await store.blobs.put(b"abc")
        client = await peer(stack, redis_url)
        await client.set(key(blob), damaged)
        found = await relays(stack, store, redis_url, 10)
        answers = await asyncio.gather(*(relay.get(blob.uri, blob.sha256) for relay in found))
        assert answers == [b"abc"] * 10
        assert store.fetches == 1
        assert await client.get(key(blob)) == b"abc"

    run(scenario)
    assert caplog.text.count("cache_corrupt") == 1


def test_a_fault_of_the_store_is_the_callers(store: Store, redis_url: str) -> None:
    """A blob damaged in the store is refused, nothing is cached, the lock is free, and a corrupt value of the
    same name is gone."""

    async def scenario(stack: AsyncExitStack) -> None:
        blob = await store.blobs.put(b"abc")
        await store.blobs.delete(blob.uri)
        client = await peer(stack, redis_url)
        await client.set(key(blob), b"abd")
        [relay] = await relays(stack, store, redis_url)
        with pytest.raises(StoreError, match="expected a blob, found none"):
            await relay.get(blob.uri, blob.sha256)
        assert await client.keys() == []

    run(scenario)


def test_a_blob_over_the_bound_is_not_cached(store: Store, redis_url: str) -> None:
    """Four relays want 8 bytes where 7 are the bound: the first leaves word, the others do not queue."""

    async def scenario(stack: AsyncExitStack) -> None:
        blob = await store.blobs.put(b"12345678")
        all_at_once = asyncio.Barrier(3)  # passes when three fetch at the same time
        found = await relays(stack, store, redis_url, 4, blob_bytes_max=7)
        assert await found[0].get(blob.uri, blob.sha256) == b"12345678"
        store.meanwhile = all_at_once.wait
        await asyncio.gather(*(relay.get(blob.uri, blob.sha256) for relay in found[1:]))
        assert store.fetches == 4
        assert await (await peer(stack, redis_url)).get(key(blob)) == TOO_LARGE

    run(scenario)


def test_the_lock_of_a_dead_relay_expires(store: Store, redis_url: str) -> None:
    """A lock without a holder is waited for until it expires; one that never does, until `wait_s` is over."""

    async def scenario(stack: AsyncExitStack) -> None:
        first, second = await store.blobs.put(b"abc"), await store.blobs.put(b"abcd")
        client = await peer(stack, redis_url)
        await client.set(lock(first), b"", px=200)
        await client.set(lock(second), b"")
        [patient] = await relays(stack, store, redis_url, wait_s=DEADLINE_S)
        assert await patient.get(first.uri, first.sha256) == b"abc"
        assert await client.get(key(first)) == b"abc"
        [brisk] = await relays(stack, store, redis_url, wait_s=0.2)
        assert await brisk.get(second.uri, second.sha256) == b"abcd"
        assert await client.get(key(second)) is None  # it had no right to fill

    run(scenario)


def test_a_long_fetch_keeps_its_lock(store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock gets its whole life back after each third of it, and nobody else fetches."""
    within, asked_s = cache._within, set[float]()

    async def briefly(seconds: float, event: asyncio.Event) -> bool:
        asked_s.add(seconds)
        return await within(0.01, event)

    monkeypatch.setattr(cache, "_within", briefly)

    async def scenario(stack: AsyncExitStack) -> None:
        blob = await store.blobs.put(b"abc")
        client = await peer(stack, redis_url)

        async def renewed_three_times() -> None:
            for _ in range(3):
                await client.pexpire(lock(blob), 30_000)
                while await client.pttl(lock(blob)) <= 30_000:  # noqa: ASYNC110 - the relay renews
                    await asyncio.sleep(0.01)

        store.meanwhile = renewed_three_times
        found = await relays(stack, store, redis_url, 3, lock_ms=60_000)
        answers = await asyncio.gather(*(relay.get(blob.uri, blob.sha256) for relay in found))
        assert answers == [b"abc"] * 3
        assert store.fetches == 1
        assert asked_s == {20.0}

    run(scenario)


def test_a_client_that_loses_a_cancellation_holds_nobody_up(store: Store, redis_url: str) -> None:
    """The fetch ends in the middle of a renewal, whose command answers although it was cancelled, as
    `asyncio.wait_for` of Python 3.11 does when both come at once."""

    async def scenario(stack: AsyncExitStack) -> None:
        blob = await store.blobs.put(b"abc")
        in_renewal = asyncio.Event()
        [relay] = await relays(stack, store, redis_url, lock_ms=30)

        async def deaf(*_: object) -> bool:
            in_renewal.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
            return True

        relay._redis.pexpire = deaf  # type: ignore[assignment]
        store.meanwhile = in_renewal.wait
        assert await relay.get(blob.uri, blob.sha256) == b"abc"
        assert await (await peer(stack, redis_url)).keys() == [key(blob).encode()]

    run(scenario)


def test_redis_killed_in_the_middle(
    store: Store, local_redis: LocalRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """`kill -9` while one relay fetches and two wait for it: all three have the blob, each warns once; when
    Redis is back it is used again."""
    caplog.set_level(logging.INFO)

    async def kill() -> None:
        await asyncio.sleep(0.2)  # the others wait by now
        local_redis.kill()

    async def scenario(stack: AsyncExitStack) -> None:
        first, second = await store.blobs.put(b"abc"), await store.blobs.put(b"abcd")
        found = await relays(stack, store, local_redis.url, 3)
        store.meanwhile = kill
        answers = await asyncio.gather(*(relay.get(first.uri, first.sha256) for relay in found))
        assert answers == [b"abc"] * 3
        store.meanwhile = None
        for relay in found:
            assert await relay.get(second.uri, second.sha256) == b"abcd"
        assert caplog.text.count("cache_away") == 3
        local_redis.start()
        store.fetches = 0
        for relay in found:
            assert await relay.get(second.uri, second.sha256) == b"abcd"
        assert store.fetches == 1
        assert caplog.text.count("cache_back") == 3

    run(scenario)


def test_a_redis_that_hangs_is_given_up(
    store: Store, local_redis: LocalRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections open, no answer: the store alone after `timeout_s`; afterwards no answer belongs to another
    question."""

    async def scenario(stack: AsyncExitStack) -> None:
        blobs = [await store.blobs.put(bytes([n]) * (n + 2)) for n in range(5)]
        [relay] = await relays(stack, store, local_redis.url)
        for blob in blobs:
            await relay.get(blob.uri, blob.sha256)
        local_redis.freeze()
        relay._timeout_s = 1.0
        for n, blob in enumerate(blobs[:2]):
            assert await relay.get(blob.uri, blob.sha256) == bytes([n]) * (n + 2)
        local_redis.thaw()
        relay._timeout_s = PATIENT["timeout_s"]
        for n, blob in enumerate(blobs):
            assert await relay.get(blob.uri, blob.sha256) == bytes([n]) * (n + 2)

    run(scenario)
    assert caplog.text.count("cache_away") == 1
    assert "cache_corrupt" not in caplog.text


def test_no_redis_at_all(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing listens: the store answers."""

    async def scenario(stack: AsyncExitStack) -> None:
        blob = await store.blobs.put(b"abc")
        [relay] = await relays(stack, store, "redis://127.0.0.1:1/0")
        for _ in range(3):
            assert await relay.get(blob.uri, blob.sha256) == b"abc"

    run(scenario)
    assert caplog.text.count("cache_away") == 1


def test_an_address_of_another_kind_is_a_setting_fault(store: Store) -> None:
    """It fails at once and names the setting."""
    with pytest.raises(ConfigError, match=r"relay\.cache: expected redis://"):
        CachedBlobs.open(store, "http://127.0.0.1:1")

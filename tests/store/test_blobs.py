"""Blobs: immutable, checked, bounded; a damaged one is never handed out."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import obstore
import pytest

from headrace.errors import ConfigError, StoreError, StoreUnavailable
from headrace.store.blobs import TRIES_MAX, Blobs


def _file(blobs_dir: Path, uri: str) -> Path:
    return blobs_dir / uri


def test_a_blob_is_named_by_its_bytes(tmp_path: Path) -> None:
    """Two stores give the same bytes the same uri, and putting twice keeps one object."""

    async def run() -> None:
        blobs, memory = Blobs.open(f"file://{tmp_path}/store"), Blobs.open("memory:///")
        first, second, third = await blobs.put(b"abc"), await blobs.put(b"abc"), await memory.put(b"abc")
        assert first == second == third
        assert first.sha256 == hashlib.sha256(b"abc").hexdigest()
        assert first.bytes == 3
        assert await blobs.get(first.uri, first.sha256) == b"abc"
        assert len([p for p in (tmp_path / "store").rglob("*") if p.is_file()]) == 1

    asyncio.run(run())


def test_empty_blob(tmp_path: Path) -> None:
    """No bytes are a blob too."""

    async def run() -> None:
        blobs = Blobs.open(f"file://{tmp_path}")
        blob = await blobs.put(b"")
        assert await blobs.get(blob.uri, blob.sha256) == b""

    asyncio.run(run())


@pytest.mark.parametrize("damage", [b"abd", b"ab", b"", b"abcd"])
def test_damaged_blob_is_refused_and_healed_by_put(tmp_path: Path, damage: bytes) -> None:
    """A blob of other bytes than its hash says is refused with its name; putting it again repairs it."""

    async def run() -> None:
        blobs = Blobs.open(f"file://{tmp_path}")
        blob = await blobs.put(b"abc")
        _file(tmp_path, blob.uri).write_bytes(damage)
        with pytest.raises(StoreError, match=f"{blob.uri}: expected SHA-256 {blob.sha256}"):
            await blobs.get(blob.uri, blob.sha256)
        await blobs.put(b"abc")
        assert await blobs.get(blob.uri, blob.sha256) == b"abc"

    asyncio.run(run())


def test_missing_blob_and_delete(tmp_path: Path) -> None:
    """A blob that is not there is a StoreError that names it, not a wait; deleting it twice is no error."""

    async def run() -> None:
        blobs = Blobs.open(f"file://{tmp_path}")
        blob = await blobs.put(b"abc")
        await blobs.delete(blob.uri)
        await blobs.delete(blob.uri)
        with pytest.raises(StoreError, match=f"{blob.uri}: expected a blob, found none"):
            await blobs.get(blob.uri, blob.sha256)

    asyncio.run(run())


def test_sizes_are_bounded_both_ways(tmp_path: Path) -> None:
    """More bytes than the bound are neither written nor read into memory."""

    async def run() -> None:
        blob = await Blobs.open(f"file://{tmp_path}").put(b"12345678")
        small = Blobs.open(f"file://{tmp_path}", blob_bytes_max=7)
        with pytest.raises(StoreError, match="expected at most 7 bytes, got 9"):
            await small.put(b"123456789")
        with pytest.raises(StoreError, match="expected at most 7 bytes, got 8"):
            await small.get(blob.uri, blob.sha256)

    asyncio.run(run())


def test_a_passing_fault_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed read is tried again; a store that stays away is StoreUnavailable after TRIES_MAX."""
    calls: list[str] = []
    real = obstore.get_async

    async def run() -> None:
        blobs = Blobs.open(f"file://{tmp_path}", backoff_s=0.0)
        blob = await blobs.put(b"abc")

        async def flaky(store: Any, path: str) -> Any:
            calls.append(path)
            if len(calls) == 1:
                raise OSError("connection reset")
            return await real(store, path)

        async def gone(store: Any, path: str) -> Any:
            calls.append(path)
            raise OSError("connection refused")

        monkeypatch.setattr(obstore, "get_async", flaky)
        assert await blobs.get(blob.uri, blob.sha256) == b"abc"
        assert len(calls) == 2
        calls.clear()
        monkeypatch.setattr(obstore, "get_async", gone)
        with pytest.raises(StoreUnavailable, match=f"{TRIES_MAX} tries failed.*connection refused"):
            await blobs.get(blob.uri, blob.sha256)
        assert len(calls) == TRIES_MAX

    asyncio.run(run())


def test_a_call_that_hangs_ends_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that never answers costs TRIES_MAX deadlines, no more."""

    async def hang(store: Any, path: str) -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        blobs = Blobs.open(f"file://{tmp_path}", deadline_s=0.01, backoff_s=0.0)
        monkeypatch.setattr(obstore, "get_async", hang)
        with pytest.raises(StoreUnavailable, match="TimeoutError"):
            await blobs.get(f"blobs/00/{64 * '0'}", 64 * "0")

    asyncio.run(run())


@pytest.mark.parametrize("uri", ["", "/", "../../etc/passwd", "a//b", "a\0b", "x" * 5000])
def test_a_uri_that_names_no_blob_is_wrong_not_away(tmp_path: Path, uri: str) -> None:
    """A record may say anything: its reader must be able to give it up, and not wait for the store."""

    async def run() -> None:
        blobs = Blobs.open(f"file://{tmp_path}", backoff_s=0.0)
        blob = await blobs.put(b"abc")
        for sha256 in (blob.sha256, uri):
            with pytest.raises(StoreError, match="expected blobs/") as raised:
                await blobs.get(uri, sha256)
            assert not raised.value.retriable

    asyncio.run(run())


def test_unknown_scheme_is_a_setting_fault() -> None:
    """An address of no known kind fails at once."""
    with pytest.raises(ConfigError, match="store 'ftp://x/y'"):
        Blobs.open("ftp://x/y")


def test_a_file_that_its_writer_finishes_meanwhile_is_not_unfinished(tmp_path: Path) -> None:
    """It was in the listing, and has its own name by the time it is looked at."""
    blobs = Blobs.open(f"file://{tmp_path}")
    folder = tmp_path / "blobs" / "aa"
    folder.mkdir(parents=True)
    (folder / f"{64 * 'a'}#1").symlink_to(tmp_path / "renamed")
    (folder / f"{64 * 'b'}#1").write_bytes(b"half")
    assert [path.name for path in blobs.unfinished(1 << 60)] == [f"{64 * 'b'}#1"]

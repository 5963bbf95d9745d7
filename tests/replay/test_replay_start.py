"""A run that is to start from a checkpoint: what it refuses, and what it does not need any more."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from packed_place import CONFIG, Place, messages, seed, source_of

from headrace.consumers.ledger import read_ledger
from headrace.errors import ConfigError, HeadraceError, StoreError
from headrace.policy.model import initial_weights
from headrace.store.blobs import Blobs
from headrace.trainer import checkpoint
from headrace.trainer.config import TrainerConfig
from headrace.trainer.state import State, fresh


def other_state() -> State:
    """Weights that are not the seed's, after five updates."""
    return replace(
        fresh(initial_weights(seed()[0], 7), {"experience/0": 9}), step=5, updates=5, seen={"x": 4}
    )


def starting(path: Path) -> TrainerConfig:
    return msgspec.structs.replace(CONFIG, start_from=str(path))


def wide() -> bytes:
    model = msgspec.structs.replace(seed()[0], width=48)
    return checkpoint.encode(fresh(initial_weights(model, 1), {}), "test")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, ConfigError, r"start.checkpoint: expected a checkpoint to start from: No such file"),
        (b"", StoreError, r"start.checkpoint: expected a checkpoint, got 0 bytes"),
        (wide(), StoreError, r"start.checkpoint: expected a checkpoint of this model: .*embed"),
        (
            checkpoint.encode(replace(other_state(), root="ab" * 32), "test"),
            StoreError,
            r"start.checkpoint: expected weights of root abab",
        ),
    ],
    ids=["missing", "empty", "another model", "another root"],
)
def test_what_is_refused(
    tmp_path: Path, content: bytes | None, error: type[HeadraceError], message: str
) -> None:
    """Nothing is announced: the run has not begun, and may begin otherwise."""
    place, path = Place(tmp_path / "run"), tmp_path / "start.checkpoint"
    if content is not None:
        path.write_bytes(content)

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(6)))
            with pytest.raises(error, match=message):
                await place.train(bus, config=starting(path))
            assert not (await read_ledger(bus, place.run.name)).published
            assert len(await place.train(bus)) == 3

    asyncio.run(scenario())


def test_a_run_that_has_begun_passes_the_file_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Aloud; and it goes on from what its own log says."""
    place, path = Place(tmp_path / "run"), tmp_path / "start.checkpoint"
    path.write_bytes(checkpoint.encode(other_state(), "another"))

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(6)))
            await place.train(bus, place.until(1))
            with caplog.at_level(logging.INFO):
                await place.train(bus, place.until(2), starting(path))
            published = (await read_ledger(bus, place.run.name)).published
            assert published[0].checkpoint is None
            assert published[0].root != other_state().root
            assert f"start_from_passed_over file={path}" in caplog.text

    asyncio.run(scenario())


def test_a_start_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Without the blob of version 0 the beginning can't be had: no guess is made in its place."""
    place, path = Place(tmp_path / "run"), tmp_path / "start.checkpoint"
    path.write_bytes(checkpoint.encode(other_state(), "another"))

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(6)))
            await place.train(bus, place.until(1), starting(path))
            source = await source_of(place, bus)
            start = source.ledger.published[0].checkpoint
            assert start is not None
            assert (start.step, (await source.first()).updates) == (0, 5)
            await Blobs.open(place.store).delete(start.uri)
            with pytest.raises(StoreError, match=rf"{start.uri}: expected a blob, found none"):
                await source.first()

    asyncio.run(scenario())

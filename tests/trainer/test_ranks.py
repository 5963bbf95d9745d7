"""Several ranks are one trainer: the same bits, and a lost one is noticed."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from trainer_records import MODEL, consumed, pair
from training_place import CONFIG, Place, messages

from headrace.config import RunConfig
from headrace.consumers.ranks import Leader, hired
from headrace.errors import TrainingError, WireError
from headrace.policy.model import initial_weights
from headrace.trainer.admission import Entry
from headrace.trainer.config import StepSettings, TrainerConfig
from headrace.trainer.ranks import Gloo
from headrace.trainer.state import State, fresh
from headrace.trainer.step import StepResult, run_step

SETTINGS = StepSettings(run=RunConfig(lag_versions_max=2), trainer=TrainerConfig(lr=1e-2, epochs=2))


@contextmanager
def team(size: int) -> Iterator[Leader]:
    """Rank 0 here, the others as processes."""
    with hired(size, threads=1) as address:
        leader = Leader(Gloo(address, 0, size))
        try:
            yield leader
        finally:
            leader.close()


def entries(step: int) -> list[Entry]:
    """Five groups, and bytes that were none."""
    records = [pair(f"{step}-{n}", first=10 + n) for n in range(5)]
    found = [Entry(consumed(record.group_id, n), record) for n, record in enumerate(records)]
    return [*found, Entry(consumed("bad", 5), WireError("expected a map, got bytes"))]


def first_state() -> State:
    weights = initial_weights(MODEL, 3)
    for name in weights:  # blocks that do nothing would hide their gradients
        if name.endswith((".out", ".down")):
            weights[name] = torch.linspace(-0.2, 0.2, weights[name].numel()).view_as(weights[name])
    return fresh(weights, {"experience/0": 0})


def test_two_and_three_ranks_have_the_bits_of_one() -> None:
    """Three steps, two passes each; in between the state is another one than the ranks hold."""
    state = first_state()
    alone: list[StepResult] = []
    for step in range(3):
        at = alone[-1].state if alone else state
        alone.append(run_step(at, entries(step), {}, model=MODEL, settings=SETTINGS))
    assert len({result.state.root for result in alone}) == 3
    for size in (2, 3):
        with team(size) as leader:
            again = leader.run_step(state, entries(0), {}, model=MODEL, settings=SETTINGS)
            for step in (0, 1, 2):
                at = alone[step - 1].state if step else state
                again = leader.run_step(at, entries(step), {}, model=MODEL, settings=SETTINGS)
                assert again.state.root == alone[step].state.root
                assert again.metrics == alone[step].metrics
                assert again.admission.drops == alone[step].admission.drops


def test_a_rank_that_dies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails with the rank's name, and does not wait for its deadline."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def kept(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", kept)
    with team(2) as leader:
        state = leader.run_step(first_state(), entries(0), {}, model=MODEL, settings=SETTINGS).state
        os.kill(started[0].pid, signal.SIGKILL)
        started[0].wait(10)
        with pytest.raises(TrainingError, match="rank 0 of 2"):
            leader.run_step(state, entries(1), {}, model=MODEL, settings=SETTINGS)


def test_ranks_that_differ_stop_the_step() -> None:
    """Two roots for one step are an error that names the step."""

    class Other(Gloo):
        def agree(self, what: str, text: str) -> None:
            super().agree(what, text[::-1])

    with hired(2, threads=1) as address:
        leader = Leader(Other(address, 0, 2))
        with pytest.raises(TrainingError, match="after step 1 the root"):
            leader.run_step(first_state(), entries(0), {}, model=MODEL, settings=SETTINGS)
        leader.close()


def test_a_run_may_change_its_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks for three steps, one for the rest (which replays what two recorded): the ledger of a run that
    was alone all the time."""
    two = msgspec.structs.replace(CONFIG, ranks=2, checkpoint_every=100)

    async def ledger(name: str, configs: list[TrainerConfig]) -> list[str]:
        place = Place(tmp_path / name)
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(10), partition=0))
            for steps, config in zip((3, 5), configs, strict=True):
                found = await place.train(bus, place.until(steps), config)
            return [step.root_after for step in found]

    alone = asyncio.run(ledger("alone", [CONFIG, CONFIG]))
    assert len(set(alone)) == 5
    assert asyncio.run(ledger("changing", [two, CONFIG])) == alone

"""`headrace step` on a small trained run: the record, its units, and their shares of the gradient."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from account_log import MODEL, RUN, broken, closed, group, message

from headrace.bus import open_bus
from headrace.cli import main
from headrace.config import RunConfig
from headrace.consumers import training
from headrace.policy import checkpoint
from headrace.policy.model import initial_weights
from headrace.store.blobs import Blobs
from headrace.trainer.config import TrainerConfig
from headrace.wire import records as r
from headrace.wire.packed import pack_u32
from headrace.wire.topics import TOPICS

SEED = (MODEL, initial_weights(MODEL, seed=1))


def other_tokens(record: r.Experience, first: int) -> r.Experience:
    """The same group with output tokens of its own, so that gradients differ."""
    rollouts = []
    for rollout in record.rollouts:
        step = rollout.steps[0]
        count = len(step.tokens_out) // 4
        out = pack_u32([(first + rollout.member + index) % MODEL.vocabulary for index in range(count)])
        steps = (msgspec.structs.replace(step, tokens_out=out),)
        rollouts.append(msgspec.structs.replace(rollout, steps=steps))
    return msgspec.structs.replace(record, rollouts=tuple(rollouts))


def groups() -> list[r.Experience]:
    """Two steps of four: the second has a lag of 1 and a member withheld for its length."""
    return [
        other_tokens(closed(0), 9),
        closed(1, (0.5, 0.5)),
        other_tokens(closed(2, (3.0, 1.0), tokens=(3, 2)), 20),
        broken(closed(3)),
        other_tokens(closed(4), 30),
        other_tokens(closed(5, (0.0, 1.0), tokens=(38, 2)), 12),
        other_tokens(closed(6, (0.25, 0.0)), 40),
        closed(7, (1.0, None)),
    ]


async def _trained(directory: Path) -> list[str]:
    address, store = f"sqlite:{directory}/bus.sqlite", f"file://{directory}/store"
    run = RunConfig(name=RUN, steps_max=2, groups_per_step=4)
    config = TrainerConfig(lr=1e-2, sequence_tokens_max=40, checkpoint_every=2)
    async with open_bus(address) as bus, asyncio.timeout(60):
        await bus.create_topics(list(TOPICS.values()))
        await bus.produce([message(record, partition=0) for record in groups()])
        await training.run(bus, run, config, Blobs.open(store), asyncio.Event(), seed=SEED)
    return ["--bus", address, "--store.uri", store, "--run.name", RUN]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return asyncio.run(_trained(tmp_path_factory.mktemp("run")))


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "load_seed", lambda: (*SEED, "the tiny model"))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["step", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_units_of_a_step(at: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Advantages are r - mean, lag counts from the version of the tokens, a withheld member says why."""
    found = told(capsys, "2", "--fast", *at)
    units = {unit["group_id"]: unit for unit in found["units"]}
    assert [unit["outcome"] for unit in found["units"]] == ["trained", "trained", "trained", "incomplete"]
    assert [m["advantage"] for m in units[group(4)]["members"]] == [0.5, -0.5]
    long = units[group(5)]
    assert [(m["advantage"], m["withheld"], m["tokens"]) for m in long["members"]] == [
        (-0.5, "over_long", 38),
        (0.5, "", 2),
    ]
    assert (long["tokens"], long["lag"], long["share"]) == (2, 1, None)
    assert units[group(7)]["members"][1]["reward"] is None
    assert found["record"]["version_to"] == 2
    changed = found["settings_changed"]
    assert changed["trainer.lr"] == {"value": 1e-2, "default": TrainerConfig().lr}
    assert "trainer.beta1" not in changed


def test_shares_add_up_and_are_of_the_recorded_gradient(
    at: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The shares of a step add up to 1, the norm is the ledger's, and a larger advantage pulls more."""
    for step in ("1", "2"):
        found = told(capsys, step, *at)
        shares = {u["group_id"]: u["share"] for u in found["units"] if u["outcome"] == "trained"}
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-9)
        assert found["gradient_norm"] == pytest.approx(found["record"]["metrics"]["gradient.norm"], rel=1e-6)
    assert shares[group(4)] > shares[group(6)] > 0  # advantages of 0.5 and of 0.125


def test_the_screen(
    at: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 columns; without a number it is the newest step."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["step", *at]) == 0
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= 80
    assert "step 2 of run sample: version 1 to 2" in screen
    assert "shares add up to 100.0000 %" in screen
    assert "members: over_long 1" in screen and "trainer.lr 0.01" in screen
    assert main(["step", "1", *at, "--fast"]) == 0
    assert "malformed" in capsys.readouterr().out


def test_errors_name_what_is_there(at: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A step that isn't in the ledger, no number, a run of another name."""
    for words, said in (
        (["3", *at], "expected a step from 1 to 2, got 3"),
        (["1", *at[:-1], "other"], "unknown run 'other'"),
    ):
        assert main(["step", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_state_that_cannot_be_computed_again(
    at: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another model the error says how to see the rest."""
    other = (MODEL, initial_weights(MODEL, seed=2), "another")
    monkeypatch.setattr(checkpoint, "load_seed", lambda: other)
    assert main(["step", "1", *at]) == 9
    assert "headrace step 1 --fast" in capsys.readouterr().err


def test_gradients_that_do_not_fit_are_computed_again(
    at: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held or computed twice, the shares are the same."""
    held = told(capsys, "1", *at)
    monkeypatch.setattr("headrace.cli.gradient_shares.HELD_BYTES_MAX", 0)
    assert told(capsys, "1", *at)["units"] == held["units"]

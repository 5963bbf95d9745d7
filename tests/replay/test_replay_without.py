"""The run as if records had never been: bit for bit the run that never had them."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from packed_place import CONFIG, Place, messages, seed, source_of

from headrace.cli.entry import main
from headrace.config import RunConfig
from headrace.consumers.replay import Source, newest_state, state_before
from headrace.consumers.without import Criterion, Without, criterion, uses, without
from headrace.errors import ConfigError
from headrace.store.blobs import Blobs
from headrace.trainer import checkpoint, provenance
from headrace.trainer.state import State
from headrace.wire.records import Experience


def marked(place: Place) -> list[Experience]:
    """Six groups, two a step: the second of each step of user u<step>, those of steps 2 and 3 live; the
    fourth in an env of its own; the fifth and sixth sampled by version 1 and 2."""
    groups = place.groups(6)
    for step in (1, 2, 3):
        groups[2 * step - 1] = msgspec.structs.replace(groups[2 * step - 1], user=f"u{step}")
    for index, member in ((3, 1), (5, 0)):  # rewards 0, which the baseline becomes, and 1
        only = groups[index].rollouts[member]
        steps = tuple(msgspec.structs.replace(step, member=0) for step in only.steps)
        only = msgspec.structs.replace(only, member=0, steps=steps)
        groups[index] = msgspec.structs.replace(groups[index], source="live", rollouts=(only,), group_size=1)
    groups[3] = msgspec.structs.replace(groups[3], env="other")
    return [sampled_by(group, max(0, index - 3)) for index, group in enumerate(groups)]


def sampled_by(group: Experience, version: int) -> Experience:
    def moved(part: Any) -> Any:
        return msgspec.structs.replace(
            part, spans=tuple(msgspec.structs.replace(span, weights_version=version) for span in part.spans)
        )

    rollouts = tuple(
        msgspec.structs.replace(rollout, steps=tuple(map(moved, rollout.steps))) for rollout in group.rollouts
    )
    return msgspec.structs.replace(group, rollouts=rollouts)


def of_step(place: Place, step: int, groups: int) -> RunConfig:
    return msgspec.structs.replace(place.run, steps_max=step, groups_per_step=groups)


async def counterfactual(
    source: Source, criteria: list[Criterion], last: int = 3
) -> tuple[list[Without], State]:
    first = (await uses(source, criteria, 1, last)).first
    start = await state_before(source, first, now=provenance.collect())
    steps = [step async for step in without(source, start, criteria, last)]
    return steps, steps[-1].done.result.state


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("group:test-g1", [1]),
        ("user:u2", [3]),
        ("env:other", [3]),
        ("source:live", [3, 5]),
        ("group:test-g4", [4]),
        ("env:holes", [0, 1, 2, 4, 5]),
    ],
)
def test_equal_to_a_run_that_never_had_them(tmp_path: Path, text: str, gone: list[int]) -> None:
    """Two logs, one without the records: the same weights, moments, update count and ids seen, in every
    bit."""
    had, never = Place(tmp_path / "had"), Place(tmp_path / "never")

    async def scenario() -> None:
        async with had.opened() as bus, never.opened() as other:
            groups = marked(had)
            await bus.produce(messages(groups, partition=0))
            await other.produce(
                messages([g for index, g in enumerate(groups) if index not in gone], partition=0)
            )
            await had.train(bus)
            source = await source_of(had, bus)
            steps, end = await counterfactual(source, [criterion(text)])
            trained = 0
            for step in (1, 2, 3):
                left = 2 - sum(index // 2 == step - 1 for index in gone)
                if left:
                    trained += 1
                    recorded = await never.train(other, of_step(never, trained, left))
            assert end.root == recorded[-1].root_after
            truth = await newest_state(await source_of(never, other), trained)
            assert truth.step == trained
            assert not steps[-1].same_weights
            assert end.updates == truth.updates
            for part in ("masters", "moment1", "moment2"):
                ours, theirs = getattr(end, part), getattr(truth, part)
                assert all(torch.equal(ours[name], theirs[name]) for name in ours)
            assert list(end.seen) == list(truth.seen)
            assert end.baselines == truth.baselines
            left_out = [c.group_id for step in steps for c in step.left_out]
            assert left_out == [f"test-g{index}" for index in gone]

    asyncio.run(scenario())


def test_nothing_of_it_is_in_the_state(tmp_path: Path) -> None:
    """Neither the id nor a position that points past it alone: the file to start from does not know it."""
    place = Place(tmp_path)

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(marked(place), partition=0))
            await place.train(bus)
            source = await source_of(place, bus)
            _, end = await counterfactual(source, [criterion("user:u1")])
            data = checkpoint.encode(end, place.run.name)
            recorded = checkpoint.encode(await newest_state(source, 3), place.run.name)
            assert (b"test-g1" in recorded, b"test-g1" in data, b"test-g2" in data) == (True, False, True)
            assert end.positions == source.recorded(3).positions

    asyncio.run(scenario())


def test_what_it_cannot_know_is_counted(tmp_path: Path) -> None:
    """Groups of later steps that versions after the first removed unit sampled: g4 (version 1) and g5 (2) of
    step 3; and none when nothing that was trained is left out."""
    place = Place(tmp_path)

    async def scenario() -> None:
        async with place.opened() as bus:
            groups = marked(place)
            groups[1] = msgspec.structs.replace(groups[1], closed="failed")
            await bus.produce(messages(groups, partition=0))
            await place.train(bus)
            source = await source_of(place, bus)
            steps, _ = await counterfactual(source, [criterion("group:test-g0")])
            assert [step.tainted for step in steps] == [(), (), ("test-g4", "test-g5")]
            steps, end = await counterfactual(source, [criterion("group:test-g1")])
            assert [step.tainted for step in steps] == [(), (), ()]
            assert all(step.same_weights for step in steps)
            assert "test-g1" not in end.seen

    asyncio.run(scenario())


def test_ledgers_of_before_are_looked_through_by_their_records(tmp_path: Path) -> None:
    """A ledger that says nothing of sources and environments: the records do."""
    place = Place(tmp_path)

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(marked(place), partition=0))
            await place.train(bus)
            source = await source_of(place, bus)
            new = await uses(source, [criterion("source:live"), criterion("env:other")], 1, 3)
            for index, step in enumerate(source.ledger.steps):
                bare = tuple(msgspec.structs.replace(c, env="", source="sim") for c in step.consumed)
                source.ledger.steps[index] = msgspec.structs.replace(step, consumed=bare)
            old = await uses(source, [criterion("source:live"), criterion("env:other")], 1, 3)
            assert (old.counts, old.known) == (new.counts, new.known)
            assert {n: [c.group_id for c in found] for n, found in old.by_step.items()} == {
                2: ["test-g3"],
                3: ["test-g5"],
            }

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["", "group", "group:", "task:7", "live"])
def test_a_criterion_that_is_none(text: str) -> None:
    """The message has the forms that there are."""
    with pytest.raises(ConfigError, match=r"--without .*expected one of group:GROUP, user:USER, source:live"):
        criterion(text)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run of the tiny model, as the command line takes it."""
    place = Place(tmp_path / "run")

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(marked(place), partition=0))
            await place.train(bus)

    asyncio.run(scenario())
    (place.directory / "run.toml").write_text(f'[run]\nname = "{place.run.name}"\n')
    monkeypatch.setattr("headrace.policy.checkpoint.load_seed", lambda: (*seed(), None))
    return place.directory


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Exit code, and the document or the error."""
    code = main(["replay", *words, "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else said.err


def test_the_command(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Says what was left out and how far the weights are apart; writes a checkpoint, never over a file."""
    path = tmp_path / "clean.checkpoint"
    words = ["--run-dir", str(run_dir), "--without", "user:u1", "--without", "group:test-g2"]
    code, document = asked(capsys, *words, "-o", str(path))
    assert code == 0
    assert (document["first_use"], document["last"], document["records_left_out"]) == (1, 3, 2)
    assert [len(step["left_out"]) for step in document["steps"]] == [1, 1, 0]
    assert document["distance"]["l2"] > 0
    state = checkpoint.decode(path.read_bytes(), None, "here")
    assert (state.root, state.step) == (document["root_without"], 3)
    before = path.read_bytes()
    code, said = asked(capsys, *words, "-o", str(path))
    assert (code, path.read_bytes()) == (2, before)
    assert "clean.checkpoint: exists already; give --force" in said
    assert asked(capsys, *words, "-o", str(path), "--force", "--to", "2")[1]["last"] == 2
    assert checkpoint.decode(path.read_bytes(), None, "here").step == 2
    assert main(["replay", *words]) == 0
    assert "What this can't know:" in capsys.readouterr().out


def test_nothing_matches(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error with the nearest that there is, even if another criterion matches."""
    code, said = asked(
        capsys, "--run-dir", str(run_dir), "--without", "group:test-g0", "--without", "group:test-g9x"
    )
    assert code == 2
    assert "--without group:test-g9x: no record of steps up to 3 matches" in said
    assert "did you mean 'test-g" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["2", "--without", "user:u1"], "--without is of the whole run: expected --to N"),
        (["--last", "2", "--without", "user:u1"], "--without is of the whole run: expected --to N"),
        (["2", "--to", "3"], "--to goes with --without"),
        (["2", "-o", "x"], "-o and --force go with export and --without"),
        (["export", "2", "--what-if", "trainer.lr=1"], "expected one of export, --what-if, --without"),
        (["export", "2", "-o", "x.zip"], "-o: expected the name of a pack, FILE.hrpack, got x.zip"),
        (["--without", "user:u1", "--to", "9"], "expected steps from 1 to 3, got 9"),
    ],
)
def test_words_that_do_not_go_together(
    run_dir: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Nothing is ignored in silence."""
    code = main(["replay", *words, "--run-dir", str(run_dir)])
    assert (code, said in capsys.readouterr().err) == (2, True)


def test_a_run_from_the_clean_checkpoint(tmp_path: Path) -> None:
    """A new run, on its own log: version 0 is the clean weights; going on without the file, and computed
    again from its start, it is the same run."""
    place, new, again = (Place(tmp_path / name) for name in ("old", "new", "again"))
    path = tmp_path / "clean.checkpoint"

    async def scenario() -> None:
        async with place.opened() as bus, new.opened() as fresh, again.opened() as other:
            await bus.produce(messages(marked(place), partition=0))
            await place.train(bus)
            _, end = await counterfactual(await source_of(place, bus), [criterion("user:u1")])
            path.write_bytes(checkpoint.encode(end, place.run.name))
            started = msgspec.structs.replace(CONFIG, start_from=str(path))
            for log_, target in ((fresh, new), (other, again)):
                await log_.produce(messages(place.groups(6), partition=0))
                await target.train(log_, target.until(1), started)
            path.unlink()
            steps = await new.train(fresh, config=started)
            source = await source_of(new, fresh)
            assert source.ledger.published[0].root == steps[0].root_before == end.root
            first = await source.first()
            assert set(first.positions.values()) == {0}
            expected = replace(end, step=0, positions=first.positions, seen={})
            assert checkpoint.encode(first, "x") == checkpoint.encode(expected, "x")
            assert (await newest_state(source, 3)).updates == end.updates + 3
            # The other one: no file, and no checkpoint but the start's.
            for step in (await again.train(other, again.until(2), started))[:2]:
                if step.checkpoint:
                    await Blobs.open(again.store).delete(step.checkpoint.uri)
            assert [s.root_after for s in await again.train(other, config=started)] == [
                s.root_after for s in steps
            ]
            assert str(tmp_path) not in steps[0].config

    asyncio.run(scenario())

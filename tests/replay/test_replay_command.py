"""`headrace replay`: every step of a recorded run is equal; what is not is named with its likely cause."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from altered_log import STEPS, Altered, contents, record_run, replay
from packed_place import Place

from headrace.consumers.batches import offsets_text
from headrace.wire.packed import pack_f32, pack_u32
from headrace.wire.records import Drop, Experience, Rollout, TrainStep

Change = Callable[[Experience], Experience]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def steps(place: Place) -> list[TrainStep]:
    return record_run(place)


@pytest.fixture
def altered(place: Place, steps: list[TrainStep], tmp_path: Path) -> Altered:
    return Altered.copy(place.directory, tmp_path / "copy")


def test_every_step_is_equal(place: Place, steps: list[TrainStep]) -> None:
    """The whole run from its seed: each root recomputed is the recorded one; the log and the store are as
    before."""
    before = contents(place.directory)
    said = replay(place.directory, f"1..{STEPS}")
    assert said.code == 0, said.out + said.err
    lines = [line for line in said.out.splitlines() if line.endswith("equal")]
    assert [line.split()[4:] for line in lines] == [
        [step.root_after[:12], step.root_after[:12], "equal"] for step in steps
    ]
    assert "6 of 6 steps equal; computed in" in said.out
    assert "code, libraries, threads and kernel probe: as they were then" in said.out
    assert all(len(line) <= 100 for line in said.out.splitlines())
    assert contents(place.directory) == before


def test_the_newest_steps_start_from_a_checkpoint(place: Place, steps: list[TrainStep]) -> None:
    """The last step needs the state after step 5: from the checkpoint of step 4, with one step on the way."""
    said = replay(place.directory, "--last", "1", "--json")
    assert (said.code, said.outcomes, said.json["start"]) == (0, ["equal"], 4)
    assert said.json["steps"][0]["root_recomputed"] == steps[-1].root_after
    assert "checkpoint of step 4, 1 steps on the way" in replay(place.directory, "6").out


@pytest.mark.parametrize("words", [("--threads", "2"), ("--microbatch", "1"), ("--microbatch", "7")])
def test_threads_and_microbatches_leave_no_trace(
    place: Place, steps: list[TrainStep], words: tuple[str, str]
) -> None:
    """Another schedule of the same sums: the same weights."""
    assert replay(place.directory, "1..3", *words).code == 0


def test_a_run_that_was_moved(altered: Altered, tmp_path: Path) -> None:
    """The log names blobs by their hash, the settings name no directory: elsewhere it is the same run."""
    there = tmp_path / "else" / "where"
    shutil.move(altered.directory, there)
    assert replay(there, f"1..{STEPS}").code == 0


def _first(change: Callable[[Rollout], Rollout]) -> Change:
    def changed(experience: Experience) -> Experience:
        first, *rest = experience.rollouts
        return msgspec.structs.replace(experience, rollouts=(change(first), *rest))

    return changed


def _in_step(**fields: bytes) -> Change:
    return _first(
        lambda r: msgspec.structs.replace(r, steps=(msgspec.structs.replace(r.steps[0], **fields),))
    )


def _rewards(*values: float) -> Change:
    return lambda e: msgspec.structs.replace(
        e,
        rollouts=tuple(msgspec.structs.replace(r, reward=v) for r, v in zip(e.rollouts, values, strict=True)),
    )


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (_rewards(0.9, 0.0), "altered records: advantage.abs_mean 0.5 then, 0.475 now; reward.mean"),
        (_rewards(0.0, 1.0), "altered records (rewards or masks): gradient.norm"),
        (_rewards(1.0, 1.0), "altered records: admitted then or now, not both: test-g5"),
        (_in_step(logp=pack_f32([-1.5, -1.0])), "altered records (recorded log-probabilities or"),
        (_in_step(tokens_out=pack_u32([40, 41])), "altered records (tokens or routes): entropy.mean"),
    ],
)
def test_a_record_that_was_changed(altered: Altered, change: Change, cause: str) -> None:
    """One record of step 3 is another: step 3 differs, and the checkpoint of step 4 shows that the rest does
    not."""
    altered.experience("test-g5", change)
    said = replay(altered.directory, f"1..{STEPS}")
    assert said.code == 9
    text = " ".join(said.out.split())
    assert f"likely cause: {cause}" in text
    assert "first tensor: embed: " in text
    assert "4 not comparable: after step 3" in text
    assert "4 of 6 steps equal, 1 differ, 1 not comparable" in text
    document = replay(altered.directory, f"1..{STEPS}", "--json").json
    outcomes = [step["outcome"] for step in document["steps"]]
    assert outcomes == ["equal", "equal", "differs", "follows", "equal", "equal"]
    tensor = document["steps"][2]["first_tensor"]
    assert 0 < tensor["elements"] <= tensor["elements_of"]
    assert 0 < tensor["largest_difference"] < 0.1


def test_a_checkpoint_at_the_step_that_differs(altered: Altered) -> None:
    """Step 4 differs, and its own checkpoint is the state that the next steps go on from."""
    altered.experience("test-g6", _rewards(0.0, 1.0))
    said = replay(altered.directory, f"1..{STEPS}", "--json")
    assert said.outcomes == ["equal", "equal", "equal", "differs", "equal", "equal"]


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"admitted": ("test-g10",)}, "admitted then or now, not both: test-g11"),
        ({"drops": (Drop(group_id="test-g10", reason="stale"),)}, "dropped otherwise: test-g10"),
        ({"metrics": {"loss": 1.0}}, "loss 1 then"),
    ],
)
def test_weights_alone_are_not_enough(altered: Altered, fields: dict[str, object], cause: str) -> None:
    """The ledger tells another story of the same weights: which units, which drops, which numbers."""
    altered.step(6, **fields)
    said = replay(altered.directory, "6")
    assert said.code == 9
    assert "weights equal, RECORD DIFFERS" in said.out
    assert cause in " ".join(said.out.split())


def test_a_record_that_is_gone(altered: Altered) -> None:
    """The step is not computed from what is left: the offsets are named, and the exit code is its own."""
    places = altered.forget("test-g2", "test-g3")
    said = replay(altered.directory, "1..3")
    assert places == ["experience[0]@2", "experience[0]@3"]
    assert said.code == 5
    assert "RECORDS GONE" in said.out
    assert "experience[0]@2..3: expected 2 records of step 2, 2 of them have left" in said.out


def test_another_group_at_the_same_offset(altered: Altered) -> None:
    """A topic made anew under the same name has other groups at the old offsets."""
    altered.experience("test-g2", lambda e: msgspec.structs.replace(e, group_id="stranger"))
    said = replay(altered.directory, "2")
    assert said.code == 5
    assert "experience[0]@2: expected group 'test-g2'" in " ".join(said.out.split())


def test_a_configuration_that_was_changed(altered: Altered, steps: list[TrainStep]) -> None:
    """The settings' text in the ledger is not what their hash says."""
    other = steps[3].config.replace('"lr":0.01', '"lr":0.02')
    assert other != steps[3].config
    altered.step(4, config=other)
    said = replay(altered.directory, "4")
    assert said.code == 9
    assert "the settings in the ledger were altered: its text has SHA-256" in said.out


def test_a_root_that_was_changed(altered: Altered) -> None:
    """In the middle of the ledger the chain breaks, and the run is refused by place; at its end the
    announcement contradicts it."""
    altered.step(6, root_after="0" * 64)
    said = replay(altered.directory, "6")
    assert said.code == 9
    assert "the ledger says root 000000000000, the announcement of version 6" in " ".join(said.out.split())
    where = altered.step(3, root_after="f" * 64)
    following = where.replace("@2", "@3")
    said = replay(altered.directory, "1")
    assert said.code == 9
    assert "step 4: expected to begin with root ffff" in said.err
    assert said.err.startswith(f"headrace: {where.partition('@')[0]}@"), following


@pytest.mark.parametrize("damage", [None, b"not a checkpoint"])
def test_a_checkpoint_that_is_gone(altered: Altered, steps: list[TrainStep], damage: bytes | None) -> None:
    """The one before it is used, and that is said."""
    [named] = [s.checkpoint for s in steps if s.checkpoint is not None and s.checkpoint.step == 4]
    blob = altered.directory / "store" / named.uri
    blob.unlink() if damage is None else blob.write_bytes(damage)
    said = replay(altered.directory, "6", "--json")
    assert (said.code, said.json["start"]) == (0, 2)
    [note] = said.json["notes"]
    assert note.startswith("the checkpoint of step 4 can't be used: ")
    assert note.endswith("from the checkpoint of step 2")


def test_weights_that_can_no_longer_be_had(altered: Altered) -> None:
    """Without the published snapshots a difference is still found; only its tensor can't be named."""
    altered.experience("test-g0", _rewards(0.9, 0.0))
    shutil.rmtree(altered.directory / "store")
    said = replay(altered.directory, "1")
    assert said.code == 9
    assert "first tensor: can't be told: weights 1: expected a way to root" in " ".join(said.out.split())


def test_another_probe_is_said_beforehand(
    place: Place, steps: list[TrainStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose probe is another may still get the same weights: then they are equal."""
    monkeypatch.setattr("headrace.kernels.invariant.probe", lambda: "f" * 64)
    said = replay(place.directory, "1")
    assert said.code == 0
    head, _, rest = said.out.partition("root recorded")
    assert "This machine computes otherwise than the one that made these steps:" in head
    assert f"kernel probe: {steps[0].kernel_probe[:12]} then, ffffffffffff now" in head
    assert "1 of 1 steps equal" in rest


def test_a_difference_of_another_machine_is_not_the_records_fault(
    place: Place, steps: list[TrainStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another probe and other weights, from the same counted units: exit code 11 and its own words; a changed
    record is a changed record there too."""
    monkeypatch.setattr("headrace.kernels.invariant.probe", lambda: "f" * 64)
    monkeypatch.setattr("headrace.kernels.moe.silu", lambda x: x / (1 + (-x).exp()) * (1 + 2**-12))
    said = replay(place.directory, "1..4")
    assert said.code == 11
    outcomes = {line.split()[0]: line.split()[-1] for line in said.out.splitlines() if "2/2" in line}
    assert outcomes == {"1": "otherwise", "3": "otherwise"}
    assert "2  not comparable: after step 1" in said.out
    assert "The records are not at fault" in said.out


def test_a_record_changed_before_another_machine(altered: Altered, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the records alone decide does not change with the machine: 9, not 11."""
    altered.experience("test-g1", _rewards(0.9, 0.0))
    monkeypatch.setattr("headrace.kernels.invariant.probe", lambda: "f" * 64)
    said = replay(altered.directory, "1")
    assert said.code == 9
    assert "likely cause: altered records: advantage.abs_mean" in said.out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "expected one of STEP, FROM..TO and --last N, got nothing"),
        (("1", "--last", "2"), "expected one of STEP, FROM..TO and --last N, got 1 --last 2"),
        (("1-3",), "expected a step (12) or a range of steps (3..7), got '1-3'"),
        (("3..1",), "expected FROM..TO with FROM before TO, got 3..1"),
        (("0",), "expected steps from 1 to 6, got 0"),
        (("7",), "expected steps from 1 to 6, got 7"),
        (("1", "--run", "tset"), "unknown run 'tset': did you mean 'test'? (on this log: test)"),
    ],
)
def test_what_can_not_be_replayed(
    place: Place, steps: list[TrainStep], words: tuple[str, ...], reason: str
) -> None:
    """One line that says what was expected, exit code 2."""
    said = replay(place.directory, *words)
    assert (said.code, said.err.count("\n"), said.out) == (2, 1, "")
    assert reason in said.err


def test_offsets_as_ranges() -> None:
    """Neighbours share a range."""
    assert offsets_text([1, 2, 3, 7, 9, 10]) == "1..3,7,9..10"

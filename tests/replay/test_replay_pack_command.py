"""`headrace replay export` and `headrace replay FILE.hrpack`, as a person types them."""

import json
from pathlib import Path
from typing import Any

import pytest
from altered_log import STEPS, Altered, record_run, replay
from packed_place import Place

from headrace.cli.entry import main
from headrace.wire.records import TrainStep


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def steps(place: Place) -> list[TrainStep]:
    return record_run(place)


@pytest.fixture
def pack(place: Place, steps: list[TrainStep], tmp_path: Path) -> Path:
    """Steps 3 to 5; the checkpoint before is that of step 2."""
    path = tmp_path / "steps.hrpack"
    said = replay(place.directory, "export", "3..5", "-o", str(path))
    assert said.code == 0, said.err
    assert "steps 3 to 5" in said.out
    return path


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Exit code, and the document or the error."""
    code = main(["replay", *words, "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else said.err


def test_in_an_empty_directory(
    place: Place,
    pack: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same table as on the log, the steps asked for or all of them; and nothing is written."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    on_the_log = replay(place.directory, "3..5", "--json").json["steps"]
    code, document = asked(capsys, str(pack))
    keys = ("step", "outcome", "units_read", "units_trained", "loss", "root_recorded", "root_recomputed")
    assert code == 0
    assert [[s[k] for k in keys] for s in document["steps"]] == [[s[k] for k in keys] for s in on_the_log]
    assert [s["step"] for s in asked(capsys, str(pack), "4")[1]["steps"]] == [4]
    assert [s["step"] for s in asked(capsys, str(pack), "--last", "2")[1]["steps"]] == [4, 5]
    assert main(["replay", str(pack)]) == 0
    assert "from the pack's state after step 2" in capsys.readouterr().out
    assert asked(capsys, str(pack), "5", "--what-if", "trainer.lr=0.5")[1]["steps"][0]["step"] == 5
    assert list(empty.iterdir()) == []


def test_a_pack_is_no_longer_than_its_steps(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that it does not hold are an error that says which it does."""
    code, said = asked(capsys, str(pack), "1..4")
    assert (code, "expected steps from 3 to 5, got 1..4" in said) == (2, True)


def test_a_changed_byte_ends_with_one_line(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The store's exit code, the file and the part; no traceback, no step computed."""
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)
    code, said = asked(capsys, str(pack))
    assert code == 5
    assert said.startswith(f"headrace: {pack}: part '")
    assert said.count("\n") == 1


def test_a_step_that_differs_names_its_tensor_without_the_log(
    place: Place, steps: list[TrainStep], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that was exchanged on the log before the export: the pack shows what the log would show."""
    altered = Altered.copy(place.directory, tmp_path / "copy")

    def doubled(record: Any) -> Any:
        import msgspec

        first, *rest = record.rollouts
        return msgspec.structs.replace(
            record, rollouts=(msgspec.structs.replace(first, reward=first.reward + 1), *rest)
        )

    altered.experience(steps[3].admitted[0], doubled)
    path = tmp_path / "altered.hrpack"
    assert replay(altered.directory, "export", "4", "-o", str(path)).code == 0
    code, document = asked(capsys, str(path))
    on_the_log = replay(altered.directory, "4", "--json").json["steps"][0]
    assert code == 9
    assert document["steps"][0]["first_tensor"] is not None
    for key in ("outcome", "first_tensor", "causes", "root_recomputed"):
        assert document["steps"][0][key] == on_the_log[key]


def test_other_names(pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pack that is not there, and one under another name."""
    code, said = asked(capsys, str(tmp_path / "gone.hrpack"))
    assert (code, "gone.hrpack: expected a pack: No such file" in said) == (2, True)
    other = pack.rename(tmp_path / "steps.zip")
    said = replay(tmp_path, str(other)).err
    assert "expected a run" in said or "a pack's name ends in .hrpack" in said


def test_the_last_of_all_steps(place: Place, steps: list[TrainStep], tmp_path: Path) -> None:
    """Exported by `--last`; the name says which, where none is given."""
    said = replay(place.directory, "export", "--last", "1", "-o", str(tmp_path / "a.hrpack"), "--json")
    assert (said.json["first"], said.json["last"]) == (STEPS, STEPS)
    assert said.json["bytes"] == (tmp_path / "a.hrpack").stat().st_size

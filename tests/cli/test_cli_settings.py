"""The tree of settings and the run file."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from headrace.cli import settings as tree
from headrace.cli import settings_page
from headrace.config import RunConfig, dotted_fields
from headrace.errors import ConfigError


def test_the_last_source_wins(tmp_path: Path) -> None:
    """Run file, then files in order, then environment, then flags."""
    for name, steps in (("first.toml", 1), ("second.toml", 2)):
        (tmp_path / name).write_text(f"[run]\nsteps_max = {steps}\nseed = {steps}\ngroup_size = {steps}\n")
    (tmp_path / tree.RUN_FILE).write_text("[run]\nregion = 'far'\nseed = 9\n")
    found = tree.load(
        tmp_path,
        files=[tmp_path / "first.toml", tmp_path / "second.toml"],
        environment={"HEADRACE_RUN__GROUP_SIZE": "3", "HOME": "x"},
        flags={"run.steps_max": "4"},
    )
    assert (found.run.region, found.run.seed, found.run.group_size, found.run.steps_max) == ("far", 2, 3, 4)


@pytest.mark.parametrize("text", ["0.1,0.5", "0.1, 0.5", "[0.1, 0.5]"])
def test_a_list_is_given_like_other_settings(text: str) -> None:
    """As a flag and in the environment, of numbers and of words; one alone is a list of one."""
    assert tree.load(None, environment={}, flags={"canary.stages": text}).canary.stages == (0.1, 0.5)
    found = tree.load(None, environment={"HEADRACE_CANARY__STAGES": text}, flags={"editors.heldout": "toolz"})
    assert (found.canary.stages, found.editors.heldout) == ((0.1, 0.5), ("toolz",))


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("run.steps_max", "0", ">= 1"),
        ("run.groups_per_step", "-1", ">= 0"),
        ("run.group_size", "0", ">= 1"),
        ("run.lag_versions_max", "-1", ">= 0"),
    ],
)
def test_a_number_out_of_range_is_refused(tmp_path: Path, name: str, value: str, bound: str) -> None:
    """What no run could work with is refused before a process starts, with bound and name."""
    with pytest.raises(ConfigError, match=rf"{bound}.*{name}"):
        tree.load(tmp_path, environment={}, flags={name: value})
    tree.load(tmp_path, environment={}, flags={name: bound[-1], "run.live_per_step": "1"})


def test_a_run_without_any_source_is_refused(tmp_path: Path) -> None:
    """A step has to consume something."""
    with pytest.raises(ConfigError, match=r"live_per_step: expected one of them above 0"):
        tree.load(tmp_path, environment={}, flags={"run.groups_per_step": "0"})


def test_the_run_file_gives_the_same_settings_back(tmp_path: Path) -> None:
    """Whatever was set survives `save` and `load`, and every setting stands in the file."""
    before = tree.load(
        tmp_path, environment={}, flags={"trainer.lr": "1e-5", "run.name": 'a "b" \\ é', "demo.workers": "3"}
    )
    path = tree.save(before, tmp_path)
    assert tree.load(tmp_path, environment={}) == before
    written = tomllib.loads(path.read_text())
    leaves = {name: default for name, (_, default) in dotted_fields(tree.Settings).items()}
    for name in leaves:
        node = written
        for part in name.split(".")[:-1]:
            node = node[part]
        assert name.split(".")[-1] in node or leaves[name] is None


def test_a_moved_run_directory_works(tmp_path: Path) -> None:
    """Addresses inside the run directory follow it; an address that was given stays."""
    first, second = tmp_path / "first", tmp_path / "second"
    tree.save(tree.load(first, environment={}), first)
    first.rename(second)
    moved = tree.load(second, environment={})
    assert moved.bus.address == f"sqlite:{second.resolve()}/bus.sqlite"
    assert moved.store.uri == f"{second.resolve().as_uri()}/store"
    tree.save(tree.load(second, environment={}, flags={"bus.address": "kafka:h:1"}), second)
    assert tree.load(second, environment={}).bus.address == "kafka:h:1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"trainr.lr": "1"}, r"--trainr\.lr: unknown key 'trainr': did you mean 'trainer'\?"),
        (
            {"trainer.loss.clip_hihg": "1"},
            r"trainer: loss: unknown key 'clip_hihg': did you mean 'clip_high'\?",
        ),
        ({"run.seed": "many"}, "seed"),
        ({"canary.stages": "0.5,0.1"}, "stages: expected growing shares"),
        ({"canary.stages": "0.5,half"}, r"float.*canary\.stages\[1\]"),
        ({"canary.stages": "[0.5"}, r"--canary\.stages: expected a list, as a,b or as JSON, got '\[0\.5'"),
        ({"canary.stages": "1.5"}, r"canary\.stages"),
    ],
)
def test_wrong_settings_are_refused_with_their_place(flags: dict[str, str], message: str) -> None:
    """An unknown key names the nearest one; a wrong value names its key."""
    with pytest.raises(ConfigError, match=message):
        tree.load(None, environment={}, flags=flags)


def test_toml_of_odd_values() -> None:
    """Nested tables, quotes, control characters and lists are written so that TOML reads them back."""
    odd = {"a": {"x.y": 'q"\\\n\x7f', "n": -1.5e-9, "l": ["a", "b"], "b": True, "none": None, "d": {"k": 1}}}
    assert tomllib.loads(tree.to_toml(odd)) == {
        "a": {key: value for key, value in odd["a"].items() if key != "none"}
    }


def test_defaults_are_one_tree() -> None:
    """Every section of the tree is a struct with defaults for all of its fields."""
    defaults = msgspec.to_builtins(tree.Settings())
    assert defaults["run"] == msgspec.to_builtins(RunConfig())
    assert all(isinstance(section, dict) for section in defaults.values())


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "configs").glob("*.toml")), ids=lambda p: p.name
)
def test_the_examples_load(path: Path) -> None:
    """Each file in `configs/` changes something and has no unknown key."""
    assert tree.load(None, files=[path], environment={}) != tree.Settings()


def test_page_is_current() -> None:
    """docs/settings.md is the output of `python -m headrace.cli.settings_page`, and has every setting."""
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    assert page == settings_page.render()
    assert page.count("\n| `") == len(dotted_fields(tree.Settings))

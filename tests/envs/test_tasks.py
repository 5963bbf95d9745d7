"""The shipped index: what is in it, what it refuses, and that no foreign source is in it."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from headrace.envs import tasks
from headrace.envs.config import SandboxConfig
from headrace.envs.sandbox import Job, Sandbox
from headrace.envs.tasks import TaskSet, read_index, write_index
from headrace.errors import ConfigError
from headrace.policy.source import canonical, restore


def test_there_are_enough_tasks() -> None:
    """At least 1,500 to train on and 400 held out, each with a visible and a hidden example."""
    assert len(TaskSet.load("train")) >= 1500
    assert len(TaskSet.load("heldout")) >= 400
    assert all(function.visible and function.hidden for function in read_index().functions)


def test_splits_are_disjoint() -> None:
    """No package and no function text is in both splits."""
    by_split: dict[str, list[tasks.FunctionEntry]] = {"train": [], "heldout": []}
    for function in read_index().functions:
        by_split[function.split].append(function)
    for field in ("distribution", "module", "canonical_sha256"):
        train, heldout = ({getattr(entry, field) for entry in by_split[split]} for split in by_split)
        assert train and heldout and not train & heldout


def test_every_task_is_its_function() -> None:
    """Prefix, fill and suffix of each held-out task join to the canonical text, and its program is that."""
    heldout = TaskSet.load("heldout")
    for task in heldout:
        text = task.prefix + task.fill + task.suffix
        assert task.fill.startswith(" ")
        assert task.program(task.fill) == restore(text)
        assert canonical(task.program(task.fill)) == text
        assert {check.hidden for check in task.checks} == {True, False}
    assert [task.task_id for task in heldout] == list(heldout.task_ids)


def test_originals_pass() -> None:
    """Every 40th task passes in the sandbox with its original fill, and fails with an unknown name."""

    async def scenario() -> list[tuple[str, str, str]]:
        seen: list[tuple[str, str, str]] = []
        async with await Sandbox.start(SandboxConfig(), tasks.distributions()) as sandbox:
            for split in ("train", "heldout"):
                chosen = TaskSet.load(split)
                for task in map(chosen.task, chosen.task_ids[::40]):
                    programs = (task.program(task.fill), task.program("no_such_name"))
                    right, wrong = await sandbox.run(Job(task.module, task.function, programs, task.checks))
                    seen.append((task.task_id, right.status, wrong.status))
        return seen

    assert [case for case in asyncio.run(scenario()) if case[1] != "passed" or case[2] == "passed"] == []


def test_index_holds_no_source() -> None:
    """Names, numbers and hashes only: no example and no line of a function."""
    plain = msgspec.json.encode(read_index()).decode()
    for task in TaskSet.load("heldout"):
        lines = (task.prefix + task.fill + task.suffix).split("\n")
        assert not [line for line in lines if len(line.strip()) > 4 and line.strip() in plain]
        assert not [
            c for c in task.checks if not c.source.strip().isidentifier() and c.source.strip() in plain
        ]


def test_other_version_and_other_bytes_are_refused(tmp_path: Path) -> None:
    """A package of another version, or whose file was edited, is named."""
    index = read_index()
    other = tmp_path / "version.zst"
    write_index(msgspec.structs.replace(index, versions=index.versions | {"toolz": "0.0.1"}), other)
    with pytest.raises(ConfigError, match=r"toolz: expected version 0\.0\.1, got "):
        TaskSet.load("heldout", index=other)
    TaskSet.load("train", index=other)
    edited = tmp_path / "edited.zst"
    name = next(name for name in index.sources if name.startswith("toolz:"))
    write_index(msgspec.structs.replace(index, sources=index.sources | {name: "0" * 64}), edited)
    with pytest.raises(ConfigError, match=r"toolz: .*: expected SHA-256 0000000000000000…, got .*changed"):
        TaskSet.load("heldout", index=edited)


def test_damaged_index_and_unknown_names_are_refused(tmp_path: Path) -> None:
    """Truncated, of another format, missing; a split, kind or task that there is not."""
    good = tmp_path / "good.zst"
    write_index(read_index(), good)
    cut = tmp_path / "cut.zst"
    cut.write_bytes(good.read_bytes()[:-100])
    later = tmp_path / "later.zst"
    write_index(msgspec.structs.replace(read_index(), format=99), later)
    for path, message in ((cut, "cut.zst"), (later, "format 1, got 99"), (tmp_path / "none.zst", "none.zst")):
        with pytest.raises(ConfigError, match=message):
            read_index(path)
    with pytest.raises(ConfigError, match="expected a split of train, heldout, got 'test'"):
        TaskSet.load("test")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a kind of"):
        TaskSet.load("train", ("verbs",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no task 'nothing'"):
        TaskSet.load("train").task("nothing")

"""Building the index: which wrong fills are tried, what is taken, and that it is the same twice."""

import asyncio
from pathlib import Path

import msgspec

from headrace.envs.build import BuildConfig, build, verify
from headrace.envs.distractors import distractors
from headrace.envs.tasks import TaskSet, read_index, task_id, write_index
from headrace.policy.source import Hole, canonical, holes


def hole(kind: str, text: str) -> Hole:
    return Hole(kind, 0, len(text), text)  # type: ignore[arg-type]


def test_distractors_are_of_the_kind_and_never_the_original() -> None:
    """By hand: operators stay in their family, constants near, names from the function first."""
    assert distractors(hole("operator", " <"), [], "s") == ["==", "!=", "<=", ">", ">="]
    assert distractors(hole("operator", " +="), [], "s") == ["-=", "*=", "//=", "%=", "/="]
    assert distractors(hole("operator", " and"), [], "s") == ["or"]
    assert distractors(hole("constant", " True"), [], "s") == ["False", "None", "0", "1"]
    text = canonical("def f(a, b):\n    return a + b\n")
    found = [one for one in holes(text) if one.kind == "name"]
    assert [one.text for one in found] == [" a", " b"]
    drawn = distractors(found[0], found, "s")
    assert len(drawn) == 6
    assert "a" not in drawn
    assert drawn == distractors(found[0], found, "s")
    assert len({tuple(distractors(found[0], found, str(seed))) for seed in range(20)}) > 1


def test_small_build_twice(tmp_path: Path) -> None:
    """One package gives the same bytes twice, and what they name verifies."""
    config = BuildConfig(train=("pyrsistent",), heldout=(), out=str(tmp_path / "a.zst"))
    report = asyncio.run(build(config, lambda text: None))
    again = msgspec.structs.replace(config, out=str(tmp_path / "b.zst"))
    asyncio.run(build(again, lambda text: None))
    assert (tmp_path / "a.zst").read_bytes() == (tmp_path / "b.zst").read_bytes()
    chosen = TaskSet.load("train", ("operator", "constant", "name"), tmp_path / "a.zst")
    assert report.functions["train"] > 0
    assert sum(report.tasks["train"].values()) >= len(chosen) > 0
    checked = asyncio.run(verify(config, lambda text: None))
    assert (checked.originals, checked.originals_passed) == (report.functions["train"],) * 2


def test_verify_tells_what_fails(tmp_path: Path) -> None:
    """A hole that begins inside the word before it makes its function fail, and verify says which."""
    index = read_index()
    task = next(task for task in TaskSet.load("heldout") if task.prefix.endswith(" return"))
    places = [(f, h) for f in index.functions for h in f.holes if task_id(f, h) == task.task_id]
    entry, hole = places[0]
    moved = msgspec.structs.replace(entry, holes=(msgspec.structs.replace(hole, start=hole.start - 2),))
    path = tmp_path / "moved.zst"
    write_index(msgspec.structs.replace(index, functions=(moved,)), path)
    told: list[str] = []
    report = asyncio.run(verify(BuildConfig(out=str(path)), told.append))
    assert (report.originals, report.originals_passed) == (1, 0)
    assert any(line.startswith(f"{entry.module}.{entry.name}: ") for line in told)

"""Makes the task index, and checks it again later: `headrace tasks build` and `verify`.

A function is taken when its doctests pass 20 of 20 times as it stands, quickly, alone and in any order; a
hole when nearly every wrong fill is caught. No source goes into the index.
"""

import ast
import importlib.metadata
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from typing import get_args

import msgspec

from headrace.envs import tasks
from headrace.envs.checks import Check, checks_of
from headrace.envs.config import SandboxConfig
from headrace.envs.distractors import distractors
from headrace.envs.sandbox import Job, Sandbox
from headrace.policy.dialogue import prompt_tokens
from headrace.policy.source import Hole, HoleKind, canonical, fill_is_wellformed, holes, restore
from headrace.policy.tokenizer import Tokenizer, load

Progress = Callable[[str], None]
TRAIN = ("pydash", "more-itertools", "pyrsistent", "packaging")
HELDOUT = ("toolz", "boltons", "humanize", "glom")
HASH_SEEDS = (0, 1, 2, 3)
RUNS_PER_SEED = 5  # 4 x 5 = 20 runs of the original


class BuildConfig(msgspec.Struct, frozen=True, kw_only=True):
    train: tuple[str, ...] = TRAIN
    heldout: tuple[str, ...] = HELDOUT
    out: str = ""
    """Where the index goes; empty: into the package."""
    tokenizer: str = ""
    """A tokenizer's JSON; empty: the seed's."""
    prompt_tokens_max: int = 224
    fill_tokens_max: int = 12
    original_cpu_ms: int = 50
    """Processor time that the original may take for one check."""
    checks_max: int = 12
    caught_min: float = 0.75
    """Share of wrong fills that must fail."""
    sandbox: SandboxConfig = SandboxConfig(check_cpu_ms=100, wall_ms=1500)


class Report(msgspec.Struct, frozen=True):
    """Counts by split and kind, originals run and passed, functions left out by reason."""

    tasks: dict[str, dict[str, int]]
    functions: dict[str, int]
    left_out: dict[str, int]
    originals: int
    originals_passed: int
    seconds: float


class _Found(msgspec.Struct, frozen=True):
    """A module-level function with at least two examples."""

    split: tasks.Split
    distribution: str
    file: str
    module: str
    name: str
    line: int
    line_last: int
    text: str
    checks: tuple[Check, ...]


async def build(config: BuildConfig, progress: Progress) -> Report:
    """Writes the index; a few minutes on one core. Raises SandboxError, ConfigError."""
    started = time.monotonic()
    tokenizer = load(Path(config.tokenizer)) if config.tokenizer else _seed_tokenizer()
    left_out: Counter[str] = Counter()
    entries: list[tasks.FunctionEntry] = []
    names = (*config.train, *config.heldout)
    async with AsyncExitStack() as stack:
        sandboxes = []
        for seed in HASH_SEEDS:
            cpu_ms = config.sandbox.check_cpu_ms if seed == 0 else config.original_cpu_ms
            settings = msgspec.structs.replace(config.sandbox, hash_seed=seed, check_cpu_ms=cpu_ms)
            sandboxes.append(await stack.enter_async_context(await Sandbox.start(settings, names)))
        progress(sandboxes[0].describe())
        for distribution in names:
            split: tasks.Split = "train" if distribution in config.train else "heldout"
            before = len(entries)
            for found in _functions(distribution, split):
                entry, reason = await _entry(found, sandboxes, tokenizer, config)
                left_out[reason] += 1
                if entry:
                    entries.append(entry)
            taken = sum(len(entry.holes) for entry in entries[before:])
            progress(f"{distribution}: {len(entries) - before} functions, {taken} tasks")
    entries = _apart(entries, left_out)
    index = _index(entries)
    size = tasks.write_index(index, Path(config.out) if config.out else _shipped())
    progress(f"index: {size} bytes")
    del left_out[""]
    return _report(index, left_out, len(entries), len(entries), started)


async def verify(config: BuildConfig, progress: Progress) -> Report:
    """Runs the original of every indexed function once. Raises ConfigError when a source is not the indexed
    one."""
    started = time.monotonic()
    path = Path(config.out) if config.out else None
    index = tasks.read_index(path)
    passed = run = 0
    wrong: Counter[str] = Counter()
    async with await Sandbox.start(config.sandbox, sorted(index.versions)) as sandbox:
        progress(sandbox.describe())
        for split in get_args(tasks.Split):
            chosen = tasks.TaskSet.load(split, get_args(HoleKind), path)
            firsts = {name.split(":")[0]: name for name in chosen.task_ids}
            for function, task_id in firsts.items():
                task = chosen.task(task_id)
                job = Job(task.module, task.function, (task.program(task.fill),), task.checks)
                (outcome,) = await sandbox.run(job)
                run += 1
                passed += outcome.status == "passed"
                if outcome.status != "passed":
                    wrong[function] += 1
                    progress(f"{function}: {outcome.status}: {outcome.detail}")
    return _report(index, wrong, run, passed, started)


def _functions(distribution: str, split: tasks.Split) -> Iterator[_Found]:
    for file in sorted(importlib.metadata.files(distribution) or [], key=str):
        parts = file.with_suffix("").parts
        if file.suffix != ".py" or any("test" in part for part in parts):
            continue
        source = tasks.source_path(distribution, str(file)).read_text(encoding="utf-8")
        body = ast.parse(source).body
        defined = Counter(node.name for node in body if isinstance(node, ast.FunctionDef))
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in body:
            if isinstance(node, ast.FunctionDef) and defined[node.name] == 1:
                checks = tuple(checks_of(ast.get_docstring(node, clean=False) or ""))
                line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                last = node.end_lineno or node.lineno
                lines = tasks.source_lines(source)[line - 1 : last]
                if len(checks) >= 2:
                    text = canonical("".join(lines))
                    yield _Found(split, distribution, str(file), module, node.name, line, last, text, checks)


async def _entry(
    found: _Found, sandboxes: Sequence[Sandbox], tokenizer: Tokenizer, config: BuildConfig
) -> tuple[tasks.FunctionEntry | None, str]:
    """The function's entry, or why it is left out."""
    if len(tokenizer.encode(found.text)) > config.prompt_tokens_max + config.fill_tokens_max:
        return None, "too long"
    kept = await _steady_checks(found, sandboxes, config)
    if len(kept) < 2:
        return None, "fewer than two steady, quick examples"
    checks = tuple(found.checks[position] for position in kept)
    taken = []
    candidates = [hole for hole in holes(found.text) if _fits(hole, found.text, tokenizer, config)]
    for hole, wrong in await _verdicts(found, candidates, checks, sandboxes[0]):
        if wrong and sum(not passes for passes in wrong) >= config.caught_min * len(wrong):
            taken.append(tasks.HoleEntry(hole.kind, hole.start, hole.end))
    if not taken:
        return None, "no hole that its examples pin down"
    random.Random(f"{found.module}.{found.name}").shuffle(kept)
    hidden = len(kept) // 2
    return (
        tasks.FunctionEntry(
            split=found.split,
            distribution=found.distribution,
            file=found.file,
            module=found.module,
            name=found.name,
            line=found.line,
            line_last=found.line_last,
            canonical_sha256=tasks.text_sha256(found.text),
            visible=tuple(sorted(kept[hidden:])),
            hidden=tuple(sorted(kept[:hidden])),
            holes=tuple(taken),
        ),
        "",
    )


async def _steady_checks(found: _Found, sandboxes: Sequence[Sandbox], config: BuildConfig) -> list[int]:
    """Positions of the checks that the original passes in all runs, in any order, in little time."""
    kept: list[int] = []
    seen = set()
    for position, check in enumerate(found.checks):
        calls = any(found.name in source for source in (*check.setup, check.source))
        if calls and (check.source, check.want) not in seen and len(kept) < config.checks_max:
            seen.add((check.source, check.want))
            kept.append(position)
    original = restore(found.text)
    for number, sandbox in enumerate(sandboxes):
        kept.sort(reverse=number == 1)  # an example that needs another before it fails in some order
        if number > 1:
            random.Random(number).shuffle(kept)
        checks = tuple(found.checks[position] for position in kept)
        outcomes = await sandbox.run(Job(found.module, found.name, (original,) * RUNS_PER_SEED, checks))
        unsteady = {place for outcome in outcomes for place in outcome.unmet}
        kept = [position for place, position in enumerate(kept) if place not in unsteady]
        if len(kept) < 2:
            return []
    return sorted(kept)


async def _verdicts(
    found: _Found, candidates: Sequence[Hole], checks: tuple[Check, ...], sandbox: Sandbox
) -> list[tuple[Hole, list[bool]]]:
    """For each hole whether each of its wrong fills passes all the same."""
    programs: list[str] = []
    owners: list[int] = []
    for place, hole in enumerate(candidates):
        for fill in distractors(hole, candidates, f"{found.module}.{found.name}:{hole.start}"):
            programs.append(restore(f"{found.text[: hole.start]} {fill}{found.text[hole.end :]}"))
            owners.append(place)
    passes: list[list[bool]] = [[] for _ in candidates]
    for start in range(0, len(programs), 128):
        job = Job(found.module, found.name, tuple(programs[start : start + 128]), checks)
        for place, outcome in zip(owners[start : start + 128], await sandbox.run(job), strict=True):
            passes[place].append(outcome.status == "passed")
    return list(zip(candidates, passes, strict=True))


def _fits(hole: Hole, text: str, tokenizer: Tokenizer, config: BuildConfig) -> bool:
    if "__" in hole.text or not fill_is_wellformed(hole.text):
        return False
    if len(tokenizer.encode(hole.text)) > config.fill_tokens_max:
        return False
    prompt = prompt_tokens(tokenizer, text[: hole.start], text[hole.end :])
    return len(prompt) <= config.prompt_tokens_max


def _apart(entries: list[tasks.FunctionEntry], left_out: Counter[str]) -> list[tasks.FunctionEntry]:
    """Without held-out functions whose text is also a function of the training split."""
    trained = {entry.canonical_sha256 for entry in entries if entry.split == "train"}
    apart = [entry for entry in entries if entry.split == "train" or entry.canonical_sha256 not in trained]
    left_out["held out, but also in the training split"] += len(entries) - len(apart)
    return apart


def _index(entries: Sequence[tasks.FunctionEntry]) -> tasks.Index:
    sources = sorted({(entry.distribution, entry.file) for entry in entries})
    return tasks.Index(
        format=tasks.FORMAT,
        versions={name: importlib.metadata.version(name) for name in sorted({name for name, _ in sources})},
        sources={f"{name}:{file}": tasks.source_sha256(name, file) for name, file in sources},
        functions=tuple(entries),
    )


def _report(index: tasks.Index, left_out: Counter[str], run: int, passed: int, started: float) -> Report:
    kinds: dict[str, Counter[str]] = {split: Counter() for split in get_args(tasks.Split)}
    for function in index.functions:
        kinds[function.split].update(hole.kind for hole in function.holes)
    functions: Counter[str] = Counter(function.split for function in index.functions)
    return Report(
        tasks={split: dict(sorted(counts.items())) for split, counts in kinds.items()},
        functions=dict(functions),
        left_out=dict(left_out),
        originals=run,
        originals_passed=passed,
        seconds=round(time.monotonic() - started, 1),
    )


def _seed_tokenizer() -> Tokenizer:
    return load(Path(str(files("headrace.policy"))) / "seed" / "tokenizer.json")


def _shipped() -> Path:
    return Path(str(files("headrace.envs"))) / "tasksets" / tasks.INDEX

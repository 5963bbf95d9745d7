"""Where two runs part: the first step of which they are not equal, and why. Two ledgers in, an answer out.

Two steps are equal when they start from the same weights, consume the same groups in the same order, give
them the same answers and end with the same weights. Groups are the same here by their number in the run;
whether their records hold the same is asked only where the weights part (`content`). Reads nothing.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.cli.step_units import flat, parsed
from headrace.wire.codec import at
from headrace.wire.records import Consumed, Experience, Rollout, TrainStep

SETTINGS_ASIDE: Final = ("run.name", "run.seed")
"""A name makes no difference, and the seed is told as such."""
SETTINGS_INERT: Final = (
    "run.steps_max",
    "trainer.alarm_ms",
    "trainer.checkpoint_every",
    "trainer.checkpoints_forever_every",
    "trainer.checkpoints_kept",
    "trainer.full_every",
    "trainer.microbatch_groups",
    "trainer.outage_ms_max",
    "trainer.start_from",
    "trainer.sweep_every_ms",
    "trainer.threads",
)
"""What no step's result depends on (docs/training.md): never why two runs part."""
PARTING: Final = ("hole", "start", "records", "answers", "weights")
"""What makes two steps different. Settings, seed and provenance may say why; alone they left no trace."""
TRAINED_FIELDS: Final = (
    "tokens_in",
    "tokens_out",
    "loss_mask",
    "logp",
    "spans",
    "weights_version",
    "prefix_length",
    "temperature",
    "routes",
)
"""Of a turn: what a step computes with."""


@dataclass(frozen=True, slots=True)
class Cause:
    """`kind`: one of PARTING, or configuration, seed, provenance, or settings (those that change nothing)."""

    kind: str
    text: str


@dataclass(slots=True)
class Parting:
    """`step` None: equal over the `common` steps that both have. `pair`: the two records of the step."""

    common: int = 0
    step: int | None = None
    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What differs before it and left no trace, with the step where that began."""
    length_a: int = 0
    length_b: int = 0
    pair: tuple[TrainStep, TrainStep] | None = None


async def part(a: AsyncIterator[TrainStep], b: AsyncIterator[TrainStep]) -> Parting:
    """Walks both ledgers together, holding one step of each; reads both to their ends."""
    found = Parting()
    noted: set[str] = set()
    while True:
        one, other = await anext(a, None), await anext(b, None)
        found.length_a += one is not None
        found.length_b += other is not None
        if one is None and other is None:
            return found
        if one is None or other is None or found.step is not None:
            continue
        causes = differences(one, other)
        if any(cause.kind in PARTING for cause in causes):
            found.step, found.causes, found.pair = max(one.step, other.step), causes, (one, other)
            continue
        found.common = one.step
        for cause in causes:
            if cause.kind not in noted:
                noted.add(cause.kind)
                found.notes.append(f"{cause.kind}, from step {one.step}: {cause.text}")


def differences(one: TrainStep, other: TrainStep) -> list[Cause]:
    """Everything in which two steps are not alike, the likeliest cause first."""
    records = _records(one, other)
    told = (
        ("hole", "" if one.step == other.step else f"step {one.step} / {other.step} comes next"),
        ("start", _roots(one.root_before, other.root_before)),
        ("records", records),
        ("configuration", _settings(one, other, inert=False)),
        ("seed", "" if one.seed == other.seed else f"{one.seed} / {other.seed}"),
        ("answers", "" if records else _answers(one, other)),
        ("provenance", _provenance(one, other)),
        ("weights", _roots(one.root_after, other.root_after)),
        ("settings", _settings(one, other, inert=True)),
    )
    return [Cause(kind, text) for kind, text in told if text]


def is_numerics(causes: list[Cause]) -> bool:
    """Whether the weights differ and all that goes into the step is the same, as far as the ledger tells."""
    return bool(causes) and {cause.kind for cause in causes} <= {"weights", "provenance", "settings"}


def content(one: Experience, other: Experience) -> str:
    """The first thing in which two records of the same group are not the same for training; empty when there
    is none. Names, times and workers make no difference."""
    heads = ("source", "env", "task_id", "group_size", "closed")
    for name in heads:
        if getattr(one, name) != getattr(other, name):
            return f"{name} {getattr(one, name)} / {getattr(other, name)}"
    if len(one.rollouts) != len(other.rollouts):
        return f"{len(one.rollouts)} / {len(other.rollouts)} rollouts"
    for mine, yours in zip(one.rollouts, other.rollouts, strict=True):
        if text := _rollout(mine, yours):
            return f"member {mine.member}: {text}"
    return ""


def _rollout(mine: Rollout, yours: Rollout) -> str:
    for name in ("member", "reward", "components", "quarantined", "whole"):
        if getattr(mine, name) != getattr(yours, name):
            return f"{name} {getattr(mine, name)} / {getattr(yours, name)}"
    if len(mine.steps) != len(yours.steps):
        return f"{len(mine.steps)} / {len(yours.steps)} turns"
    for turn, (a, b) in enumerate(zip(mine.steps, yours.steps, strict=True)):
        for name in TRAINED_FIELDS:
            if getattr(a, name) != getattr(b, name):
                return f"turn {turn}: other {name}"
    return ""


def number_of(consumed: Consumed, run: str) -> str:
    """The group's id without the name of its run: the same prompt in two runs of one seed."""
    return consumed.group_id.removeprefix(f"{run}-")


def _roots(mine: str, yours: str) -> str:
    return "" if mine == yours else f"root {mine[:16] or '-'} / {yours[:16] or '-'}"


def _records(one: TrainStep, other: TrainStep) -> str:
    """The first record of which the steps read another group. Where it lies makes no difference: logs may
    have other gaps."""
    for index, (mine, yours) in enumerate(zip(one.consumed, other.consumed, strict=False)):
        if number_of(mine, one.run) != number_of(yours, other.run):
            return f"record {index + 1} of {len(one.consumed)}: {_place(mine)} / {_place(yours)}"
    if len(one.consumed) != len(other.consumed):
        return f"{len(one.consumed)} / {len(other.consumed)} records, the same as far as both go"
    return ""


def _place(consumed: Consumed) -> str:
    return f"{consumed.group_id} ({at(consumed.topic, consumed.partition, consumed.offset)})"


def _answers(one: TrainStep, other: TrainStep) -> str:
    """The first group that the steps did not treat alike."""
    mine, yours = _fates(one), _fates(other)
    for consumed in one.consumed:
        number = number_of(consumed, one.run)
        if mine.get(number) != yours.get(number):
            return f"{consumed.group_id}: {mine.get(number, 'no answer')} / {yours.get(number, 'no answer')}"
    return ""


def _fates(step: TrainStep) -> dict[str, str]:
    prefix = f"{step.run}-"
    fates = {group_id.removeprefix(prefix): ["trained"] for group_id in step.admitted}
    for drop in step.drops:
        member = "" if drop.member is None else f" (member {drop.member})"
        fates.setdefault(drop.group_id.removeprefix(prefix), []).append(f"{drop.reason}{member}")
    return {number: ", ".join(sorted(said)) for number, said in fates.items()}


def _settings(one: TrainStep, other: TrainStep, *, inert: bool) -> str:
    if one.config == other.config:
        return ""
    mine, yours = flat(parsed(one.config)), flat(parsed(other.config))
    return ", ".join(
        f"{name} {_said(mine, name)} / {_said(yours, name)}"
        for name in sorted(mine.keys() | yours.keys())
        if name not in SETTINGS_ASIDE
        and (name in SETTINGS_INERT) is inert
        and _said(mine, name) != _said(yours, name)
    )


def _said(settings: dict[str, Any], name: str) -> str:
    return (str(settings[name]) or "''") if name in settings else "not there"


def _provenance(one: TrainStep, other: TrainStep) -> str:
    pairs: list[tuple[str, Any, Any]] = [
        ("code", one.code, other.code),
        ("threads", one.threads, other.threads),
        ("kernel probe", one.kernel_probe[:16], other.kernel_probe[:16]),
    ]
    for name in sorted(one.libraries.keys() | other.libraries.keys()):
        pairs.append((name, one.libraries.get(name), other.libraries.get(name)))
    return ", ".join(f"{name} {mine} / {yours}" for name, mine, yours in pairs if mine != yours)

"""Why a step computed again is not what its record says: which tensor is the first to differ, and which of
the known causes can be told apart.

A record's content hash is not in the ledger, but what was counted in it is: numbers that the records alone
decide (units, rewards, lengths, drops) can't change with the machine. Not here: the computation
(`consumers.replay`), the walk over a range (`consumers.verification`).
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import torch

from headrace.config import canonical_json
from headrace.consumers.replay import Replayed, Source
from headrace.consumers.versions import Versions
from headrace.errors import StoreError
from headrace.policy.checkpoint import to_bf16
from headrace.policy.model import Weights
from headrace.trainer.provenance import Provenance
from headrace.wire.records import TrainStep

Kind = Literal[
    "missing",  # records of the step have left the log
    "chain",  # the ledger contradicts itself or an announcement
    "configuration",  # its text is not what its hash says, or this code reads it otherwise
    "records",  # a record is not what it was
    "machine",  # the kernel probe: this machine computes otherwise
    "code",
    "library",
    "threads",
    "unknown",
]
FAULTS: Final = ("missing", "chain", "configuration", "records")
"""Of what was recorded; the others are of who computes it again."""
COUNTED: Final = ("units.", "reward.", "drops.", "withheld.", "tokens.", "length.", "lag.", "advantage.")
"""Metrics that the records decide, whatever computes them."""
SHORT: Final = 12
"""Digits of a hash that a person compares."""


@dataclass(frozen=True, slots=True)
class Cause:
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class TensorsDiffer:
    """`first` in the order of the names; `largest`: of the absolute differences, over all tensors."""

    first: str
    elements: int
    """Of `first`, that differ."""
    elements_of: int
    largest: float
    tensors: int
    tensors_of: int

    def __str__(self) -> str:
        return (
            f"{self.first}: {self.elements} of {self.elements_of} elements; {self.tensors} of"
            f" {self.tensors_of} tensors, largest difference {self.largest:.3g}"
        )


async def recorded_weights(source: Source, version: int) -> Weights:
    """What was published as `version`, bf16. Raises StoreError when no snapshot and deltas lead to it."""
    versions = Versions(source.blobs, versions_max=version + 1)
    for number, record in source.ledger.published.items():
        if number <= version:
            versions.announce(record)
    if versions.newest is None or versions.newest.version != version:
        raise StoreError(f"weights {version}: expected an announcement in the log, found none")
    return (await versions.obtain()).weights


def compare(recorded: Weights, computed: Weights) -> TensorsDiffer | None:
    """None for equal bits; both are compared in bf16, as integers (+0 is not -0)."""
    ours = to_bf16(computed)
    differ = {name: _bits(recorded[name]) != _bits(ours[name]) for name in sorted(recorded)}
    names = [name for name, where in differ.items() if where.any()]
    if not names:
        return None
    first = names[0]
    return TensorsDiffer(
        first=first,
        elements=int(differ[first].sum()),
        elements_of=differ[first].numel(),
        largest=max(float((recorded[n].float() - ours[n].float()).abs().max()) for n in names),
        tensors=len(names),
        tensors_of=len(recorded),
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def why(source: Source, done: Replayed, now: Provenance) -> tuple[Cause, ...]:
    """The likely causes for `done` not being equal, the likeliest first."""
    found = [*_of_the_ledger(source, done), *_of_the_configuration(done), *_of_the_records(done)]
    if not found:
        found = [*_of_settings_unread(done), *elsewhere([done.recorded], now)]
    if not found:
        found = _of_the_forward_pass(done)
    return tuple(found)


def elsewhere(steps: Iterable[TrainStep], now: Provenance) -> list[Cause]:
    """What is not here as it was when `steps` were computed, the likeliest to change their bits first."""
    found: dict[Cause, None] = {}
    for step in steps:
        if step.kernel_probe != now.kernel_probe:
            pair = _pair("kernel probe", step.kernel_probe[:SHORT], now.kernel_probe[:SHORT])
            found[Cause("machine", pair)] = None
        for name in sorted(step.libraries.keys() | now.libraries.keys()):
            then, here = step.libraries.get(name, "none"), now.libraries.get(name, "none")
            if then != here:
                kind: Kind = "machine" if name == "cpu" else "library"
                found[Cause(kind, _pair(name if name == "cpu" else f"library {name}", then, here))] = None
        if step.code != now.code:
            found[Cause("code", _pair("code", step.code, now.code))] = None
        if step.threads != now.threads:
            found[Cause("threads", _pair("threads", str(step.threads), str(now.threads)))] = None
    order = ("machine", "library", "code", "threads")
    return sorted(found, key=lambda cause: order.index(cause.kind))


def probe_differs(steps: Iterable[TrainStep], now: Provenance) -> bool:
    """Whether this machine computes otherwise than the one that computed any of `steps`."""
    return any(step.kernel_probe != now.kernel_probe for step in steps)


def _of_the_ledger(source: Source, done: Replayed) -> list[Cause]:
    step = done.recorded
    found = []
    if done.before.root != step.root_before:
        found.append(
            Cause(
                "chain",
                f"the step began with root {step.root_before[:SHORT]}, the step before left"
                f" {done.before.root[:SHORT]}",
            )
        )
    announced = source.ledger.published.get(step.version_to)
    if announced is not None and announced.root != step.root_after:
        found.append(
            Cause(
                "chain",
                f"the ledger says root {step.root_after[:SHORT]}, the announcement of version"
                f" {step.version_to} {announced.root[:SHORT]}",
            )
        )
    for key, position in step.positions.items():
        read = [c.offset for c in step.consumed if f"{c.topic}/{c.partition}" == key]
        if read and max(read) >= position:
            found.append(Cause("chain", f"it read {key}@{max(read)} and ended before @{position}"))
    return found


def _of_the_configuration(done: Replayed) -> list[Cause]:
    step = done.recorded
    sha256 = hashlib.sha256(step.config.encode()).hexdigest()
    if sha256 != step.config_sha256:
        pair = f"its text has SHA-256 {sha256[:SHORT]}, the ledger says {step.config_sha256[:SHORT]}"
        return [Cause("configuration", f"the settings in the ledger were altered: {pair}")]
    return []


def _of_the_records(done: Replayed) -> list[Cause]:
    """What the records alone decide, and is not as it was."""
    step = done.recorded
    found = []
    for consumed, entry in zip(step.consumed, done.entries, strict=False):
        if consumed.env and consumed != entry.consumed:
            found.append(f"{entry.place}: group {consumed.group_id} is not what the ledger counted")
    others = sorted(set(step.admitted) ^ set(done.admitted))
    if others:
        found.append(f"admitted then or now, not both: {_listed(others)}")
    drops = sorted({drop.group_id for drop in set(step.drops) ^ set(done.result.admission.drops)})
    if drops and not others:
        found.append(f"dropped otherwise: {_listed(drops)}")
    counted = {name: pair for name, pair in done.metrics_that_differ().items() if name.startswith(COUNTED)}
    if counted:
        found.append(_numbers(counted))
    return [Cause("records", f"altered records: {text}") for text in found]


def _of_the_forward_pass(done: Replayed) -> list[Cause]:
    """Same code, libraries and probe, and the records count as they did: which number differs says what may
    have been altered."""
    differ = done.metrics_that_differ()
    if not differ:
        text = (
            "nothing that is recorded differs: an influence that the ledger does not know, or faulty memory"
        )
        return [Cause("unknown", text)]
    if "entropy.mean" in differ:
        what = "tokens or routes"
    elif any(name.startswith("mismatch.") for name in differ):
        what = "recorded log-probabilities or versions"
    else:
        what = "rewards or masks"
    return [Cause("records", f"altered records ({what}): {_numbers(differ)}")]


def _of_settings_unread(done: Replayed) -> list[Cause]:
    """Settings in the ledger that this code does not know."""
    then, here = (
        _leaves(msgspec.json.decode(text)) for text in (done.recorded.config, canonical_json(done.settings))
    )
    unknown = sorted(then.keys() - here.keys())
    if not unknown:
        return []
    return [Cause("code", f"settings of the ledger that this code does not know: {_listed(unknown)}")]


def _leaves(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _pair(name: str, then: str, here: str) -> str:
    return f"{name}: {then} then, {here} now"


def _numbers(differ: Mapping[str, tuple[float, float]]) -> str:
    shown = [f"{name} {then:.6g} then, {now:.6g} now" for name, (then, now) in list(differ.items())[:3]]
    return "; ".join(shown) + (f"; {len(differ) - 3} more" if len(differ) > 3 else "")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

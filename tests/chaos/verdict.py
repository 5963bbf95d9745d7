"""What the log and the store of a run must hold, however it was hurt: sentences about what is wrong, or none.

The log's promises are read off by `checker`, which shares no code with those who wrote it. Added here: every
announced version rebuilt from its blobs and hashed by our own hand, and every step computed again from the
seed by the product's replay, to the announced roots.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors

from checker import Log, audit, committed_wrongly, in_flight, read_log
from headrace.bus.protocol import Bus
from headrace.consumers import replay
from headrace.consumers.ledger import read_ledger
from headrace.errors import PolicyError
from headrace.kernels import delta, invariant
from headrace.policy.checkpoint import load_seed
from headrace.store.blobs import Blobs
from headrace.wire.codec import decode
from headrace.wire.records import Encoding, TrainStep, WeightsPublished

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one run that stands still."""

    wrong: list[str]
    issued: int
    """Prompts, as all units below."""
    steps: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    in_flight: dict[str, int]
    """By where they are."""


async def of_log(bus: Bus, run: str) -> Verdict:
    """What the log alone tells."""
    log = await read_log(bus)
    workers = await bus.committed(f"rollouts-{run}-local", ["prompts"])
    trainer = await bus.committed(f"trainer-{run}", ["experience"])
    flying, lost = in_flight(log, run, workers)
    steps = steps_of(log, run)
    return Verdict(
        wrong=[*audit(log, run), *lost, *committed_wrongly(log, run, trainer)],
        issued=len(log["prompts"]),
        steps=len(steps),
        trained=sum(len(step.admitted) for step in steps),
        dropped=dict(Counter(drop.reason for step in steps for drop in step.drops if drop.member is None)),
        in_flight=dict(Counter(flying.values())),
    )


async def of_end(bus: Bus, run: str, store: Path) -> Verdict:
    """What log, blobs and the replay of every step tell of a run that has come to its end."""
    verdict = await of_log(bus, run)
    log = await read_log(bus)
    rebuilt, wrong = await asyncio.to_thread(rebuild, announcements_of(log, run), store)
    replayed = await replay_all(bus, run, store)
    wrong += roots_that_differ(steps_of(log, run), rebuilt, replayed)
    wrong += [
        f"{count} prompts are {place}, and the run is over" for place, count in verdict.in_flight.items()
    ]
    verdict.wrong.extend(wrong)
    return verdict


def roots_that_differ(
    steps: Sequence[TrainStep], rebuilt: Mapping[int, str], replayed: Mapping[int, str]
) -> list[str]:
    """The ledger's roots against those of the blobs (by version) and of the replay (by step)."""
    wrong = []
    for step in steps:
        if rebuilt.get(step.version_to, step.root_after) != step.root_after:
            wrong.append(f"version {step.version_to}: its blobs make {rebuilt[step.version_to]}")
        if replayed.get(step.step) != step.root_after:
            wrong.append(f"step {step.step}: computed again: {replayed.get(step.step, 'not at all')}")
    return wrong


def rebuild(announced: Iterable[WeightsPublished], store: Path) -> tuple[dict[int, str], list[str]]:
    """Version -> root of what its blobs make, by our own hash, and what is wrong with the blobs. A version
    with a full snapshot and a delta has to be the same by both."""
    roots: dict[int, str] = {}
    wrong: list[str] = []
    held: Tensors | None = None
    for version in announced:
        found: dict[str, Tensors] = {}
        for encoding in version.encodings:
            where = f"version {version.version}: {encoding.kind}"
            try:
                found[encoding.kind] = _decoded(encoding, _blob(store, encoding.uri, encoding.sha256), held)
            except (OSError, ValueError, PolicyError) as error:
                wrong.append(f"{where}: {error}")
        if not found:
            return roots, wrong
        made = {kind: root_of(tensors) for kind, tensors in found.items()}
        if len(set(made.values())) > 1:
            wrong.append(f"version {version.version}: the snapshot is another than the delta makes")
        held = found.get("full", found.get("delta"))
        roots[version.version] = made.get("full", made.get("delta", ""))
        if roots[version.version] != version.root:
            wrong.append(f"version {version.version}: announced as {version.root}, its blobs make {made}")
    return roots, wrong


def root_of(tensors: Tensors) -> str:
    """The root as `policy.checkpoint` defines it: SHA-256 over name, shape and SHA-256 of the bf16 bytes of
    each tensor, in the order of the names."""
    lines = [b"headrace-weights-1\n"]
    for name, tensor in sorted(tensors.items()):
        assert tensor.dtype == torch.bfloat16, name
        digest = hashlib.sha256(tensor.contiguous().view(torch.int16).numpy().astype("<i2").tobytes())
        lines.append(f"{name}\n{'x'.join(map(str, tensor.shape))}\n{digest.hexdigest()}\n".encode())
    return hashlib.sha256(b"".join(lines)).hexdigest()


async def replay_all(bus: Bus, run: str, store: Path) -> dict[int, str]:
    """Step -> root of all steps computed again, from the seed on and without any checkpoint; a step that
    differs in anything else than its root has that said instead."""
    with ThreadPoolExecutor(1, "replay", _prepare) as executor:

        async def compute(call: Callable[[], Any]) -> Any:
            return await asyncio.get_running_loop().run_in_executor(executor, call)

        model, weights, _ = await compute(load_seed)
        source = replay.Source(
            bus=bus,
            blobs=Blobs.open(store.as_uri()),
            ledger=await read_ledger(bus, run),
            run_name=run,
            group=f"trainer-{run}",
            seed=(model, weights),
            compute=compute,
        )
        roots = {}
        async for done in replay.replay(source, await source.first(), source.ledger.version):
            root = done.result.state.root
            same = done.equal or root != done.recorded.root_after
            roots[done.recorded.step] = root if same else f"{root}, but not its units or figures"
        return roots


def steps_of(log: Log, run: str) -> list[TrainStep]:
    records = (decode(d.topic, d.value or b"", d.headers) for d in log["train.steps"])
    return [record for record in records if isinstance(record, TrainStep) and record.run == run]


def announcements_of(log: Log, run: str) -> list[WeightsPublished]:
    records = (decode(d.topic, d.value or b"", d.headers) for d in log["weights"])
    return [record for record in records if isinstance(record, WeightsPublished) and record.run == run]


def _blob(store: Path, uri: str, sha256: str) -> bytes:
    data = (store / uri).read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{uri} is not what its hash says")
    return data


def _decoded(encoding: Encoding, data: bytes, held: Tensors | None) -> Tensors:
    if encoding.kind == "full":
        tensors: Tensors = load_tensors(data)
        return tensors
    if held is None:
        raise ValueError("a delta to nothing")
    return delta.apply(held, data, root_of)


def _prepare() -> None:
    torch.set_num_threads(1)
    invariant.warm_up()

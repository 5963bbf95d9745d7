"""The verdict notices what it is for, and a seed always draws the same faults."""

import hashlib
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch

from chaos import faults, verdict
from chaos.verdict import Tensors
from headrace.kernels import delta
from headrace.policy.checkpoint import to_bytes, weights_root
from headrace.wire import records as r

VERSIONS = 3
FULL_EVERY = 2


def weights(version: int) -> Tensors:
    """Two small tensors; each version moves one element."""
    first = torch.zeros(2, 3, dtype=torch.bfloat16)
    first.view(-1)[:version] = 1.0
    return {"a": first, "b": torch.ones(4, dtype=torch.bfloat16)}


def put(store: Path, data: bytes) -> tuple[str, str, int]:
    sha256 = hashlib.sha256(data).hexdigest()
    (store / sha256).write_bytes(data)
    return sha256, sha256, len(data)


def announced(store: Path) -> list[r.WeightsPublished]:
    """Versions 0 to VERSIONS, with their blobs in `store`."""
    found = []
    for version in range(VERSIONS + 1):
        new = weights(version)
        blobs = {}
        if version % FULL_EVERY == 0:
            blobs["full"] = to_bytes(new)
        if version:
            blobs["delta"] = delta.encode(weights(version - 1), new, weights_root)
        encodings = []
        for kind, data in blobs.items():
            uri, sha256, size = put(store, data)
            encodings.append(
                msgspec.convert({"kind": kind, "uri": uri, "sha256": sha256, "bytes": size}, r.Encoding)
            )
        found.append(
            r.WeightsPublished(
                run="run",
                version=version,
                root=weights_root(new),
                step=version,
                manifest_uri="",
                manifest_sha256="",
                encodings=tuple(encodings),
                published_ms=0,
            )
        )
    return found


def step(number: int) -> r.TrainStep:
    return r.TrainStep(
        run="run",
        step=number,
        version_from=number - 1,
        version_to=number,
        consumed=(),
        positions={},
        admitted=(),
        drops=(),
        config="",
        config_sha256="",
        seed=0,
        code="",
        libraries={},
        threads=1,
        kernel_probe="",
        metrics={},
        root_before=weights_root(weights(number - 1)),
        root_after=weights_root(weights(number)),
        started_ms=0,
        ended_ms=0,
    )


ROOTS = {version: weights_root(weights(version)) for version in range(VERSIONS + 1)}
STEPS = [step(number) for number in range(1, VERSIONS + 1)]


def test_sound_blobs_make_the_announced_roots(tmp_path: Path) -> None:
    """By our own hash, from snapshots and from deltas alike; ledger and replay agree."""
    rebuilt, wrong = verdict.rebuild(announced(tmp_path), tmp_path)
    assert (rebuilt, wrong) == (ROOTS, [])
    assert verdict.roots_that_differ(STEPS, rebuilt, ROOTS) == []


def test_wrong_weights_behind_an_announced_root(tmp_path: Path) -> None:
    """A sound blob of other weights, announced under the root of the right ones."""
    found = announced(tmp_path)
    uri, sha256, size = put(tmp_path, to_bytes(weights(5)))
    other = r.Encoding(kind="full", uri=uri, sha256=sha256, bytes=size)
    found[2] = msgspec.structs.replace(found[2], encodings=(other,))
    _, wrong = verdict.rebuild(found[:3], tmp_path)
    made = {"full": weights_root(weights(5))}
    assert wrong == [f"version 2: announced as {ROOTS[2]}, its blobs make {made}"]


def test_a_snapshot_and_a_delta_that_part(tmp_path: Path) -> None:
    """A version that is one thing by its snapshot and another by its delta."""
    found = announced(tmp_path)
    uri, sha256, size = put(tmp_path, to_bytes(weights(5)))
    other = r.Encoding(kind="full", uri=uri, sha256=sha256, bytes=size)
    found[2] = msgspec.structs.replace(found[2], encodings=(other, found[2].encodings[1]))
    _, wrong = verdict.rebuild(found[:3], tmp_path)
    assert wrong[0] == "version 2: the snapshot is another than the delta makes"


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("hurt", [flipped, Path.unlink])
def test_a_blob_that_is_hurt_or_gone(tmp_path: Path, hurt: Callable[[Path], None]) -> None:
    """Is named with its version; what follows can't be rebuilt."""
    found = announced(tmp_path)
    hurt(tmp_path / found[1].encodings[0].uri)
    rebuilt, wrong = verdict.rebuild(found, tmp_path)
    assert rebuilt == {0: ROOTS[0]}
    assert len(wrong) == 1 and wrong[0].startswith("version 1: delta: ")


def test_a_replay_that_differs(tmp_path: Path) -> None:
    """A step that comes out otherwise, and one that was not computed again at all."""
    assert verdict.roots_that_differ(STEPS, ROOTS, ROOTS | {2: "other"}) == ["step 2: computed again: other"]
    missing = {number: root for number, root in ROOTS.items() if number != 3}
    assert verdict.roots_that_differ(STEPS, ROOTS, missing) == ["step 3: computed again: not at all"]


def test_a_ledger_that_differs_from_the_blobs() -> None:
    """The ledger's root is not that of the weights that are out there."""
    assert verdict.roots_that_differ(STEPS, ROOTS | {1: "other"}, ROOTS) == [
        "version 1: its blobs make other"
    ]


def test_the_seed_alone_decides() -> None:
    """Equal seeds draw equal faults, others others; on the embedded log none is the broker's."""
    drawn = [list(islice(faults.draw(seed, broker=True, delay_s=2.0), 200)) for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(faults.DELAY_S_MIN <= fault.delay_s <= 7 for fault in drawn[0])
    without = islice(faults.draw(7, broker=False, delay_s=2.0), 200)
    assert faults.BROKER not in {fault.target for fault in without}


def test_every_kind_of_fault_is_drawn() -> None:
    """Each process and the broker is killed and paused; only the broker is asked to stop."""
    kinds = Counter((f.target, f.kind) for f in islice(faults.draw(1, broker=True, delay_s=2.0), 1000))
    targets = [*faults.PROCESSES, faults.BROKER]
    assert all(kinds[target, "kill"] and kinds[target, "pause"] for target in targets)
    assert {target for target, kind in kinds if kind == "stop"} == {faults.BROKER}

"""Processes that stand still at a named place (`headrace.failpoints`), so that the log can be looked at just
there, and are killed then.

Each place is met once in one run: the trainer meets them one after the other, an incarnation each. Not here:
what must be seen (`chaos.named_contract`).
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaos.play import ChaosRun

MET_S = 300.0
"""All places are met within."""
MANIFEST_BYTES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Frozen:
    """A process that stood still at `place`."""

    place: str
    pid: int
    step: int
    """The newest in the ledger at that time."""
    issued: int
    """Prompts on the log."""
    blobs: frozenset[str]
    """URIs of all that lay in the store."""
    versions: frozenset[int]
    """Those whose manifests lay there."""


def told(places: Mapping[str, int], markers: Path) -> str:
    """`HEADRACE_FAILPOINT` for the nth time at each of `places`."""
    return ",".join(
        f"{place}@{nth}=SIGSTOP:{markers / str(index)}" for index, (place, nth) in enumerate(places.items())
    )


async def meet(run: ChaosRun, places: Iterable[str], markers: Path) -> list[Frozen]:
    """Waits for each of `places` to be met, looks, and sends SIGKILL; in the order of meeting. Raises
    TimeoutError that names those that were not."""
    waited = {place: markers / str(index) for index, place in enumerate(places)}
    found: list[Frozen] = []
    try:
        async with asyncio.timeout(MET_S):
            while waited:
                for place, marker in list(waited.items()):
                    if pid := _pid(marker):
                        await run.look()
                        found.append(await asyncio.to_thread(_look, place, pid, run))
                        del waited[place]
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise TimeoutError(f"never met: {', '.join(waited)}\n{run.told()}") from error
    return found


def _pid(marker: Path) -> int:
    return int(marker.read_text() or 0) if marker.exists() else 0


def _look(place: str, pid: int, run: ChaosRun) -> Frozen:
    store = run.run_dir / "store"
    found: dict[Path, bytes] = {}  # nothing of those that are too long for a manifest
    for path in store.rglob("*"):
        with suppress(FileNotFoundError):  # a blob is written under another name first, by those who go on
            if path.is_file():
                found[path] = path.read_bytes() if path.stat().st_size < MANIFEST_BYTES_MAX else b""
    return Frozen(
        place,
        pid,
        run.watch.step,
        len(run.watch.issued),
        frozenset(str(path.relative_to(store)) for path in found),
        frozenset(json.loads(data)["version"] for data in found.values() if data.startswith(b'{"run"')),
    )

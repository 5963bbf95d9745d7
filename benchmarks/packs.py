"""Bytes of a ledger record and of a pack, by what is in it.

On a recorded run: `python -m benchmarks.packs RUN_DIR`. The packs hold the newest step and the newest ten.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.page import header, table
from headrace.bus import open_bus
from headrace.bus.protocol import Bus
from headrace.cli import settings as tree
from headrace.consumers.ledger import read_ledger
from headrace.consumers.pack import export
from headrace.consumers.pack_reader import PackReader
from headrace.consumers.replay import Source
from headrace.policy.checkpoint import load_seed
from headrace.store.blobs import Blobs
from headrace.trainer import provenance
from headrace.wire.topics import TRAIN_STEPS

STEPS = 10
WHAT = {
    "state": "state before",
    "record": "consumed records",
    "blob": "deltas and claims",
    "ledger": "ledger",
    "weights": "announcements",
    "manifest": "manifest",
}


def main() -> None:
    print(header("Packs and ledger records: bytes", "torch", "zstandard"))
    asyncio.run(_measured(Path(sys.argv[1])))


async def _measured(run_dir: Path) -> None:
    settings = tree.load(run_dir)
    async with open_bus(settings.bus.address) as bus:
        name = settings.run.name
        ledger = await read_ledger(bus, name)
        model, weights, _ = load_seed()
        blobs = Blobs.open(settings.store.uri)
        source = Source(bus, blobs, ledger, name, f"trainer-{name}", (model, weights))
        sizes = await ledger_bytes(bus, name)
        groups = sum(len(step.consumed) for step in ledger.steps) / len(ledger.steps)
        print(
            f"A run of {len(ledger.steps)} steps, {groups:.0f} groups of {settings.run.group_size} in each.\n"
        )
        print(
            table(
                ["ledger records", "mean bytes", "largest", "bytes / group"],
                [
                    [
                        len(sizes),
                        round(sum(sizes) / len(sizes)),
                        max(sizes),
                        round(sum(sizes) / len(sizes) / groups),
                    ]
                ],
            )
        )
        rows = []
        last = ledger.version
        with tempfile.TemporaryDirectory() as folder:
            for first in (last, max(1, last - STEPS + 1)):
                path = Path(folder) / f"{first}.hrpack"
                done = await export(source, first, last, path, now=provenance.collect())
                rows.append([last - first + 1, done.records, done.bytes, *by_kind(path).values()])
    print(table(["steps", "records", "bytes", *WHAT.values()], rows))


async def ledger_bytes(bus: Bus, run_name: str) -> list[int]:
    """Of each ledger record of the run: key, headers and value, as sent."""
    begins, ends = await bus.begins([TRAIN_STEPS.name]), await bus.ends([TRAIN_STEPS.name])
    return [
        len(d.key or b"") + len(d.value or b"") + sum(len(name) + len(value) for name, value in d.headers)
        for tp, end in ends.items()
        async for d in bus.read_range(tp, begins[tp], end)
        if d.key == run_name.encode()
    ]


def by_kind(path: Path) -> Counter[str]:
    """Stored bytes of a pack's parts, by the first word of their names, in the order of `WHAT`."""
    found: Counter[str] = Counter(dict.fromkeys(WHAT, 0))
    with PackReader(path) as pack:
        for name in pack.names:
            found[name.partition("/")[0]] += pack.stored(name)
    return found


if __name__ == "__main__":
    main()

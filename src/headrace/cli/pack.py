"""`headrace replay export STEP -o step.hrpack` and `headrace replay step.hrpack`: steps for somebody without
the log.

A pack needs no run, bus or store: any directory will do. Not here: what is in one (`consumers.pack`), the
replay itself (`replay`).
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.cli import options, replay_rows, shown
from headrace.cli.ground import Ground, computing
from headrace.cli.replay_words import SUFFIX
from headrace.cli.without import refuse_existing


@asynccontextmanager
async def ground_of(path: Path, *, threads: int | None = None) -> AsyncIterator[Ground]:
    """The steps of a pack, computed with `threads` (as its newest step was if None). Raises ConfigError (no
    such file), StoreError (not a pack, changed, or contradicting itself)."""
    from headrace.consumers.pack_reader import PackReader
    from headrace.consumers.pack_source import PackedSource

    with PackReader(path) as pack:
        newest = PackedSource.threads(pack)
        async with computing(threads or newest) as (compute, now, cancelled):
            yield Ground(await PackedSource.open(pack, compute), now, cancelled, [])


async def export(found: Ground, first: int, last: int, args: argparse.Namespace) -> int:
    """Writes steps `first` to `last` as a pack; 0. Raises ConfigError, StoreError, TrainingError."""
    from headrace.consumers import pack

    span = str(first) if first == last else f"{first}-{last}"
    path = args.output or Path(f"{found.source.run_name}-{span}{SUFFIX}")
    refuse_existing(path, args.force)
    with replay_rows.progress(last - first + 1, quiet=args.json) as advance:
        done = await pack.export(
            found.source,
            first,
            last,
            path,
            now=found.now,
            force=args.force,
            cancelled=found.cancelled,
            written=lambda _: advance("export"),
        )
    if args.json:
        options.print_json(
            {
                "run": found.source.run_name,
                "first": first,
                "last": last,
                "output": str(path),
                "bytes": done.bytes,
                "records": done.records,
                "without_delta": done.without_delta,
            }
        )
        return 0
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    print(f"{path}: {steps} of run {found.source.run_name}: {done.records} records, {shown.size(done.bytes)}")
    if done.without_delta:
        count = len(done.without_delta)
        print(f"the store no longer has the weights of {count} of them: of those, no tensor could be named")
    print(f"anywhere: headrace replay {path.name}")
    return 0

"""`headrace sweep`: the blob store without what nobody names. Safe beside a living run."""

import argparse

from headrace.bus.protocol import Bus
from headrace.cli import options, shown
from headrace.cli.options import Place
from headrace.cli.processes import blobs

DETAIL = """Removed is what no record of the log names and was written longer ago than store.grace_ms: what a
crash between an upload and its transaction leaves behind. Refused on a store that another log uses, or that
was in use before this log was; --adopt says that this log has it alone now."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument(
        "--adopt", action="store_true", help="note that no other log uses this store, whatever it says"
    )
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return options.with_bus(lambda bus, where: _sweep(bus, where, args), options.place(args))


async def _sweep(bus: Bus, where: Place, args: argparse.Namespace) -> int:
    from headrace.consumers import sweep
    from headrace.consumers.names import Names

    store = blobs(where)
    if args.adopt:
        await sweep.adopt(bus, store)
    grace_ms = where.settings.store.grace_ms
    swept = await sweep.sweep(bus, store, Names(bus), grace_ms=grace_ms, dry=args.dry_run)
    if args.json:
        options.print_json(
            {
                "store": store.address,
                "dry_run": args.dry_run,
                "grace_ms": grace_ms,
                "stored": swept.stored,
                "stored_bytes": swept.stored_bytes,
                "named": swept.named,
                "missing": list(swept.missing),
                "young": swept.young,
                "removed": [blob.uri for blob in swept.removed],
                "removed_bytes": swept.removed_bytes,
                "unfinished": swept.unfinished,
            }
        )
        return 0
    would = "would be removed" if args.dry_run else "removed"
    print(f"store {store.address}")
    print(f"  {swept.stored:,} blobs, {shown.size(swept.stored_bytes)}: {swept.named:,} named by the log")
    print(f"  {swept.young:,} named by nobody yet, younger than {shown.duration(grace_ms)}: kept")
    print(f"  {len(swept.removed):,} named by nobody, {shown.size(swept.removed_bytes)}: {would}")
    for blob in swept.removed:
        print(f"    {blob.uri}  {shown.size(blob.bytes)}")
    if swept.unfinished:
        print(f"  {swept.unfinished:,} files of writers that were killed: {would}")
    if swept.missing:
        print(f"  {len(swept.missing):,} named by the log and not there (checkpoints from before pruning was")
        print("  recorded, or damage):")
        for uri in swept.missing[:10]:
            print(f"    {uri}")
    return 0

"""`headrace tasks list|show|build|verify`: the task set that prompts are drawn from.

Here only the asking and the printing; the set and its index belong to `headrace.envs`.
"""

import argparse
from collections import Counter
from typing import Any

from headrace.cli import options, shown
from headrace.errors import ConfigError


def arguments(parser: argparse.ArgumentParser) -> None:
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    listing = acts.add_parser("list", help="tasks by package and kind of hole; with --package, every task")
    listing.add_argument("--package", help="list every task of this package")
    showing = acts.add_parser("show", help="one task as the model sees it, and the fill that was taken out")
    showing.add_argument("task", metavar="TASK")
    for act in (listing, showing):
        act.add_argument("--split", choices=["train", "heldout"], help="one split only")
        act.add_argument("--kind", action="append", help="only this kind of hole; repeatable")
    building = acts.add_parser("build", help="make the index again from the installed packages (minutes)")
    verifying = acts.add_parser("verify", help="check that the installed packages are what the index says")
    for act in (building, verifying):
        act.add_argument("--out", default="", metavar="FILE", help="another index than the shipped one")
    for act in (listing, showing, building, verifying):
        act.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    if args.act == "show":
        return _show(args)
    if args.act == "list":
        return _list(args)
    return _build_or_verify(args)


def _list(args: argparse.Namespace) -> int:
    counts: Counter[tuple[str, str, str]] = Counter()
    tasks = _tasks(args)
    packages = {task.distribution for task in tasks}
    if args.package and args.package not in packages:
        raise ConfigError(shown.unknown("package", args.package, packages))
    for task in tasks:
        counts[task.split, task.distribution, task.kind] += 1
        if args.package == task.distribution:
            if args.json:
                options.print_json({name: getattr(task, name) for name in ("task_id", "split", "kind")})
            else:
                print(f"{task.task_id}  {task.split}  {task.kind}")
    if args.package:
        return 0
    if args.json:
        for (split, package, kind), count in sorted(counts.items()):
            options.print_json({"split": split, "package": package, "kind": kind, "tasks": count})
        return 0
    from rich.console import Console
    from rich.table import Table

    kinds = sorted({kind for _, _, kind in counts})
    drawn = Table(box=None, pad_edge=False)
    for column in ("split", "package"):
        drawn.add_column(column)
    for column in (*kinds, "all"):
        drawn.add_column(column, justify="right")
    for split, package in sorted({(split, package) for split, package, _ in counts}):
        row = [counts[split, package, kind] for kind in kinds]
        drawn.add_row(split, package, *map(str, row), str(sum(row)))
    for split in sorted({split for split, _, _ in counts}):
        row = [sum(n for (s, _, k), n in counts.items() if (s, k) == (split, kind)) for kind in kinds]
        drawn.add_row(split, "together", *map(str, row), str(sum(row)), style="bold")
    Console().print(drawn)
    return 0


def _show(args: argparse.Namespace) -> int:
    from headrace.policy.source import restore

    known = {task.task_id: task for task in _tasks(args)}
    if args.task not in known:
        raise ConfigError(shown.unknown("task", args.task, known))
    task = known[args.task]
    hidden = [check.hidden for check in task.checks]
    if args.json:
        options.print_json(
            {
                "task_id": task.task_id,
                "split": task.split,
                "kind": task.kind,
                "prefix": task.prefix,
                "suffix": task.suffix,
                "fill": task.fill,
                "examples_visible": hidden.count(False),
                "examples_hidden": hidden.count(True),
            }
        )
        return 0
    print(
        f"{task.task_id}: {task.kind} in {task.module}.{task.function} ({task.distribution}, {task.split})\n"
    )
    print(restore(f"{task.prefix} ____{task.suffix}"))
    print(f"fill: {task.fill.strip()}")
    print(f"examples: {hidden.count(False)} visible, {hidden.count(True)} hidden")
    return 0


def _tasks(args: argparse.Namespace) -> list[Any]:
    from headrace.envs.tasks import SIGNAL_KINDS, Split, TaskSet

    splits: list[Split] = [args.split] if args.split else ["train", "heldout"]
    return [task for split in splits for task in TaskSet.load(split, args.kind or SIGNAL_KINDS)]


def _build_or_verify(args: argparse.Namespace) -> int:
    import asyncio

    import msgspec

    from headrace.envs import build

    def progress(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    config = build.BuildConfig(out=args.out)
    act = build.build if args.act == "build" else build.verify
    report = asyncio.run(act(config, progress))
    if args.json:
        options.print_json(msgspec.to_builtins(report))
    else:
        for split, kinds in report.tasks.items():
            held = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
            print(
                f"{split}: {sum(kinds.values())} tasks ({held}) in {report.functions.get(split, 0)} functions"
            )
        print(f"originals that pass: {report.originals_passed} of {report.originals}")
    return 0 if report.originals_passed == report.originals else 1

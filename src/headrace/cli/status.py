"""`headrace status`: a run's numbers now, on one page."""

import argparse
import contextlib
import time
from typing import Any

import msgspec

from headrace.bus.protocol import Bus
from headrace.cli import options, shown
from headrace.cli.options import Place
from headrace.cli.process import living
from headrace.cli.run_view import IDLE, LAG, LAG_MAX, REWARD, TOKENS, Follower, RunView
from headrace.consumers.retention import Outlook, outlook
from headrace.errors import WireError
from headrace.streams import canary
from headrace.wire.codec import decode
from headrace.wire.records import TrainStep
from headrace.wire.topics import TRAIN_STEPS


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return options.with_bus(lambda bus, where: _status(bus, where, args.json), options.place(args))


async def _status(bus: Bus, where: Place, as_json: bool) -> int:
    view = await Follower(bus, where.settings.run.name).refresh()
    now_ms = int(time.time() * 1000)
    found = await _outlook(bus, view.run, now_ms) if view.steps else None
    document = summary(view)
    document["records"] = retention_document(found) if found is not None else None
    settings = where.settings
    gradual = settings.release.mode == "gradual"
    stuck = await canary.found_stuck(bus, view.run, settings.canary) if gradual else None
    document["release_stuck"] = None if stuck is None else msgspec.to_builtins(stuck)
    document["processes"] = living(where.run_dir) if where.run_dir is not None else None
    if as_json:
        options.print_json(document)
        return 0
    print(f"run {view.run} on {settings.bus.address}")
    for name, text in lines(view, now_ms):
        print(f"  {name:<22}{text}")
    if found is not None:
        print(f"  {'records needed':<22}{retention_text(found)}")
    if stuck is not None:
        print(f"  {'release':<22}WARNING: {stuck} (headrace weights list)")
    alive = document["processes"]
    if alive is not None:
        named = ", ".join(f"{name} ({pid})" for name, pid in alive.items())
        print(f"  {'processes here':<22}{named or 'none'}")
    return 0


def summary(view: RunView) -> dict[str, Any]:
    """The view as plain values, for `--json`."""
    return {
        "run": view.run,
        "step": view.step,
        "version": view.version,
        "prompts": view.prompts,
        "consumed": view.consumed,
        "live_consumed": view.live_consumed,
        "live_trained": view.live_trained,
        "trained": view.trained,
        "in_flight": view.in_flight,
        "drops": dict(view.drops),
        "withheld": dict(view.withheld),
        "metrics": view.steps[-1].metrics if view.steps else {},
        "replicas": {name: ack.version for name, ack in sorted(view.replicas.items())},
        "held_out": [
            {"round": name, "mode": mode, "version": version, "passed": tally.passed, "tried": tally.tried}
            for (name, mode, version), tally in sorted(view.rounds.items())
        ],
        "dead_letters": view.dead,
        "undecodable": view.undecodable,
    }


def lines(view: RunView, now_ms: int) -> list[tuple[str, str]]:
    """(name, text) pairs: the run's numbers as a person reads them."""
    since = f", {shown.duration(now_ms - view.steps[-1].ended_ms)} ago" if view.steps else ""
    rows = [
        ("step", f"{view.step}{since}"),
        ("training reward", number(view.recent(REWARD))),
        ("held-out pass rate", held_out_text(view)),
        (
            "lag in versions",
            f"{number(view.recent(LAG), 2)} mean, {number(view.most(LAG_MAX), 0)} max",
        ),
        ("tokens/s", number(view.per_second(TOKENS), 0)),
        (
            "groups",
            f"{view.prompts} issued, {view.in_flight} in flight, {view.trained - view.live_trained} trained",
        ),
        *(
            [("suggestions", f"{view.live_consumed} read, {view.live_trained} trained")]
            if view.live_consumed
            else []
        ),
        ("dropped", counts(view.drops)),
        ("trainer idle", percent(view.recent(IDLE))),
        ("weights", f"version {'-' if view.version is None else view.version}"),
        (
            "serving",
            ", ".join(f"{name} v{ack.version}" for name, ack in sorted(view.replicas.items())) or "-",
        ),
    ]
    if view.withheld:
        rows.append(("members withheld", counts(view.withheld)))
    if view.dead or view.undecodable:
        rows.append(("dead letters", f"{view.dead} (headrace dead-letters list)"))
    return rows


async def _outlook(bus: Bus, run: str, now_ms: int) -> Outlook:
    """What the log keeps of what the ledger of `run` may need. Records that can't be read are left out, as in
    the view."""
    steps: list[TrainStep] = []
    [(tp, begin)] = (await bus.begins([TRAIN_STEPS.name])).items()
    async for delivery in bus.read_range(tp, begin, (await bus.ends([TRAIN_STEPS.name]))[tp]):
        with contextlib.suppress(WireError):
            record = decode(delivery.topic, delivery.value or b"", delivery.headers)
            if isinstance(record, TrainStep) and record.run == run:
                steps.append(record)
    return await outlook(bus, steps, now_ms=now_ms)


def retention_document(found: Outlook) -> dict[str, Any]:
    """For `--json`."""
    return {
        "state": found.state,
        "since_checkpoint": found.since,
        "needed_from": {str(tp): offset for tp, offset in sorted(found.needed.items())},
        "log_begins": {str(tp): begin for tp, begin in sorted(found.gone.items())},
        "gone_since_start": found.gone_since_start,
        "retention_ms": found.retention_ms,
        "left_ms": found.left_ms,
    }


def retention_text(found: Outlook) -> str:
    """How long the log keeps what may be computed again; a WARNING when that is short, or over."""
    what = f"of the steps after {found.since}" if found.since else "of every step"
    if found.state == "gone":
        return (
            f"WARNING: {what} are gone: {found.gone_text()}; steps that read them can't be computed again"
            " from the oldest checkpoint"
        )
    left = "for ever" if found.left_ms is None else f"for another {shown.duration(found.left_ms)}"
    if found.state == "soon":
        return (
            f"WARNING: {what} are kept {left} only (retention {shown.duration(found.retention_ms or 0)}):"
            " raise the retention of `experience`, or let older checkpoints go (trainer.checkpoints_kept)"
        )
    return f"{what} are kept {left}"


def held_out_text(view: RunView) -> str:
    """`21.3 % at v0 -> 30.1 % at v60 (192 tries)`, sampled: the first and the newest version that were tried
    on the same tasks. A round under way counts when it has as many tries as the one before."""
    points = view.held_out("sampled", ("watch",)) or view.held_out("sampled")
    if len(points) > 1 and points[-1][2] < points[-2][2]:
        points.pop()
    if not points:
        return "-"
    first, last = points[0], points[-1]
    since = "" if first is last else f"{percent(first[1])} at v{first[0]} -> "
    return f"{since}{percent(last[1])} at v{last[0]} ({last[2]} tries)"


def counts(reasons: dict[str, int]) -> str:
    """`zero_advantage 120, stale 3`; the most frequent first."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count}" for reason, count in ordered) or "-"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"

"""`headrace step N`: what a record of the ledger holds, the units behind it and what each contributed.

Not here: reading the units (`step_units`), their share of the gradient (`gradient_shares`).
"""

import argparse
import re
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

from headrace.bus.protocol import Bus, Delivery
from headrace.cli import options, shown
from headrace.cli.options import Place
from headrace.cli.reading import Progress, expect_run, ledger
from headrace.errors import ConfigError, OffsetGone, StoreError, TrainingError
from headrace.wire.records import TrainStep

if TYPE_CHECKING:
    from headrace.cli.gradient_shares import Shares
    from headrace.cli.step_units import UnitRow

DETAIL = """N counts from 1; without it the newest step. The share of a unit in the gradient is

    <g_unit, g> / |g|^2

with g the sum of all units' gradients before clipping: shares add up to 100 %, a negative one pulled against
the step. |g_unit| is its own norm, which does not add up. Both need the step computed once more (the state
before it from the newest checkpoint, then each unit alone); --fast leaves that out and reads records only.
Units stand by their share, or as they were read. Advantages: +0.25x3 is that of three members; --json has
each member's."""

WIDTH = 80
PHASES = ("wait", "learn", "store", "commit")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", nargs="?", type=_step, metavar="N", help="which step, from 1")
    parser.add_argument("--fast", action="store_true", help="without the shares of the gradient")
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return options.with_bus(lambda bus, where: _show(bus, where, args), options.place(args))


def _step(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"expected a step, a whole number from 1, got {text!r}")
    return int(text)


async def _show(bus: Bus, where: Place, args: argparse.Namespace) -> int:
    from headrace.cli.step_units import unit_rows
    from headrace.store.blobs import Blobs

    delivery, step = await find(bus, where.settings.run.name, args.step)
    uri = where.settings.store.uri
    rows = await unit_rows(bus, Blobs.open(uri) if uri else None, step)
    shares = None if args.fast or not step.admitted else await _shares(bus, where, step.step)
    if args.json:
        options.print_json(document(delivery, step, rows, shares))
        return 0
    for line in lines(delivery, step, rows, shares):
        print(shown.printable(line))
    return 0


async def find(bus: Bus, run: str, number: int | None) -> tuple[Delivery, TrainStep]:
    """The newest record of step `number`, or of the newest step. Raises ConfigError when the ledger has no
    such step."""
    found: tuple[Delivery, TrainStep] | None = None
    last = 0
    async for delivery, step in ledger(bus, run):
        last = step.step
        if number in (None, step.step):
            found = delivery, step
    if not last:
        await expect_run(bus, run)
    if found is None:
        raise ConfigError(f"run {run!r}: expected a step from 1 to {last}, got {number}")
    return found


async def _shares(bus: Bus, where: Place, step: int) -> "Shares":
    from headrace.cli.gradient_shares import gradient_shares
    from headrace.cli.ground import ground

    progress: Progress | None = None

    def advance(done: int, of: int) -> None:
        nonlocal progress
        progress = progress or Progress("computing each unit's gradient", of, "gradients")
        progress.advance(done)

    try:
        async with ground(bus, where) as found:
            shares = await gradient_shares(found, step, advance)
    except (TrainingError, StoreError, OffsetGone) as error:
        raise type(error)(f"{error} (without the gradient: headrace step {step} --fast)") from error
    if progress is not None:
        progress.close()
    return shares


def lines(delivery: Delivery, step: TrainStep, rows: "list[UnitRow]", shares: "Shares | None") -> list[str]:
    """The step as a person reads it."""
    from headrace.cli.tables import draw

    drawn = [
        f"step {step.step} of run {step.run}: version {step.version_from} to {step.version_to}"
        f"   {delivery.place}"
    ]
    for name, text in _facts(step, rows):
        drawn += textwrap.wrap(
            f"{name:<11}{text}", WIDTH - 2, initial_indent="  ", subsequent_indent=" " * 13
        )
    drawn += ["", *_metrics(step)]
    trained = [row for row in rows if row.outcome == "trained"]
    if shares is not None:
        order = {group_id: own.share for group_id, own in shares.units.items()}
        trained.sort(key=lambda row: -order.get(row.consumed.group_id, 0.0))
    if trained:
        columns = ["trained unit", "where", ">tokens", ">lag"]
        columns += [">share %", ">|g_unit|"] if shares else []
        drawn += ["", *draw((*columns, "~advantages"), [_trained(row, shares) for row in trained])]
    if shares is not None:
        total = sum(share.share for share in shares.units.values())
        recorded = step.metrics.get("gradient.norm")
        drawn.append(
            f"shares add up to {100 * total:.4f} %; |g| {shares.norm:.6g}, in the ledger "
            f"{'-' if recorded is None else format(recorded, '.6g')}"
        )
    others = [row for row in rows if row.outcome != "trained"]
    if others:
        dropped = [(row.consumed.group_id, row.place, row.outcome, _rewards(row)) for row in others]
        drawn += ["", *draw(("not trained", "where", "why", "~rewards"), dropped)]
    return drawn


def _facts(step: TrainStep, rows: "list[UnitRow]") -> list[tuple[str, str]]:
    reasons = Counter(row.outcome for row in rows if row.outcome != "trained")
    dropped = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    withheld = Counter(drop.reason for drop in step.drops if drop.member is not None)
    seconds = {name: step.metrics.get(f"seconds.{name}") for name in PHASES}
    spent = ", ".join(f"{name} {shown.duration(1000 * s)}" for name, s in seconds.items() if s is not None)
    facts = [
        ("roots", f"{step.root_before[:16] or '-'} to {step.root_after[:16] or '-'}"),
        ("when", f"{shown.clock(step.started_ms)} to {shown.clock(step.ended_ms)}"),
        ("time", spent or "-"),
        (
            "read",
            f"{len(step.consumed)} records: {len(step.admitted)} trained"
            f"{f', {sum(reasons.values())} dropped ({dropped})' if dropped else ''}",
        ),
    ]
    if withheld:
        facts.append(("withheld", f"members: {', '.join(f'{why} {n}' for why, n in withheld.items())}"))
    facts.append(
        ("positions", ", ".join(f"{tp} {offset}" for tp, offset in sorted(step.positions.items())) or "-")
    )
    if step.checkpoint is not None:
        of = step.step if step.checkpoint.step is None else step.checkpoint.step
        size = f", {shown.size(step.checkpoint.bytes)}" if step.checkpoint.bytes else ""
        facts.append(("checkpoint", f"of step {of}{size}: {step.checkpoint.uri}"))
    if step.checkpoints_pruned:
        facts.append(("given up", f"checkpoints of steps {', '.join(map(str, step.checkpoints_pruned))}"))
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(step.libraries.items()))
    return [
        *facts,
        ("code", step.code or "-"),
        ("libraries", libraries or "-"),
        ("arithmetic", f"{step.threads} thread(s), kernel probe {step.kernel_probe[:16] or '-'}"),
        ("settings", _settings(step)),
    ]


def _settings(step: TrainStep) -> str:
    from headrace.cli.step_units import settings_changed

    told = ", ".join(
        f"{name} {own} (default {default})" for name, (own, default) in settings_changed(step).items()
    )
    return f"{told or 'all as the defaults'}; seed {step.seed}, hash {step.config_sha256[:12] or '-'}"


def _metrics(step: TrainStep) -> list[str]:
    """By the first part of their names, phases left out: they stand above."""
    groups: dict[str, list[str]] = {}
    for name, value in sorted(step.metrics.items()):
        first, _, rest = name.partition(".")
        if first != "seconds":
            groups.setdefault(first, []).append(f"{rest}{' ' if rest else ''}{value:.4g}")
    return [line for first, told in groups.items() for line in _wrapped(f"{first:<19}{', '.join(told)}", 21)]


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH - 1, initial_indent="  ", subsequent_indent=" " * indent)


def _trained(row: "UnitRow", shares: "Shares | None") -> tuple[object, ...]:
    values = Counter(m.advantage for m in row.members if m.advantage is not None and not m.withheld)
    told = ", ".join(_times(f"{value:+.3g}", count) for value, count in sorted(values.items(), reverse=True))
    withheld = sum(bool(m.withheld) for m in row.members)
    told += f"; {withheld} withheld" if withheld else ""
    own = shares.units.get(row.consumed.group_id) if shares else None
    middle: tuple[object, ...] = ()
    if shares:
        middle = (f"{100 * own.share:.2f}", f"{own.norm:.4g}") if own else (None, None)
    return (row.consumed.group_id, row.place, row.tokens, row.lag, *middle, row.problem or told)


def _rewards(row: "UnitRow") -> str:
    values = Counter(m.reward for m in row.members)
    told = (_times("none" if value is None else f"{value:g}", count) for value, count in values.items())
    return row.problem or ", ".join(told)


def _times(value: str, count: int) -> str:
    """`+0.25x3`: of three members."""
    return value if count == 1 else f"{value}x{count}"


def document(
    delivery: Delivery, step: TrainStep, rows: "list[UnitRow]", shares: "Shares | None"
) -> dict[str, Any]:
    """The same for `--json`: the whole ledger record, the units, the settings that are not defaults."""
    import msgspec

    from headrace.cli.step_units import settings_changed

    changed = settings_changed(step)
    record = msgspec.to_builtins(step)
    record.pop("consumed")
    return {
        "place": delivery.place,
        "at_ms": delivery.timestamp_ms,
        "settings_changed": {
            name: {"value": own, "default": default} for name, (own, default) in changed.items()
        },
        "gradient_norm": shares.norm if shares else None,
        "units": [_unit_document(row, shares) for row in rows],
        "record": record,
    }


def _unit_document(row: "UnitRow", shares: "Shares | None") -> dict[str, Any]:
    own = shares.units.get(row.consumed.group_id) if shares and row.outcome == "trained" else None
    return {
        "group_id": row.consumed.group_id,
        "place": row.place,
        "outcome": row.outcome,
        "tokens": row.tokens,
        "lag": row.lag,
        "share": own.share if own else None,
        "gradient_norm": own.norm if own else None,
        "problem": row.problem or None,
        "members": [{name: getattr(m, name) for name in type(m).__slots__} for m in row.members],
    }

"""`headrace replay --without user:ID`: the run as if some records had never been, step by step, and a
checkpoint of where it ends, to start from.

Not here: the walk (`consumers.without`), starting from the file (`--trainer.start_from`).
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli import options, replay_rows, shown
from headrace.cli.ground import Ground
from headrace.cli.replay_rows import short
from headrace.errors import ConfigError, PolicyError, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from headrace.consumers.what_if import Distance
    from headrace.consumers.without import Uses, Without
    from headrace.trainer.state import State

HEAD = (
    f"{'step':>6} {'read':>6} {'left out':>9} {'trained then':>13} {'now':>5}  {'root recorded':<13}"
    f" {'without':<13}"
)


async def show(
    found: Ground,
    last: int,
    given: Sequence[str],
    *,
    output: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> int:
    """Computes the steps to `last` without the records that match `given`; 0. Raises ConfigError when nothing
    matches, or `output` exists, TrainingError when the recorded steps through their first use are not equal
    here."""
    from headrace.consumers.replay import check_root, replay, state_before
    from headrace.consumers.without import criterion, uses, without

    if output is not None:
        refuse_existing(output, force)
    source = found.source
    criteria = [criterion(text) for text in given]
    with replay_rows.progress(last - source.begin + 1, quiet=as_json) as advance:
        matching = await uses(source, criteria, source.begin, last, looked=lambda _: advance("looking"))
    _check_found(matching, last)
    newest = await found.newest_state(matching.first - 1)
    if not as_json:
        print("\n".join([*_opening(found, matching, newest, last), "", HEAD]), flush=True)
    with replay_rows.progress(last - newest.step, quiet=as_json) as advance:
        start = await state_before(
            source, matching.first, now=found.now, start=newest, cancelled=found.cancelled
        )
        for _ in range(start.step - newest.step):
            advance(f"to step {matching.first}")
        # Only where the step comes out as recorded does what is left out alone make the difference.
        async for done in replay(source, start, matching.first, cancelled=found.cancelled):
            check_root(source, done, found.now)
        steps: list[Without] = []
        end = start
        async for one in without(source, start, criteria, last, cancelled=found.cancelled):
            end = one.done.result.state
            steps.append(replace(one, done=one.done.without_weights()))
            if not as_json:
                print(row(one), flush=True)
            advance("without")
    apart, unknown = await _apart(found, newest, end)
    if output is not None:
        await write_state(found, end, output, force=force)
    summary = _document(found, matching, newest, steps, apart, unknown, output)
    if as_json:
        options.print_json(summary)
    else:
        print("\n".join(["", *_closing(summary, apart)]), flush=True)
    return 0


def row(one: "Without") -> str:
    """A step: records read then, left out, units trained then and now, and the two roots."""
    then, now = one.done.recorded, one.done.result
    return (
        f"{then.step:>6} {len(then.consumed):>6} {len(one.left_out) or '-':>9} {len(then.admitted):>13}"
        f" {len(now.admission.units):>5}  {short(then.root_after):<13} {short(now.state.root):<13}"
        f" {'same weights' if one.same_weights else ''}"
    ).rstrip()


async def write_state(found: Ground, state: "State", path: Path, *, force: bool) -> None:
    """A checkpoint in `path`, whole or not there. Raises ConfigError, StoreError."""
    from headrace.trainer import checkpoint

    content: bytes = await found.source.compute(lambda: checkpoint.encode(state, found.source.run_name))
    staged = path.with_name(f".{path.name}.{os.getpid()}.staged")
    try:
        staged.write_bytes(content)
        refuse_existing(path, force)
        staged.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: can't be written: {error.strerror}") from error
    finally:
        staged.unlink(missing_ok=True)


def refuse_existing(path: Path, force: bool) -> None:
    """Raises ConfigError for what would be overwritten, or has no place."""
    if path.exists() and not force:
        raise ConfigError(f"{path}: exists already; give --force to write it anew")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: expected a place to write to: no such directory")


def _check_found(matching: "Uses", last: int) -> None:
    """Raises ConfigError, with the nearest that there is, when a criterion matches nothing."""
    for criterion, count in matching.counts.items():
        if not count:
            known = matching.known[criterion.kind] - {""}
            text = shown.unknown(criterion.kind, criterion.value, known)
            raise ConfigError(f"--without {criterion}: no record of steps up to {last} matches: {text}")


async def _apart(found: Ground, start: "State", end: "State") -> "tuple[Distance | None, str]":
    """From the weights published as recorded; or why they are not known."""
    from headrace.consumers.causes import recorded_weights
    from headrace.consumers.what_if import distance
    from headrace.policy.checkpoint import from_bf16
    from headrace.trainer.state import published

    try:
        recorded = await recorded_weights(found.source, end.version)
    except StoreUnavailable:
        raise
    except (StoreError, PolicyError) as error:
        return None, str(error)
    return distance(from_bf16(recorded), published(end.masters), published(start.masters)), ""


def _opening(found: Ground, matching: "Uses", start: "State", last: int) -> list[str]:
    records = sum(map(len, matching.by_step.values()))
    counted = ", ".join(f"{criterion} ({count})" for criterion, count in matching.counts.items())
    return [
        f"run {found.source.run_name}: to step {last} without {counted}",
        f"{_count(records, 'record')} of {_count(len(matching.by_step), 'step')}, first used in step"
        f" {matching.first}; from {found.origin(start)}",
        *found.notes,
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _closing(summary: dict[str, Any], apart: "Distance | None") -> list[str]:
    last, first = summary["last"], summary["first_use"]
    lines = []
    if summary["root_recorded"] == summary["root_without"]:
        lines.append(f"version {last}: the weights are those of the record: nothing of it was trained")
    elif apart is not None:
        lines.append(
            f"version {last}: weights apart: L2 {apart.l2:.4g} ({apart.relative:.3f} of the way that the run"
            f" went since step {summary['start']}), largest {apart.largest:.3g}"
        )
    else:
        lines.append(
            f"version {last}: how far the weights are apart is not known: {summary['distance_unknown']}"
        )
    tainted, later = summary["groups_tainted"], summary["groups_later"]
    lines += [
        "",
        "What this can't know:",
        f"  {tainted} of the {_count(later, 'group')} read after step {first} were sampled, in whole or in",
        "  part, from weights that had learned from what is left out. Their tokens, rewards and",
        "  log-probabilities stay as recorded, and so does which tasks were tried.",
    ]
    if summary["output"]:
        lines += [
            "",
            f"written: {summary['output']} (root {short(summary['root_without'])})",
            f"a new run from it: headrace demo --trainer.start_from {summary['output']}",
        ]
    return lines


def _document(
    found: Ground,
    matching: "Uses",
    start: "State",
    steps: Sequence["Without"],
    apart: "Distance | None",
    unknown: str,
    output: Path | None,
) -> dict[str, Any]:
    end = steps[-1].done
    return {
        "run": found.source.run_name,
        "without": {str(criterion): count for criterion, count in matching.counts.items()},
        "start": start.step,
        "first_use": matching.first,
        "last": end.recorded.step,
        "notes": found.notes,
        "records_left_out": sum(len(one.left_out) for one in steps),
        "root_recorded": end.recorded.root_after,
        "root_without": end.result.state.root,
        "distance": None
        if apart is None
        else {"l2": apart.l2, "largest": apart.largest, "relative": _finite(apart.relative)},
        "distance_unknown": unknown or None,
        "groups_later": sum(len(one.done.entries) for one in steps[1:]),
        "groups_tainted": sum(len(one.tainted) for one in steps),
        "output": str(output) if output is not None else None,
        "steps": [
            {
                "step": one.done.recorded.step,
                "read": len(one.done.recorded.consumed),
                "left_out": [
                    {"topic": c.topic, "partition": c.partition, "offset": c.offset, "group_id": c.group_id}
                    for c in one.left_out
                ],
                "trained_recorded": len(one.done.recorded.admitted),
                "trained_without": len(one.done.result.admission.units),
                "root_recorded": one.done.recorded.root_after,
                "root_without": one.done.result.state.root,
                "groups_tainted": len(one.tainted),
            }
            for one in steps
        ],
    }


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None

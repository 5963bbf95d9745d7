"""How verdicts on steps look: one line each on a terminal, plain values for `--json`, a progress bar beside.

Not here: where verdicts come from (`consumers.verification`).
"""

import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.cli import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.consumers.causes import Cause
    from headrace.consumers.verification import Verdict
    from headrace.wire.records import TrainStep

HEAD = f"{'step':>6} {'units':>7} {'tokens':>7} {'loss':>10}  {'root recorded':<13} {'recomputed':<13}"
WIDTH = 100
_LABEL = {
    "machine": "this machine",
    "library": "library",
    "code": "code",
    "threads": "threads",
    "configuration": "configuration",
    "records": "records",
    "missing": "missing records",
    "chain": "ledger",
    "unknown": "unknown",
}


def row(verdict: "Verdict") -> str:
    """The step's line, and what is known of a difference on lines below it."""
    step = verdict.recorded
    root = short(verdict.done.result.state.root) if verdict.done else "-"
    loss = step.metrics.get("loss")
    line = (
        f"{step.step:>6} {units(step):>7} {step.metrics.get('tokens.trained', 0):>7.0f}"
        f" {'-' if loss is None else format(loss, '.5f'):>10}  {short(step.root_after):<13} {root:<13} "
    )
    return "\n".join([line + _outcome(verdict), *_details(verdict)])


def units(step: "TrainStep") -> str:
    """`21/32`: trained of those read."""
    return f"{len(step.admitted)}/{len(step.consumed)}"


def short(sha256: str) -> str:
    return sha256[:12]


def cause(found: "Cause") -> str:
    return f"{_LABEL[found.kind]}: {found.text}" if found.kind != "machine" else found.text


def _outcome(verdict: "Verdict") -> str:
    match verdict.outcome:
        case "follows":
            return f"not comparable: after step {verdict.follows}"
        case "missing":
            return "RECORDS GONE"
        case "machine":
            return "this machine computes otherwise"
        case "differs" if verdict.done and verdict.done.result.state.root == verdict.recorded.root_after:
            return "weights equal, RECORD DIFFERS"
        case "differs":
            return "DIFFERS"
    return "equal"


def _details(verdict: "Verdict") -> Iterator[str]:
    if verdict.tensors is not None:
        yield from _wrapped("first tensor", str(verdict.tensors))
    elif verdict.tensors_unknown:
        yield from _wrapped("first tensor", f"not known, for {verdict.tensors_unknown}")
    for number, found in enumerate(verdict.causes):
        yield from _wrapped("likely cause" if number == 0 else "or", cause(found))


def _wrapped(name: str, text: str) -> list[str]:
    indent = " " * 8
    return textwrap.wrap(
        f"{name}: {text}",
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )


def document(verdict: "Verdict") -> dict[str, Any]:
    """A verdict as plain values."""
    step, done, tensors = verdict.recorded, verdict.done, verdict.tensors
    return {
        "step": step.step,
        "outcome": verdict.outcome,
        "equal": verdict.outcome == "equal",
        "units_read": len(step.consumed),
        "units_trained": len(step.admitted),
        "tokens_trained": int(step.metrics.get("tokens.trained", 0)),
        "loss": step.metrics.get("loss"),
        "root_recorded": step.root_after,
        "root_recomputed": done.result.state.root if done else None,
        "seconds_recorded": step.metrics.get("seconds.learn"),
        "seconds": done.seconds if done else None,
        "metrics_that_differ": done.metrics_that_differ() if done else {},
        "first_tensor": None
        if tensors is None
        else {
            "name": tensors.first,
            "elements": tensors.elements,
            "elements_of": tensors.elements_of,
            "tensors": tensors.tensors,
            "tensors_of": tensors.tensors_of,
            "largest_difference": tensors.largest,
        },
        "first_tensor_unknown": verdict.tensors_unknown or None,
        "causes": [{"kind": found.kind, "text": found.text} for found in verdict.causes],
        "follows": verdict.follows,
    }


def summary(verdicts: Sequence["Verdict"]) -> str:
    """`20 of 20 steps equal, computed in 8.1 s; the first time 9.0 s (1.11x)`."""
    counted: Counter[str] = Counter(verdict.outcome for verdict in verdicts)
    text = f"{counted['equal']} of {len(verdicts)} steps equal"
    names = {
        "differs": "differ",
        "machine": "where this machine computes otherwise",
        "missing": "whose records are gone",
        "follows": "not comparable",
    }
    text += "".join(f", {counted[name]} {said}" for name, said in names.items() if counted[name])
    pairs = [
        (verdict.done.seconds, verdict.recorded.metrics["seconds.learn"])
        for verdict in verdicts
        if verdict.done is not None and "seconds.learn" in verdict.recorded.metrics
    ]
    now_s, then_s = sum(now for now, _ in pairs), sum(then for _, then in pairs)
    if now_s and then_s:
        text += (
            f"; computed in {shown.duration(1000 * now_s)}, the first time in"
            f" {shown.duration(1000 * then_s)} ({then_s / now_s:.2f}x)"
        )
    return text


@contextmanager
def progress(total: int, *, quiet: bool) -> "Iterator[Callable[[str], None]]":
    """A bar with rate and time left on standard error, if that is a terminal; yields what moves it by one."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar:
        task = bar.add_task("replay", total=total, rate="")

        def advance(text: str) -> None:
            bar.advance(task)
            speed = bar.tasks[0].finished_speed or bar.tasks[0].speed
            bar.update(task, description=text, rate=f"{speed:.2f} steps/s" if speed else "")

        yield advance

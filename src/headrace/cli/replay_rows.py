"""How verdicts on steps look: one line each on a terminal, plain values for `--json`, a progress bar beside.

Not here: where verdicts come from (`consumers.verification`).
"""

import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.cli import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.consumers.verification import Verdict
    from headrace.wire.records import TrainStep

HEAD = f"{'step':>6} {'units':>7} {'tokens':>7} {'loss':>10}  {'root recorded':<13} {'recomputed'}"
WIDTH_MAX = 100


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


class Lines:
    """Verdicts to lines; neighbours of which nothing can be said share one."""

    def __init__(self) -> None:
        self._follow: list[Verdict] = []

    def of(self, verdict: "Verdict") -> list[str]:
        """What to print now that `verdict` is known."""
        if verdict.outcome == "follows":
            self._follow.append(verdict)
            return []
        return [*self.rest(), row(verdict)]

    def rest(self) -> list[str]:
        """What is left to print at the end."""
        if not self._follow:
            return []
        first, last = self._follow[0], self._follow[-1]
        steps = [verdict.recorded.step for verdict in (first, last)]
        self._follow = []
        span = f"{steps[0]}" if steps[0] == steps[1] else f"{steps[0]}..{steps[1]}"
        return [f"{span:>6}  {_outcome(first)}"]


def units(step: "TrainStep") -> str:
    """`21/32`: trained of those read."""
    return f"{len(step.admitted)}/{len(step.consumed)}"


def short(sha256: str) -> str:
    return sha256[:12]


def _outcome(verdict: "Verdict") -> str:
    match verdict.outcome:
        case "follows":
            return f"not comparable: after step {verdict.follows}"
        case "missing":
            return "RECORDS GONE"
        case "machine":
            return "this machine computes otherwise"
        case "differs":
            return "weights equal, RECORD DIFFERS" if _same_weights(verdict) else "DIFFERS"
    return "equal"


def _same_weights(verdict: "Verdict") -> bool:
    return verdict.done is not None and verdict.done.result.state.root == verdict.recorded.root_after


def _details(verdict: "Verdict") -> Iterator[str]:
    if verdict.tensors is not None:
        yield from _wrapped("first tensor", str(verdict.tensors))
    elif verdict.tensors_unknown:
        yield from _wrapped("first tensor", f"can't be told: {verdict.tensors_unknown}")
    elif verdict.done is not None and _same_weights(verdict):
        names = list(verdict.done.metrics_that_differ())
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        if names:
            yield from _wrapped(
                "the weights are equal", f"these numbers are not: {', '.join(names[:4])}{more}"
            )
    for number, found in enumerate(verdict.causes):
        yield from _wrapped("likely cause" if number == 0 else "or", found.text)


def _wrapped(name: str, text: str) -> list[str]:
    indent, width = " " * 8, min(WIDTH_MAX, shutil.get_terminal_size((WIDTH_MAX, 24)).columns)
    return textwrap.wrap(
        f"{name}: {text}",
        width,
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


def summary(verdicts: Sequence["Verdict"], first: int) -> str:
    """`20 of 20 steps equal; computed in 8.1 s, the first time in 9.0 s (1.11x)`. Those before `first` are
    not among those asked for."""
    asked = [verdict for verdict in verdicts if verdict.recorded.step >= first]
    counted: Counter[str] = Counter(verdict.outcome for verdict in asked)
    text = f"{counted['equal']} of {len(asked)} steps equal"
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

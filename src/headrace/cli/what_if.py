"""`headrace replay ... --what-if trainer.lr=2e-5`: the same records under other settings, side by side.

Nothing is written or published. Not here: the arithmetic (`consumers.what_if`), the recorded run's own replay
(`replay`).
"""

import math
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from headrace.cli import options, replay_rows
from headrace.cli.ground import Ground
from headrace.cli.replay_rows import short
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.consumers.what_if import Beside, Shift
    from headrace.trainer.config import StepSettings

METRICS = ("units.trained", "tokens.trained", "loss", "gradient.norm", "mask.share", "clip.share")
"""Of a step; the others say the same of both, or little."""
NAME_WIDTH = 38


async def show(found: Ground, first: int, last: int, given: Sequence[str], *, as_json: bool = False) -> int:
    """Computes each step twice and prints both; 0. Raises ConfigError for a setting that steps don't have,
    TrainingError when the recorded way can't be computed again."""
    from headrace.consumers.replay import state_before
    from headrace.consumers.what_if import side_by_side

    flags = settings_given(given)
    source = found.source
    _changed(found, first, flags)
    start = await found.newest_state(first - 1)
    start = await state_before(source, first, now=found.now, start=start, cancelled=found.cancelled)
    lines = changes(found, first, last, flags)
    if not as_json:
        span = f"step {first}" if first == last else f"steps {first} to {last}"
        print("\n".join([f"run {source.run_name}: {span}, as recorded and with", *lines, *found.notes]))
    documents = []  # not the pairs: each holds four states of the trainer
    with replay_rows.progress(last - first + 1, quiet=as_json) as advance:
        walk = side_by_side(
            source,
            start,
            last,
            lambda settings: _with(settings, flags),
            cancelled=found.cancelled,
        )
        async with aclosing(walk):
            async for pair in walk:
                if as_json:
                    documents.append(document(pair))
                else:
                    print("\n" + table(pair), flush=True)
                advance("what if")
    if as_json:
        options.print_json(
            {
                "run": source.run_name,
                "first": first,
                "last": last,
                "changed": flags,
                "steps": documents,
            }
        )
    return 0


def settings_given(given: Sequence[str]) -> dict[str, str]:
    """Dotted name -> text, of `trainer.lr=2e-5` words. Raises ConfigError."""
    flags = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--what-if {word}: expected SETTING=VALUE, e.g. trainer.lr=2e-5")
        flags[name.strip().replace("-", "_")] = value.strip()
    return flags


def changes(found: Ground, first: int, last: int, flags: dict[str, str]) -> list[str]:
    """`  trainer.lr 2e-05, not 0.0004` for each setting; what was, over all the steps."""
    from headrace.consumers.replay import settings_of

    lines = []
    for name in flags:
        values = {
            str(_value(settings_of(found.source.recorded(step)), name)): None
            for step in range(first, last + 1)
        }
        now = _value(_changed(found, first, flags), name)
        lines.append(f"  {name} = {now} (recorded: {', '.join(values)})")
    return lines


def _changed(found: Ground, step: int, flags: dict[str, str]) -> "StepSettings":
    from headrace.consumers.replay import settings_of

    return _with(settings_of(found.source.recorded(step)), flags)


def _with(settings: "StepSettings", flags: dict[str, str]) -> "StepSettings":
    from headrace.config import changed

    return changed(settings, flags)


def _value(settings: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        settings = getattr(settings, name)
    return settings


def table(pair: "Beside") -> str:
    """One step: a line for each number, recorded and changed beside each other."""
    then, now = pair.recorded, pair.changed
    lines = [f"step {then.recorded.step:<{NAME_WIDTH - 5}} {'recorded':>20} {'what if':>20}"]
    for name, (recorded, changed) in numbers(pair).items():
        lines.append(f"  {name:<{NAME_WIDTH - 2}} {_number(recorded):>20} {_number(changed):>20}")
    roots = (short(then.result.state.root), short(now.result.state.root))
    lines.append(f"  {'root':<{NAME_WIDTH - 2}} {roots[0]:>20} {roots[1]:>20}")
    apart = pair.distance
    if roots[0] == roots[1] and not apart.l2:
        lines.append("  the same weights: these settings have no effect on this step")
    else:
        way = f"{apart.relative:.3f} of the recorded way"
        if math.isinf(apart.relative):
            way = "as recorded, nothing moved"
        lines.append(f"  weights apart: L2 {apart.l2:.4g} ({way}), largest {apart.largest:.3g}")
    if not then.equal:
        lines.append("  the recorded step itself is not equal when computed again: see headrace replay")
    return "\n".join(lines)


def numbers(pair: "Beside") -> dict[str, tuple[float | None, float | None]]:
    """What is compared, by name: metrics of the step, and what it did to its trained tokens."""
    then, now = pair.recorded.result.metrics, pair.changed.result.metrics
    dropped = sorted(
        name
        for name in then.keys() | now.keys()
        if name.startswith(("drops.", "withheld.")) and then.get(name) != now.get(name)
    )
    recorded, changed = pair.shift
    return {
        **{name: (then.get(name), now.get(name)) for name in (*METRICS, *dropped)},
        "log-prob change, advantage > 0": (recorded.better, changed.better),
        "log-prob change, advantage < 0": (recorded.worse, changed.worse),
    }


def document(pair: "Beside") -> dict[str, Any]:
    """A pair as plain values."""

    def side(metrics: dict[str, float], root: str, shift: "Shift") -> dict[str, Any]:
        return {
            "root": root,
            "metrics": metrics,
            "logp_change_positive": shift.better,
            "logp_change_negative": shift.worse,
        }

    results = (pair.recorded.result, pair.changed.result)
    recorded, changed = (
        side(result.metrics, result.state.root, shift)
        for result, shift in zip(results, pair.shift, strict=True)
    )
    return {
        "step": pair.recorded.recorded.step,
        "recorded_equal": pair.recorded.equal,
        "recorded": recorded,
        "what_if": changed,
        "distance": {
            "l2": pair.distance.l2,
            "largest": pair.distance.largest,
            "relative": None if math.isinf(pair.distance.relative) else pair.distance.relative,
        },
    }


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value == int(value) and abs(value) >= 1 else f"{value:.5g}"

"""The curves of a run as one PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.cli.report import AFTER, BEFORE, Findings
from headrace.cli.run_view import (
    IDLE,
    LAG,
    LAG_MAX,
    MISMATCH,
    MISMATCH_MAX,
    REWARD,
    TOKENS,
    RunView,
)

WINDOW_STEPS = 5
BLUE, ORANGE, GREY = "#2563a8", "#d9771e", "#9aa4b0"


def draw(found: Findings, path: Path) -> None:
    """Six panels over training steps: reward, held-out pass rate, lag, idle share, mismatch, tokens/s."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3).flat
    view = found.view
    _curve(next(panels), view, "training reward", (REWARD, "mean of a step", GREY), smooth=True)
    _held_out(next(panels), found)
    _curve(next(panels), view, "lag in versions", (LAG, "mean", BLUE), (LAG_MAX, "most", ORANGE), bottom=0)
    _curve(next(panels), view, "trainer idle share", (IDLE, "of a step's time", BLUE), bottom=0)
    _curve(
        next(panels),
        view,
        "|Δ log-prob|, sampler against trainer",
        (MISMATCH, "mean", BLUE),
        (MISMATCH_MAX, "most", ORANGE),
        bottom=0,
    )
    _tokens(next(panels), view)
    figure.suptitle(f"{view.run}: {view.step} training steps")
    figure.savefig(path)


def _curve(
    axes: Any,
    view: RunView,
    title: str,
    *series: tuple[str, str, str],
    bottom: float | None = None,
    smooth: bool = False,
) -> None:
    for metric, label, colour in series:
        points = [(p.step, p.metrics[metric]) for p in view.steps if metric in p.metrics]
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, color=colour, linewidth=1.2, label=label)
        if smooth and len(values) > WINDOW_STEPS:
            axes.plot(steps, rolling(values), color=BLUE, linewidth=2, label=f"mean of {WINDOW_STEPS} steps")
    _finish(axes, title, bottom)


def _held_out(axes: Any, found: Findings) -> None:
    """The watch rounds as a line, the two whole rounds as points: their tasks are more."""
    points = found.view.held_out("sampled", ("watch",))
    if points:
        axes.plot(
            [v for v, _, _ in points], [100 * r for _, r, _ in points], color=GREY, marker=".", label="watch"
        )
    for mode, colour in (("sampled", BLUE), ("greedy", ORANGE)):
        ends = [*found.view.held_out(mode, (BEFORE,)), *found.view.held_out(mode, (AFTER,))]
        if ends:
            axes.plot(
                [v for v, _, _ in ends],
                [100 * r for _, r, _ in ends],
                "o--",
                color=colour,
                linewidth=1,
                label=f"{mode}, whole rounds",
            )
    _finish(axes, "held-out pass rate, %", 0)


def _tokens(axes: Any, view: RunView) -> None:
    points = [point for point in view.steps if point.duration_ms]
    rates = [point.metrics[TOKENS] * 1000 / point.duration_ms for point in points]
    axes.plot([point.step for point in points], rates, color=BLUE, linewidth=1.2)
    _finish(axes, "tokens consumed per second", 0)


def rolling(values: Sequence[float], window: int = WINDOW_STEPS) -> list[float]:
    """Mean of each value and those before it, at most `window` together."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _finish(axes: Any, title: str, bottom: float | None) -> None:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)
    if bottom is not None:
        axes.set_ylim(bottom=bottom)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7, frameon=False)
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing recorded", ha="center", transform=axes.transAxes, color=GREY)

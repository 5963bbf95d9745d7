"""The plots of the live half: shown and accepted over versions, calibration, and the loop's clock."""

from pathlib import Path

from headrace.cli.online_report import CLOCK_TARGET_S, Online, curves
from headrace.cli.report_figure import BLUE, GREY, ORANGE


def draw(found: Online, path: Path) -> None:
    """Writes the three plots side by side, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    versions, calibration, clock = figure.subplots(1, 3)
    points = curves(found)
    at = [version for version, _, _ in points]
    versions.plot(
        at, [100 * shown for _, shown, _ in points], color=BLUE, marker=".", label="shown, % of asked"
    )
    versions.plot(
        at, [100 * rate for _, _, rate in points], color=ORANGE, marker=".", label="accepted, % of shown"
    )
    versions.set_title("suggestions by version of the weights", fontsize=10)
    if found.bins is not None and found.break_even is not None:
        for bins, colour, label in zip(found.bins, (GREY, BLUE), ("before", "after"), strict=True):
            calibration.plot(
                [100 * item.accept for item in bins],
                [100 * item.show for item in bins],
                color=colour,
                marker="o",
                label=label,
            )
        calibration.axvline(100 * found.break_even, color=ORANGE, linestyle="--", label="break-even")
    calibration.set_title("shown, %, by the place's chance of an accept, %", fontsize=10)
    seconds = [served / 1000 for served, _ in found.view.clock_ms()]
    if seconds:
        clock.hist(seconds, bins=30, color=BLUE)
        clock.axvline(CLOCK_TARGET_S, color=ORANGE, linestyle="--", label="target")
    clock.set_title("the loop's clock: s from accept to served", fontsize=10)
    for axes in (versions, calibration, clock):
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7, frameon=False)
    figure.savefig(path)

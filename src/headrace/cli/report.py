"""`headrace report`, and the end of `headrace demo`: what a run did, in lines, one PNG and one HTML page.

It says what was measured and how sure one may be of it, no more: rates are paired, intervals are printed, and
a change that could be chance is called that. Not here: the arithmetic (`consumers.comparison`), the drawing
(`report_figure`), the page (`report_page`).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bus.protocol import Bus, TopicPartition
from headrace.cli import options, status
from headrace.cli.options import Place
from headrace.cli.run_view import Follower, RunView
from headrace.errors import WireError
from headrace.wire.codec import decode
from headrace.wire.records import Evaluation
from headrace.wire.topics import EVALUATIONS

if TYPE_CHECKING:
    from headrace.cli.online_report import Online
    from headrace.consumers.comparison import Difference

BEFORE, AFTER = "before", "after"


def arguments(parser: argparse.ArgumentParser) -> None:
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    async def act(bus: Bus, where: Place) -> int:
        return await write(bus, where, as_json=args.json)

    return options.with_bus(act, options.place(args))


@dataclass(slots=True)
class Findings:
    """What the report is made of."""

    view: RunView
    before: list[Evaluation] = field(default_factory=list)
    after: list[Evaluation] = field(default_factory=list)
    differences: "list[Difference]" = field(default_factory=list)

    @property
    def versions(self) -> tuple[int, int]:
        """Of the two rounds; (0, 0) without them."""
        return (self.before[0].version if self.before else 0, self.after[0].version if self.after else 0)

    def difference(self, mode: str, measure: str = "any", kind: str = "all") -> "Difference | None":
        return next(
            (d for d in self.differences if (d.mode, d.measure, d.kind) == (mode, measure, kind)), None
        )


async def write(bus: Bus, where: Place, *, as_json: bool = False) -> int:
    """Writes `DIR/report/report.html` and `report.png`, prints the summary; 0."""
    import asyncio

    from headrace.cli import online_report

    found = await gather(bus, where.settings.run.name)
    online = await online_report.gather(bus, where)
    folder = where.home / "report"
    page = await asyncio.to_thread(_write_files, found, online, where, folder)
    if as_json:
        live = {} if online is None else {"online": online_report.document(online)}
        options.print_json(_document(found, page) | live)
    else:
        told = [] if online is None else ["", *online_report.lines(online)]
        print(
            "\n".join(["", *sentences(found), *told, "", f"report: {page}", "", *next_commands(where)]),
            flush=True,
        )
    return 0


async def gather(bus: Bus, run: str) -> Findings:
    """The run's numbers and its two rounds: `before`, and the newest `after`."""
    from headrace.consumers.comparison import compare

    found = Findings(await Follower(bus, run).refresh())
    rounds: dict[tuple[str, int], list[Evaluation]] = {}
    tp = TopicPartition(EVALUATIONS.name, 0)
    begin, end = (await bus.begins([tp.topic]))[tp], (await bus.ends([tp.topic]))[tp]
    async for delivery in bus.read_range(tp, begin, end):
        try:
            record = decode(tp.topic, delivery.value or b"", delivery.headers)
        except WireError:  # counted by the view, which the report shows
            continue
        if isinstance(record, Evaluation) and record.run == run:
            rounds.setdefault((record.round, record.version), []).append(record)
    for name, into in ((BEFORE, found.before), (AFTER, found.after)):
        versions = [version for round, version in rounds if round == name]
        if versions:
            into += rounds[name, max(versions)]
    found.differences = compare(found.before, found.after, function_of=function_of)
    return found


def function_of(task_id: str) -> str:
    """The function that a task was cut from: holes of one function are not independent."""
    return task_id.partition(":")[0]


def sentences(found: Findings) -> list[str]:
    """The summary: held-out rates first, then what the run did."""
    view, (first, last) = found.view, found.versions
    what = "groups and suggestions" if view.live_consumed else "groups"
    lines = [f"run {view.run}: {view.step} training steps, {view.trained} {what} trained of {view.consumed}"]
    sampled, greedy = found.difference("sampled"), found.difference("greedy")
    if sampled is None or greedy is None:
        lines.append("No held-out rounds before and after: nothing can be said about the pass rate.")
    else:
        lines.append(
            f"held-out pass rate, weights v{first} -> v{last}, {sampled.tasks} tasks of {sampled.functions} "
            "functions never trained on, same seeds:"
        )
        lines += [_rate_line(sampled), _rate_line(greedy), *reading(sampled, greedy)]
    lines.append(f"dropped: {status.counts(view.drops)}")
    return lines


def _rate_line(difference: "Difference") -> str:
    verdict = "" if difference.significant else "  (no significant change seen)"
    return f"  {difference.mode:<8} {change_text(difference)}{verdict}"


def change_text(difference: "Difference") -> str:
    """`20.7 % -> 31.5 %, +10.8 points [6.9, 14.6]`: the brackets hold the 95 % interval."""
    return (
        f"{100 * difference.before:.1f} % -> {100 * difference.after:.1f} %, "
        f"{100 * difference.change:+.1f} points [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
    )


def reading(sampled: "Difference", greedy: "Difference") -> list[str]:
    """What the two numbers mean together, no more than they say."""
    if not sampled.significant and not greedy.significant:
        return ["No significant change seen: the intervals contain 0. A longer run may show one."]
    if sampled.significant and sampled.change < 0:
        return ["The sampled pass rate went down: something is wrong with this run or its settings."]
    if sampled.significant and not greedy.significant:
        return [
            "The model now samples well more often what it already preferred: sharpening, not a new ability",
            "(the greedy rate shows no significant change).",
        ]
    if not sampled.significant:
        return ["Only the greedy rate changed; look at it by kind of hole in the report."]
    if greedy.change < 0:
        return ["Sampled tries pass more often, greedy ones less: the run paid for one with the other."]
    return [
        "Greedy tries pass more often too: more than sharpening. How much of it the seed model could nearly",
        "do already, this comparison can't tell; the report shows it by kind of hole.",
    ]


def next_commands(where: Place) -> list[str]:
    """What to try next, with this run's directory."""
    home = _short(where.home)
    address = where.settings.bus.address
    broker = _short(Path(address.removeprefix(options.LOCAL_KAFKA)))
    commands = [
        *(
            [(f"headrace kafka up --dir {broker}", "the broker that this run lies on")]
            if address.startswith(options.LOCAL_KAFKA)
            else []
        ),
        (f"headrace demo --run-dir {home}", "go on training"),
        (f"headrace topics --run-dir {home}", "what lies in the log"),
        (f"headrace tail experience -n 3 --run-dir {home}", "closed groups, decoded"),
        (
            f"headrace trajectory {where.settings.run.name}-0000000 --run-dir {home}",
            "one group, and its fate",
        ),
        (f"headrace status --run-dir {home}", "the numbers again"),
    ]
    width = max(len(command) for command, _ in commands)
    return ["next:", *(f"  {command:<{width}}  # {why}" for command, why in commands)]


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _write_files(found: Findings, online: "Online | None", where: Place, folder: Path) -> Path:
    from headrace.cli import online_figure, report_figure, report_page

    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "report.png"
    report_figure.draw(found, picture)
    page = folder / "report.html"
    live = None
    if online is not None:
        plots = folder / "online.png"
        online_figure.draw(online, plots)
        live = online, plots.read_bytes()
    text = report_page.render(found, where, picture.read_bytes(), live)
    page.write_text(text, encoding="utf-8")
    return page


def _document(found: Findings, page: Path) -> dict[str, Any]:
    import msgspec

    differences: Sequence[Difference] = found.differences
    return {
        **status.summary(found.view),
        "version_before": found.versions[0],
        "version_after": found.versions[1],
        "differences": [
            {**msgspec.to_builtins(d), "change": d.change, "significant": d.significant} for d in differences
        ],
        "report": str(page),
    }

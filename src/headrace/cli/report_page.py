"""The report of a run as one HTML page that needs nothing else: picture, tables and trajectories inside."""

import base64
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

import msgspec

from headrace.cli import online_report, report
from headrace.cli import settings as tree
from headrace.cli.options import Place
from headrace.errors import HeadraceError
from headrace.wire.records import Evaluation

if TYPE_CHECKING:
    from headrace.cli.online_report import Online
    from headrace.consumers.comparison import Difference

SHOWN_EACH = 3
"""Trajectories of each outcome."""
OUTCOMES = (
    ((False, True), "failed before, passes now"),
    ((True, False), "passed before, fails now"),
    ((True, True), "passes both times"),
    ((False, False), "fails both times"),
)


def render(
    found: report.Findings, where: Place, picture: bytes, online: "tuple[Online, bytes] | None" = None
) -> str:
    """The whole page. Text of models and sandboxes is escaped: it is shown, never interpreted."""
    template = Template((files("headrace.cli") / "report.html").read_text(encoding="utf-8"))
    return template.substitute(
        run=escape(found.view.run),
        summary="".join(f"<p>{escape(line)}</p>" for line in report.sentences(found)),
        differences=_differences(found.differences),
        picture=base64.b64encode(picture).decode(),
        online="" if online is None else _online(*online),
        accounting=_accounting(found),
        chosen=escape(
            f"Sampled tries, up to {SHOWN_EACH} of each outcome, the first by task name: not picked by hand."
        ),
        trajectories=_trajectories(found, _source_of()),
        next=escape("\n".join(report.next_commands(where)[1:])),
        settings=escape(tree.to_toml(msgspec.to_builtins(where.settings))),
    )


def _online(found: "Online", picture: bytes) -> str:
    text = escape("\n".join(online_report.lines(found)))
    image = base64.b64encode(picture).decode()
    return (
        f"<h2>What users were shown</h2><pre>{text}</pre>"
        f'<img src="data:image/png;base64,{image}" alt="Suggestions by version, calibration, the loop clock">'
    )


def _differences(differences: "Sequence[Difference]") -> str:
    if not differences:
        return "<p>Nothing to compare: the run has no two rounds.</p>"
    head = _row(
        ["mode", "passed", "kind of hole", "tasks", "before → after, points [95 % interval]", ""], cell="th"
    )
    rows = [
        _row(
            [
                item.mode,
                {"any": "on any try", "first": "on the first try"}[item.measure],
                item.kind,
                str(item.tasks),
                report.change_text(item).replace("->", "→"),
                "" if item.significant else "no significant change seen",
            ]
        )
        for item in differences
    ]
    return f"<table>{head}{''.join(rows)}</table>"


def _accounting(found: report.Findings) -> str:
    view = found.view
    rows = [
        ("issued", view.prompts),
        ("trained", view.trained),
        *((f"dropped: {reason}", count) for reason, count in view.drops.most_common()),
        ("not read by the trainer yet", view.in_flight),
        *((f"members withheld: {reason}", count) for reason, count in view.withheld.most_common()),
        ("dead letters on this bus", view.dead),
    ]
    return "<table>" + "".join(_row([name, f"{count:,}"], numbers={1}) for name, count in rows) + "</table>"


def _row(cells: Sequence[str], *, cell: str = "td", numbers: set[int] | None = None) -> str:
    marked = (
        f"<{cell}{' class=n' if index in (numbers or ()) else ''}>{escape(text)}</{cell}>"
        for index, text in enumerate(cells)
    )
    return f"<tr>{''.join(marked)}</tr>"


def pairs(found: report.Findings) -> dict[tuple[bool, bool], list[tuple[Evaluation, Evaluation]]]:
    """The sampled tries of both rounds side by side, by (passed before, passed after), in order of task."""
    later = {(e.task_id, e.sample): e for e in found.after if e.mode == "sampled"}
    sorted_pairs: dict[tuple[bool, bool], list[tuple[Evaluation, Evaluation]]] = {}
    for first in sorted(found.before, key=lambda e: (e.task_id, e.sample)):
        second = later.get((first.task_id, first.sample))
        if first.mode == "sampled" and second is not None:
            sorted_pairs.setdefault((first.passed, second.passed), []).append((first, second))
    return sorted_pairs


def _trajectories(found: report.Findings, source_of: Callable[[str], str]) -> str:
    parts = []
    grouped = pairs(found)
    for outcome, title in OUTCOMES:
        matching = grouped.get(outcome, [])
        parts.append(f"<h3>{escape(title)}: {len(matching)} of {sum(map(len, grouped.values()))}</h3>")
        tasks: set[str] = set()
        for first, second in matching:
            if len(tasks) < SHOWN_EACH and first.task_id not in tasks:
                tasks.add(first.task_id)
                parts.append(_pair(first, second, source_of(first.task_id)))
    return "".join(parts)


def _pair(first: Evaluation, second: Evaluation, source: str) -> str:
    return (
        f"<details open><summary>{escape(first.task_id)}</summary>{source}"
        f'<div class="pair">{_tries(first)}{_tries(second)}</div></details>'
    )


def _tries(evaluation: Evaluation) -> str:
    outcome = "pass" if evaluation.passed else "fail"
    lines = []
    for number, turn in enumerate(evaluation.turns, 1):
        call = turn.call.removeprefix("<|call|>").removesuffix("<|end|>").strip()
        lines.append(f"try {number}: {call}")
        if turn.result:
            lines.append(f"       {turn.result}")
    return (
        f'<div><span class="{outcome}">v{evaluation.version}: {escape(evaluation.finish)}</span>'
        f"<pre>{escape(chr(10).join(lines))}</pre></div>"
    )


def _source_of() -> Callable[[str], str]:
    """Task id to its function in HTML, the hole marked; a note where the installed source can't be read."""
    try:
        from headrace.envs.tasks import TaskSet
        from headrace.policy.source import restore

        tasks = TaskSet.load("heldout")
    except HeadraceError as error:
        note = f'<p class="dim">{escape(str(error))}</p>'
        return lambda task_id: note

    def source(task_id: str) -> str:
        try:
            task = tasks.task(task_id)
        except HeadraceError as error:
            return f'<p class="dim">{escape(str(error))}</p>'
        hole = "\ue000"  # a private character: it survives `restore` and is in no source
        text = escape(restore(f"{task.prefix} {hole}{task.suffix}"))
        return f"<pre>{text.replace(hole, '<mark>&nbsp;?&nbsp;</mark>')}</pre>"

    return source

"""What a chaos run comes to, as a page's section: faults, what they met, how it went on, and the verdict."""

import statistics
from collections import Counter
from collections.abc import Iterable

from chaos.faults import BROKER, Kind
from chaos.play import BREATH_S, Done, Story
from chaos.verdict import Verdict
from chaos.whole import Outcome

SIGNALS: dict[Kind, str] = {"kill": "SIGKILL", "pause": "SIGSTOP, SIGCONT", "stop": "SIGTERM, start"}


def rendered(outcome: Outcome) -> str:
    """Markdown."""
    story, at_cut, at_end, wrong = outcome.story, outcome.at_cut, outcome.at_end, outcome.wrong
    parts = [
        _faults(story.done),
        _doing(story.done),
        _recoveries(story.done),
        _figures(story, at_cut, at_end),
        f"Outcome: **{'every check holds' if not wrong else f'{len(wrong)} checks fail'}**",
        *(f"- {sentence}" for sentence in wrong),
    ]
    return "\n\n".join(parts[:5]) + "\n" + "\n".join(parts[5:])


def _faults(done: list[Done]) -> str:
    kinds: list[Kind] = [kind for kind in SIGNALS if any(one.fault.kind == kind for one in done)]
    counts = Counter((one.fault.target, one.fault.kind) for one in done)
    names = sorted({one.fault.target for one in done})
    rows = [[name, *(str(counts[name, kind]) for kind in kinds)] for name in names]
    total = ["all", *(str(sum(one.fault.kind == kind for one in done)) for kind in kinds)]
    return _table(["process", *(SIGNALS[kind] for kind in kinds)], [*rows, total])


def _doing(done: list[Done]) -> str:
    counts = Counter((one.fault.target.partition("-")[0], one.doing) for one in done)
    return _table(
        ["hit while", "was at", "faults"], [[*what, str(count)] for what, count in sorted(counts.items())]
    )


def _recoveries(done: list[Done]) -> str:
    """Seconds until the victim said that it works, and until the ledger had its next step."""
    rows = []
    for name in sorted({one.fault.target.partition("-")[0] for one in done}):
        of = [one for one in done if one.fault.target.partition("-")[0] == name and one.fault.kind != "pause"]
        if not of:
            continue
        working = [one.working_s for one in of if one.working_s is not None]
        rows.append(
            [
                name,
                str(len(of)),
                str(len(of) - len(working)),
                *_spread(working),
                *_spread(one.step_s for one in of if one.step_s is not None),
            ]
        )
    head = ["killed or restarted", "times", "hit again before it worked"]
    return _table([*head, "works again p50 s", "max s", "next step p50 s", "max s"], rows)


def _figures(story: Story, at_cut: Verdict, at_end: Verdict) -> str:
    brokers = [one for one in story.done if one.fault.target == BROKER and one.fault.kind != "pause"]
    rows = [
        ["faults", f"{len(story.done)} in {story.faults_s:.0f} s, {story.kills} of them SIGKILL"],
        ["steps while it was hurt", str(story.steps_at_cut)],
        [f"waits for a step, after {BREATH_S:.0f} s without one", str(story.breaths)],
        ["at the cut", _account(at_cut)],
        ["at the end", _account(at_end)],
        ["from the cut to the end", f"{story.drain_s:.0f} s"],
        ["steps computed again from the seed, equal", str(at_end.steps)],
        ["processes that ended by themselves", "; ".join(story.own_deaths) or "none"],
    ]
    if brokers:
        killed = sum(one.fault.kind == "kill" for one in brokers)
        rows.insert(1, ["broker restarts", f"{killed} by SIGKILL, {len(brokers) - killed} by SIGTERM"])
    return _table(["", ""], rows)


def _account(verdict: Verdict) -> str:
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(verdict.dropped.items()))
    flying = ", ".join(f"{place} {count}" for place, count in sorted(verdict.in_flight.items()))
    return (
        f"step {verdict.steps}: {verdict.issued} prompts = {verdict.trained} trained"
        f" + {sum(verdict.dropped.values())} dropped ({dropped or 'none'})"
        f" + {sum(verdict.in_flight.values())} in flight ({flying or 'none'})"
    )


def _spread(values: Iterable[float]) -> tuple[str, str]:
    found = list(values)
    return (f"{statistics.median(found):.1f}", f"{max(found):.1f}") if found else ("-", "-")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

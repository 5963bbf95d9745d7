"""The live half of a run's report: a table, its plots, and the same for `--json`.

What was measured on held-out files comes with paired intervals (`producers.figures`); what users lived
through comes from the log (`cli.online_view`). A figure that is not there is `-`, not a guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.bus.protocol import Bus
from headrace.cli import measure, online_view, planting
from headrace.cli.online_loop import Phases, phases_of
from headrace.cli.online_view import OnlineView, quantile
from headrace.cli.options import Place
from headrace.errors import ConfigError
from headrace.wire.records import TIME_MS_MAX, WeightsPromoted, WeightsRevoked

if TYPE_CHECKING:
    from headrace.producers.figures import Bin, Change, Interval

EDGES = (0.0, 0.05, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
CLOCK_TARGET_S = 60
PLACES_MIN = 50
"""Below, no threshold is told."""


@dataclass(frozen=True, slots=True)
class Online:
    """`change`, `break_even`, `thresholds` and `bins` are None without both rounds on held-out files."""

    view: OnlineView
    phases: Phases
    planted: list[int]
    versions: tuple[int, int]
    tries: int
    change: "Change | None"
    break_even: float | None
    thresholds: "tuple[Interval, Interval] | None"
    bins: "tuple[list[Bin], list[Bin]] | None"


async def gather(bus: Bus, where: Place) -> Online | None:
    """None for a run without live suggestions."""
    import asyncio

    view = await online_view.view(bus, where.settings.run.name)
    if not view.answers:
        return None
    before, after = (measure.read(where.home, name) for name in ("before", "after"))
    bad = planting.planted(where.home)
    return await asyncio.to_thread(_found, view, phases_of(where.home), bad, before, after)


def _found(
    view: OnlineView,
    phases: Phases,
    bad: list[int],
    before: measure.Measured | None,
    after: measure.Measured | None,
) -> Online:
    if before is None or after is None or len(before.tries) != len(after.tries):
        return Online(view, phases, bad, (0, 0), 0, None, None, None, None)
    from headrace.producers import figures

    accept = _by_place(before, "accepted")
    shares = [_by_place(side, "shown") for side in (before, after)]
    # What is accepted at a place is known where the version before showed something there.
    places = [place for place in accept if place in shares[1]]
    chances = [accept[place] for place in places]
    shown = [[share[place] for place in places] for share in shares]
    try:
        change = figures.change(before.tries, after.tries)  # type: ignore[arg-type]  # the same fields
    except ConfigError:  # one of them shows nothing
        change = None
    thresholds = None
    if len(places) >= PLACES_MIN:
        thresholds = figures.threshold(chances, shown[0]), figures.threshold(chances, shown[1])
    return Online(
        view,
        phases,
        bad,
        (before.version, after.version),
        len(before.tries),
        change,
        before.break_even,
        thresholds,
        (figures.bins(chances, shown[0], EDGES), figures.bins(chances, shown[1], EDGES)) if places else None,
    )


def _by_place(side: measure.Measured, what: str) -> dict[str, float]:
    """Mean over the tries of each place; `accepted` over those that showed something."""
    values: dict[str, list[float]] = {}
    for item in side.again:
        if what == "shown" or item.shown:
            values.setdefault(item.name, []).append(float(getattr(item, what)))
    return {place: sum(found) / len(found) for place, found in values.items()}


def lines(found: Online) -> list[str]:
    """The table at the end of an online demo."""
    view = found.view
    trained, taken = view.admitted, view.consumed
    first, last = found.versions
    told = [
        f"live: {len(view.answers):,} suggestions asked for, {taken['live']:,} read by the trainer, "
        f"{trained['live']:,} trained beside {trained['sim']:,} groups in {view.steps} steps",
        "",
    ]
    if found.change is not None:
        told += [
            f"held-out files, the same {found.tries:,} places and users, weights v{first} -> v{last}:",
            *_measured(found, found.change),
            "",
        ]
    told += _times(found)
    if found.phases.planted:
        told += ["", *_planted(found)]
    else:
        told += _revoked(found)
    return told


def _measured(found: Online, change: "Change") -> list[str]:
    """The brackets hold 95 % intervals."""
    before, after = change.before, change.after
    told = [
        f"  shown per request   {_percent(before.shown)} -> {_percent(after.shown)}: "
        f"{_relative(change.fewer, -1)}",
        f"  accepted of shown   {_percent(before.accepted)} -> {_percent(after.accepted)}: "
        f"{_relative(change.higher)}",
        f"  reward per request  {before.reward.value:+.3f} -> {after.reward.value:+.3f}: "
        f"{change.reward.value:+.3f} [{change.reward.low:+.3f}, {change.reward.high:+.3f}]",
    ]
    if found.thresholds is not None and found.break_even is not None:
        first, last = map(_chance, found.thresholds)
        told.append(
            f"  shows from a chance of an accept of {first} -> {last}; it pays from "
            f"{100 * found.break_even:.0f} %"
        )
    return told


def _percent(interval: "Interval") -> str:
    return f"{100 * interval.value:.1f} %"


def _relative(interval: "Interval", sign: int = 1) -> str:
    low, high = sorted((sign * interval.low, sign * interval.high))
    return f"{100 * sign * interval.value:+.1f} % of it [{100 * low:+.1f}, {100 * high:+.1f}]"


def _chance(interval: "Interval") -> str:
    """A threshold outside 0 to 1 is none: it shows everywhere, or nowhere."""
    if interval.value <= 0:
        return "0 % (it shows everywhere)"
    if interval.value >= 1:
        return "100 % (it shows nowhere)"
    low, high = max(0.0, interval.low), min(1.0, interval.high)
    return f"{100 * interval.value:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def _times(found: Online) -> list[str]:
    view, phases = found.view, found.phases
    clock = view.clock_ms()
    rows = (
        (
            f"accept -> weights trained on it served, s (target {CLOCK_TARGET_S})",
            sorted(served for served, _ in clock),
            1000.0,
        ),
        (
            "accept -> first suggestion of such weights, s",
            sorted(made for _, made in clock if made is not None),
            1000.0,
        ),
        ("live lane with rollouts beside it, ms", view.latencies_ms(*phases.with_rollouts), 1.0),
        ("live lane without rollouts, ms", view.latencies_ms(*phases.without_rollouts), 1.0),
    )
    width = max(len(name) for name, _, _ in rows)
    return [
        f"{name:<{width}}  p50 {_over(quantile(values, 0.5), unit)}"
        f"  p99 {_over(quantile(values, 0.99), unit)}  of {len(values):,}"
        for name, values, unit in rows
    ]


def _over(value: int | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.1f}" if unit > 1 else str(value)


def _planted(found: Online) -> list[str]:
    """What became of the bad versions, and which good one came after them."""
    view, bad = found.view, sorted(set(found.planted))
    name = f"planted: {found.phases.planted}"
    if not bad:
        return [f"{name}: the run ended before a version was announced with it"]
    made = [live for live in view.answers if live.version in bad]
    versions = f"{name} as version {bad[0]}" if len(bad) == 1 else f"{name} as versions {bad[0]} to {bad[-1]}"
    back = [(at_ms, r) for at_ms, r in view.decisions if isinstance(r, WeightsRevoked) and r.version in bad]
    if not back:
        return [f"{versions}: NOT taken back; {len(made):,} suggestions were made by them"]
    told = [f"{versions}: {_back(view, *back[0])}", f"evidence: {back[0][1].evidence}"]
    told += [f"tried before good ones came: {_back(view, at_ms, record)}" for at_ms, record in back[1:]]
    good = _good_again(found, back[0][0])
    if good is None:
        return [*told, "no good version was given to everybody before the run ended"]
    at_ms, version = good
    before = _made(view, version, at_ms)
    return [*told, f"version {version}, a good one, given to everybody after {before:,} suggestions"]


def _back(view: OnlineView, at_ms: int, record: WeightsRevoked) -> str:
    before, in_all = _made(view, record.version, at_ms), _made(view, record.version)
    return (
        f"version {record.version} taken back by {record.by} after {before:,} suggestions, "
        f"{in_all - before:,} came later"
    )


def _made(view: OnlineView, version: int, until_ms: int = TIME_MS_MAX) -> int:
    return sum(live.version == version and live.at_ms <= until_ms for live in view.answers)


def _good_again(found: Online, since_ms: int) -> tuple[int, int] | None:
    """(broker time, version): the first that was not planted and was given to everybody after `since_ms`."""
    for at_ms, record in found.view.decisions:
        given = isinstance(record, WeightsPromoted) and record.share == 1.0 and at_ms >= since_ms
        if given and record.version not in found.planted:
            return at_ms, record.version
    return None


def _revoked(found: Online) -> list[str]:
    return [
        f"version {record.version} was taken back by {record.by}: {record.evidence}"
        for _, record in found.view.decisions
        if isinstance(record, WeightsRevoked)
    ]


def document(found: Online) -> dict[str, Any]:
    """The same for `--json`."""
    import msgspec

    clock = found.view.clock_ms()
    return {
        "suggestions": len(found.view.answers),
        "admitted": dict(found.view.admitted),
        "consumed": dict(found.view.consumed),
        "change": msgspec.to_builtins(found.change) if found.change else None,
        "break_even": found.break_even,
        "thresholds": msgspec.to_builtins(found.thresholds) if found.thresholds else None,
        "clock_ms": {
            "accepts": len(clock),
            "p50": quantile(sorted(served for served, _ in clock), 0.5),
            "p99": quantile(sorted(served for served, _ in clock), 0.99),
        },
        "latency_ms": {
            name: {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "of": len(values)}
            for name, values in (
                ("with_rollouts", found.view.latencies_ms(*found.phases.with_rollouts)),
                ("without_rollouts", found.view.latencies_ms(*found.phases.without_rollouts)),
            )
        },
        "by_version": {
            version: {
                "asked": shown.asked,
                "shown": shown.shown,
                "silent": shown.silent,
                "accept_rate": shown.accept_rate,
                "reward": shown.reward_each,
            }
            for version, shown in found.view.by_version().items()
        },
        "planted": found.phases.planted,
        "planted_versions": found.planted,
        "revoked": [r.version for _, r in found.view.decisions if isinstance(r, WeightsRevoked)],
    }


def curves(found: Online, bins_max: int = 24) -> list[tuple[float, float, float]]:
    """(mean version, shown share, accept rate) over stretches of versions with about as many suggestions
    each."""
    versions = list(found.view.by_version().items())
    wanted = max(1, sum(shown.asked for _, shown in versions) // bins_max)
    points: list[tuple[float, float, float]] = []
    part: list[tuple[int, online_view.Shown]] = []
    for item in versions:
        part.append(item)
        if sum(shown.asked for _, shown in part) >= wanted:
            points.append(_point(part))
            part = []
    return points + ([_point(part)] if part else [])


def _point(part: Sequence[tuple[int, online_view.Shown]]) -> tuple[float, float, float]:
    asked = sum(shown.asked for _, shown in part)
    seen = sum(shown.shown for _, shown in part)
    mean = sum(version * shown.asked for version, shown in part) / asked
    return mean, seen / asked, sum(shown.accepted for _, shown in part) / max(seen, 1)

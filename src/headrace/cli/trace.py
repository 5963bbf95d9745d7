"""`headrace trace ID`: the whole life of a group by topic and offset, in the order of broker time.

The text of its turns is `headrace trajectory`'s. A key leads to everything but an event's id: only for one
that does not begin with its group the whole log is read, with progress.
"""

import argparse
import difflib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.bus.protocol import Bus
from headrace.cli import options, shown
from headrace.cli.reading import Progress, Told, event_id, whole_log
from headrace.cli.story import OWN, Story, find
from headrace.errors import ConfigError, WireError
from headrace.wire import records as r
from headrace.wire.codec import at
from headrace.wire.topics import EXPOSURES, PROMPTS, TOPICS

DETAIL = """ID is a group (demo-0000042), one rollout of it (demo-0000042/3), a suggestion, or the id of an
event (header ce_id). Shown: written, rolled out (each turn, with the weights of its tokens), rewarded,
joined, trained or dropped and why, announced, served; dead letters of it too. Of a suggestion also what
its editor said (`late`: after it was judged). `since` counts from its first record. Served: each replica's
first weights with the unit in them. Ids of suggestions: headrace tail exposures."""

NEAREST_OF = 5_000
"""Newest group ids among which a misspelt one is looked for."""
STATIONS = ("wait", "roll out", "judge", "join", "queue and train", "announce", "serve")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="group, GROUP/MEMBER, suggestion, or event id")
    options.run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return options.with_bus(lambda bus, _: _trace(bus, args), options.place(args))


@dataclass(frozen=True, slots=True)
class Found:
    """What an id on the command line is."""

    story: Story
    member: int | None = None
    event: str = ""
    """The event that was asked for."""


async def _trace(bus: Bus, args: argparse.Namespace) -> int:
    found = await resolve(bus, args.id)
    if args.json:
        options.print_json(document(found))
        return 0
    for line in lines(found):
        print(line)
    return 0


async def resolve(bus: Bus, name: str) -> Found:
    """The story behind an id. Raises ConfigError for one that the log does not know, with the nearest."""
    if not name:
        raise ConfigError("ID: expected a group, GROUP/MEMBER, suggestion, or event id, got ''")
    story = await find(bus, name)
    if story.told:
        return Found(story)
    group_id, _, member = name.rpartition("/")
    if group_id and member.isdecimal():
        story = await find(bus, group_id)
        if story.told:
            if int(member) not in story.members():
                raise ConfigError(f"group {group_id!r}: expected a member of {story.members()}, got {member}")
            return Found(story, int(member))
    first = name.partition("/")[0]
    if first != name:
        story = await find(bus, first)
        if any(item.event_id == name for item in story.told):
            return Found(story, event=name)
    return await _by_event(bus, name)


async def _by_event(bus: Bus, name: str) -> Found:
    """Reads the whole log for the event. Raises ConfigError when it isn't there."""
    topics = {topic: parts for topic, parts in (await bus.topics()).items() if topic in TOPICS}
    progress = Progress(
        "looking for the event", sum(info.records for parts in topics.values() for info in parts)
    )
    groups, suggestions = (deque[str](maxlen=NEAREST_OF) for _ in range(2))
    hit = None
    async for delivery in whole_log(bus, topics, progress):
        key = (delivery.key or b"").decode(errors="replace")
        if event_id(delivery) == name:
            hit = delivery
            break
        if delivery.topic == PROMPTS.name:
            groups.append(key)
        elif delivery.topic == EXPOSURES.name:
            suggestions.append(key)
    progress.close()
    if hit is None:
        raise ConfigError(_unknown(name, list(groups), list(suggestions)))
    key = (hit.key or b"").decode(errors="replace")
    if hit.topic not in OWN:
        raise ConfigError(
            f"event {name!r}: expected one of a group, found {hit.place} (key {key!r}): "
            f"headrace tail {hit.topic} --from {hit.partition}@{hit.offset} -n 1"
        )
    return Found(await find(bus, key), event=name)


def _unknown(name: str, groups: list[str], suggestions: list[str]) -> str:
    near = difflib.get_close_matches(name, groups + suggestions, n=1, cutoff=0.6)
    known = [f"groups here are {min(groups)!r} to {max(groups)!r}"] if groups else []
    known += [f"a suggestion here is {suggestions[-1]!r} (headrace tail exposures)"] if suggestions else []
    hint = f"did you mean {near[0]!r}?" if near else ", ".join(known) or "there are none on this bus"
    return f"unknown id {name!r}: no group, rollout, suggestion or event has it: {hint}"


def stations(found: Found) -> Iterator[tuple[Told, str, str]]:
    """(record, station, what it says) of the story, one member's own records only when one was asked for."""
    for item in found.story.told:
        record = item.record
        member = getattr(record, "member", None)
        if found.member is not None and member is not None and member != found.member:
            continue
        yield item, *_station(found.story, item, found.member)


def _station(story: Story, item: Told, member: int | None) -> tuple[str, str]:
    match item.record:
        case r.Prompt() as prompt:
            return "written", (
                f"{prompt.task_id} ({prompt.env}), {prompt.group_size} members, "
                f"admitted at v{prompt.weights_version}, region {prompt.region}"
            )
        case r.RolloutStep() as step:
            count = len(step.tokens_out) // 4
            spans = f"v{step.weights_version}"
            if len(step.spans) > 1:
                spans = ", ".join(f"{s.start}-{s.end} v{s.weights_version}" for s in step.spans)
            end = f", {step.finish}" if step.last else ""
            return "rolled out", (
                f"member {step.member} turn {step.step}: {count} tokens ({spans}){end}, "
                f"by {step.worker or '-'}{_attempt(story, step.attempt)}"
            )
        case r.GroupFailed() as failed:
            return "given up", f"{failed.reason}, by {failed.worker or '-'}{_attempt(story, failed.attempt)}"
        case r.Reward() as reward:
            judged = "quarantine" if reward.verdict == "quarantine" else f"{reward.value:g}"
            again = _attempt(story, reward.attempt)
            return "rewarded", f"member {reward.member} {reward.component} = {judged}{again}"
        case r.Feedback() as signal:
            judged_ms = min((reward.at_ms for reward in story.of(r.Reward)), default=item.at_ms)
            return "signal", f"{_said(signal)}{', late' if item.at_ms > judged_ms else ''}"
        case r.Exposure() as exposure:
            side = f" as {exposure.cohort}" if exposure.cohort else ""
            return "compared", f"v{exposure.version}{side}: {_seen(exposure)}"
        case r.Experience() as experience:
            missing = f", members missing: {_numbers(experience.missing)}" if experience.missing else ""
            why = f": {experience.reason}" if experience.reason else ""
            rewards = ", ".join("-" if x.reward is None else f"{x.reward:g}" for x in experience.rollouts)
            claim = f", {shown.size(experience.claim.bytes)} by claim check" if experience.claim else ""
            return "joined", f"{experience.closed}{why}{missing}, rewards {rewards or '-'}{claim}"
        case r.TrainStep() as trained:
            return _answer(story, trained, member)
        case r.WeightsPublished() as announced:
            sizes = ", ".join(f"{e.kind} {shown.size(e.bytes)}" for e in announced.encodings)
            return "announced", f"v{announced.version} root {announced.root[:12]}, {sizes}"
        case r.WeightsPromoted() as promoted:
            return "promoted", f"v{promoted.version} to {100 * promoted.share:g} % {promoted.evidence}"
        case r.WeightsRevoked() as revoked:
            return "revoked", f"v{revoked.version} {revoked.evidence}"
        case r.WeightsAck() as ack:
            what = "served" if ack.outcome == "serving" else "refused"
            detail = f", {ack.detail}" if ack.detail else ""
            return what, f"v{ack.version} at {ack.region}/{ack.replica}, pause {ack.pause_ms:.1f} ms{detail}"
        case r.DeadLetter() as letter:
            origin = at(letter.topic, letter.partition, letter.offset)
            return "dead letter", f"of {origin}, by {letter.by}: {shown.shortened(letter.reason, 160)}"
        case WireError() as error:
            return "unreadable", str(error)
        case other:
            return "other", type(other).__name__


def _said(signal: r.Feedback) -> str:
    told: list[str] = [signal.kind]
    if signal.accepted_length is not None:
        told.append(f"{signal.accepted_length} characters")
    if signal.persisted_s is not None:
        told.append(f"after {signal.persisted_s} s")
    if signal.difference is not None:
        told.append(f"{100 * signal.difference:.3g} % changed")
    told += [f"superseded by {signal.superseded_by}"] if signal.superseded_by else []
    told += [f"continues {signal.continues}"] if signal.continues else []
    return ", ".join(told)


def _seen(exposure: r.Exposure) -> str:
    if exposure.silent:
        return "silent"
    accepted = f"{100 * exposure.accepted:.3g} % accepted" if exposure.accepted else "not accepted"
    return f"shown, {accepted}" if exposure.shown else "not shown"


def _answer(story: Story, step: r.TrainStep, member: int | None) -> tuple[str, str]:
    if story.group_id not in step.admitted:
        return (
            "dropped",
            f"step {step.step}: {', '.join(sorted(story.reasons(step))) or 'no reason recorded'}",
        )
    withheld = story.withheld(step)
    if member is not None:
        withheld = {number: why for number, why in withheld.items() if number == member}
        if withheld:
            return "withheld", f"step {step.step}: member {member}: {withheld[member]}"
    by_reason = [
        f"; withheld: {reason} {_numbers([m for m, why in withheld.items() if why == reason])}"
        for reason in sorted(set(withheld.values()))
    ]
    return "trained", f"step {step.step}: v{step.version_from} to v{step.version_to}{''.join(by_reason)}"


def _attempt(story: Story, attempt: int) -> str:
    """Which try, where there were several: attempts are named by their time, so they are counted here."""
    known = sorted({step.attempt for step in story.steps} | {f.attempt for f in story.failures})
    return (
        f", attempt {known.index(attempt) + 1} of {len(known)}" if attempt in known[:-1] + known[1:] else ""
    )


def _numbers(numbers: Any) -> str:
    return ", ".join(map(str, numbers))


def durations(story: Story) -> list[tuple[str, int]]:
    """(part of the way, milliseconds) between the stations that were reached, by broker time."""
    first = {kind: min((i.at_ms for i in story.of(kind)), default=None) for kind in _KINDS}
    last = {kind: max((i.at_ms for i in story.of(kind)), default=None) for kind in _KINDS}
    ways = (
        (first[r.Prompt], first[r.RolloutStep]),
        (first[r.RolloutStep], last[r.RolloutStep]),
        (last[r.RolloutStep], last[r.Reward]),
        (last[r.Reward], first[r.Experience]),
        (first[r.Experience], first[r.TrainStep]),
        (first[r.TrainStep], first[r.WeightsPublished]),
        (first[r.WeightsPublished], first[r.WeightsAck]),
    )
    return [
        (name, end - start)
        for name, (start, end) in zip(STATIONS, ways, strict=True)
        if start is not None and end is not None and end >= start  # clocks of brokers may differ
    ]


_KINDS = (
    r.Prompt,
    r.RolloutStep,
    r.Reward,
    r.Experience,
    r.TrainStep,
    r.WeightsPublished,
    r.WeightsAck,
)


def lines(found: Found) -> list[str]:
    """The way as a person reads it."""
    from headrace.cli.tables import draw

    story = found.story
    first_ms = story.told[0].at_ms
    member = "" if found.member is None else f", member {found.member}"
    ways = durations(story)
    head = [
        f"{'suggestion' if story.live else 'group'} {story.group_id}{member}",
        f"  fate   {story.fate(found.member)}",
        f"  first  {shown.clock(first_ms)}",
    ]
    if ways:
        head.append(f"  took   {shown.duration(story.told[-1].at_ms - first_ms)}, of it")
        head += [f"         {shown.duration(ms):>9}  {name}" for name, ms in ways]
    if story.cut:
        head.append(f"  cut    more than {len(story.told)} records under this key: the others are left out")
    rows = [
        (
            ("* " if found.event and item.event_id == found.event else "") + station,
            f"+{(item.at_ms - first_ms) / 1000:,.3f} s",
            item.place,
            what,
        )
        for item, station, what in stations(found)
    ]
    return [*map(shown.printable, head), "", *draw(("station", ">since", "where", "~what"), rows)]


def document(found: Found) -> dict[str, Any]:
    """The same for `--json`."""
    story = found.story
    return {
        "group_id": story.group_id,
        "member": found.member,
        "event": found.event or None,
        "fate": story.fate(found.member),
        "durations_ms": dict(durations(story)),
        "cut": story.cut,
        "stations": [
            {
                "station": station,
                "at_ms": item.at_ms,
                "place": item.place,
                "event_id": item.event_id,
                "what": what,
            }
            for item, station, what in stations(found)
        ],
    }

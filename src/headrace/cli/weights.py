"""`headrace weights list|promote|revoke|pin|unpin`: versions, who is served which, and a person's word on it.

What is said here is a record on `weights`, like the canary's: relays follow within a second, and the log
keeps who said what. Not here: what the records mean together (`wire.release`), judging (`streams.release`).
"""

import argparse
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.bus.protocol import Bus, Message
from headrace.cli import options, shown, tables
from headrace.cli.options import Place
from headrace.clock import SystemClock
from headrace.errors import ConfigError, WireError
from headrace.streams import canary
from headrace.wire.codec import decode, encode
from headrace.wire.records import Record, WeightsAck, WeightsPromoted, WeightsPublished, WeightsRevoked
from headrace.wire.release import Mode, Release
from headrace.wire.topics import WEIGHTS, WEIGHTS_ACKS

DETAIL = """Live users are served each version as it is published (release.mode immediate), or by stages that
`headrace canary` decides on (gradual). By hand: promote gives a version to everybody (gradual; with --share
to a part of the users), revoke takes one back at once, pin holds everybody at one version until unpin."""
LISTED = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    listing = acts.add_parser("list", help="versions, newest first: state, replicas that serve them, why")
    listing.add_argument("--all", action="store_true", help=f"all of them, not the newest {LISTED}")
    lines = {
        "promote": "serve a version to live users",
        "revoke": "take a version back at once",
        "pin": "serve one version to all live users, whatever the canary says, until unpin",
        "unpin": "end a pin",
    }
    for name, line in lines.items():
        act = acts.add_parser(name, help=line)
        act.add_argument("version", metavar="VERSION", type=_version)
        act.add_argument("--why", default="", help="kept with the record")
        if name == "promote":
            act.add_argument("--share", type=_share, default=1.0, help="of the users, above 0 to 1")
        options.run_arguments(act)
    options.run_arguments(listing)


def run(args: argparse.Namespace) -> int:
    where = options.place(args)
    act = _list if args.act == "list" else _say
    return options.with_bus(lambda bus, _: act(bus, where, args), where)


@dataclass(slots=True)
class Known:
    """What `weights` and `weights.acks` say of a run."""

    release: Release = field(default_factory=Release)
    published: dict[int, WeightsPublished] = field(default_factory=dict)
    last: dict[int, WeightsPromoted | WeightsRevoked] = field(default_factory=dict)
    serving: dict[tuple[str, str], WeightsAck] = field(default_factory=dict)
    """By region/replica and role: the newest acknowledgement."""
    unfit: set[int] = field(default_factory=set)

    def state(self, version: int, mode: Mode) -> str:
        """In words: what live users get of it."""
        release, serving = self.release, self.release.serving(mode)
        if version in release.revoked:
            return "revoked"
        if version in self.unfit:
            return "unfit"
        if version == release.pinned:
            return "pinned: all users"
        if version == serving.canary:
            return f"canary: {serving.share:.0%} of users"
        if version == serving.stable:
            return "stable: all other users" if serving.canary is not None else "stable: all users"
        if serving.stable is None and version == release.newest:
            return "newest: all users"
        if version in release.stable:
            return "was stable"
        return "newest: rollouts" if version == release.newest else "published"

    def users_have(self, mode: Mode) -> int | None:
        """The version of all live users but a canary's."""
        stable = self.release.serving(mode).stable
        return self.release.newest if stable is None else stable

    def replicas(self, version: int) -> list[str]:
        """`local/inference-0 canary`: who said last that it serves the version."""
        found = [
            f"{place} {role}".strip()
            for (place, role), ack in self.serving.items()
            if (ack.version, ack.outcome) == (version, "serving")
        ]
        return sorted(found)


async def known(bus: Bus, run_name: str) -> Known:
    """Both topics from their beginning. A record that can't be read is passed over: the relay has put it into
    the dead letters."""
    found = Known()
    names = [WEIGHTS.name, WEIGHTS_ACKS.name]
    begins, ends = await bus.begins(names), await bus.ends(names)
    for tp, end in ends.items():
        async for delivery in bus.read_range(tp, begins[tp], end):
            try:
                record = decode(delivery.topic, delivery.value or b"", delivery.headers)
            except WireError:
                continue
            if getattr(record, "run", None) == run_name:
                _take(found, record)
    return found


def _take(found: Known, record: Record) -> None:
    found.release.learn(record)
    match record:
        case WeightsPublished():
            found.published[record.version] = record
        case WeightsPromoted() | WeightsRevoked():
            found.last[record.version] = record
        case WeightsAck():
            if record.unfit:
                found.unfit.add(record.version)
            if record.outcome == "serving":
                found.serving[f"{record.region}/{record.replica}", record.role] = record


async def _list(bus: Bus, where: Place, args: argparse.Namespace) -> int:
    settings = where.settings
    found = await known(bus, settings.run.name)
    mode = settings.release.mode
    stuck = await canary.found_stuck(bus, settings.run.name, settings.canary) if mode == "gradual" else None
    versions = sorted(found.published, reverse=True)[: None if args.all else LISTED]
    if args.json:
        serving = found.release.serving(mode)
        options.print_json(
            {
                "mode": mode,
                "stable": serving.stable,
                "canary": serving.canary,
                "share": serving.share,
                "pinned": found.release.pinned,
                "newest": found.release.newest,
                "revoked": found.release.revoked,
                "stuck": None if stuck is None else msgspec.to_builtins(stuck),
                "versions": [_document(found, version, mode) for version in versions],
            }
        )
        return 0
    rows = [
        (
            version,
            found.published[version].step,
            found.published[version].root[:12],
            found.state(version, mode),
            ", ".join(found.replicas(version)) or None,
            _reason(found.last.get(version)),
        )
        for version in versions
    ]
    print(f"release.mode {mode}")
    if stuck is not None:
        hint = f"headrace weights promote {stuck.version} --share SHARE, or revoke {stuck.version}"
        print(f"WARNING: {stuck}: {hint}")
    print("\n".join(tables.draw((">version", ">step", "root", "state", "replicas", "~last word"), rows)))
    if len(versions) < len(found.published):
        print(f"{len(found.published) - len(versions):,} older versions (--all)")
    return 0


def _document(found: Known, version: int, mode: Mode) -> dict[str, Any]:
    record, last = found.published[version], found.last.get(version)
    return {
        "version": version,
        "step": record.step,
        "root": record.root,
        "published_ms": record.published_ms,
        "state": found.state(version, mode),
        "replicas": found.replicas(version),
        "by": last.by if last else None,
        "evidence": _evidence(last.evidence) if last else None,
    }


async def _say(bus: Bus, where: Place, args: argparse.Namespace) -> int:
    """Writes the record. Raises ConfigError when the version is not one of the run's, or it makes no sense
    now."""
    run_name, mode = where.settings.run.name, where.settings.release.mode
    found = await known(bus, run_name)
    version = args.version
    if version not in found.published:
        raise ConfigError(f"{args.act}: {_nearest(version, sorted(found.published))}")
    record = _record(run_name, args, found, mode)
    value, headers = encode(record, source="weights", now_ms=SystemClock().now_ms())
    await bus.produce([Message(WEIGHTS.name, run_name.encode(), value, headers)])
    found.release.learn(record)
    state, users_have = found.state(version, mode), found.users_have(mode)
    if args.json:
        options.print_json({"version": version, "act": args.act, "state": state, "users_have": users_have})
    else:
        left = args.act in ("revoke", "unpin") and users_have not in (version, None)
        print(f"version {version}: {state}{f'; users have {users_have}' if left else ''}")
    return 0


def _record(run_name: str, args: argparse.Namespace, found: Known, mode: Mode) -> Record:
    version, release = args.version, found.release
    words = args.act + (f": {args.why}" if args.why else "")
    if args.act == "revoke":
        if version in release.revoked:
            raise ConfigError(f"revoke: expected a version that is not revoked yet, got {version}")
        return WeightsRevoked(run=run_name, version=version, by="hand", evidence=words)
    if args.act == "promote" and mode == "immediate":
        raise ConfigError(
            "promote: expected release.mode 'gradual', got 'immediate': there the next version published"
            f" serves everybody (headrace weights pin {version} holds it)"
        )
    if args.act == "promote" and version in found.unfit:
        raise ConfigError(f"promote: expected weights that can be served, got {version}: not finite")
    if args.act == "unpin" and release.pinned != version:
        pinned = "none" if release.pinned is None else str(release.pinned)
        raise ConfigError(f"unpin: expected the version that is pinned ({pinned}), got {version}")
    share = args.share if args.act == "promote" else 1.0
    return WeightsPromoted(
        run=run_name, version=version, share=share, pinned=args.act == "pin", by="hand", evidence=words
    )


def _version(text: str) -> int:
    if not text.removeprefix("v").isdecimal():
        raise argparse.ArgumentTypeError(f"expected a version, a whole number from 0, got {text!r}")
    return int(text.removeprefix("v"))


def _share(text: str) -> float:
    """`0.1` or `10%`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a share above 0, up to 1 or 100%, got {text!r}")
    return share


def _nearest(version: int, published: list[int]) -> str:
    if not published:
        return f"expected a published version, got {version}: the run has none yet"
    near = min(published, key=lambda other: (abs(other - version), -other))
    return f"expected a version from {published[0]} to {published[-1]}, got {version}: the nearest is {near}"


def _evidence(text: str) -> Any:
    """The canary's is JSON, a person's is not."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _reason(record: WeightsPromoted | WeightsRevoked | None) -> str | None:
    if record is None:
        return None
    said = _evidence(record.evidence)
    reason = said.get("reason", record.evidence) if isinstance(said, dict) else record.evidence
    return f"{record.by}: {shown.shortened(str(reason), 60)}"

"""`headrace feedback send SUGGESTION KIND` and `headrace feedback replay-log FILE --format vscode`: publish
through the client that plug-ins use.

What no gateway has acknowledged at the end stays in the buffer file and goes out with the next command to the
same gateway.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli import options
from headrace.cli.gateway import addresses_of
from headrace.errors import ConfigError, FeedbackError, WireError

if TYPE_CHECKING:
    from headrace.producers.client import FeedbackClient
    from headrace.rpc.feedback import Event

TOKEN_VARIABLE = "HEADRACE_FEEDBACK_TOKEN"
FORMATS = ("headrace", "tabby", "vscode", "continue", "copilot")
FLUSH_S = 30.0
TELL_S = 2.0
DETAIL = f"""  headrace feedback send SUGGESTION accepted --length 31 --user ada
  headrace feedback replay-log editor.jsonl --format vscode --user ada
SUGGESTION is the id that the completion was asked for with (docs/feedback.md). The token is taken
from ${TOKEN_VARIABLE}. What is not acknowledged within {FLUSH_S:.0f} s (exit code 12) waits in a
file, and goes out with the next command to the same gateway."""
MEASURES: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "persisted_s": (int, "SECONDS", "looked at so long after the accept"),
    "difference": (float, "SHARE", "of the accepted text that is gone by then, 0 to 1"),
    "superseded_by": (str, "SUGGESTION", "the one that took its place"),
    "continues": (str, "SUGGESTION", "the earlier one of which this one shows the rest"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    acts = parser.add_subparsers(dest="act", metavar="send|replay-log", required=True)
    send = acts.add_parser("send", help="one event", allow_abbrev=False)
    send.add_argument("suggestion", metavar="SUGGESTION", help="its id")
    send.add_argument(
        "kind",
        metavar="KIND",
        help="shown, accepted, partially_accepted, rejected, ignored, undone or persisted",
    )
    send.add_argument(
        "--length", type=int, metavar="UTF16", help="accepted so far, in UTF-16 code units from the start"
    )
    for name, (kind, metavar, what) in MEASURES.items():
        send.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=what)
    send.add_argument("--event-id", metavar="ID", help="of the event (default: a new one)")
    replay = acts.add_parser("replay-log", help="a recorded log, one JSON object a line", allow_abbrev=False)
    replay.add_argument("file", metavar="FILE", help="- for standard input")
    replay.add_argument(
        "--format",
        choices=FORMATS,
        default="headrace",
        help="who wrote it (docs/editors/); default: %(default)s",
    )
    replay.add_argument("--with-text", action="store_true", help="publish code too: the user opted in")
    for act in (send, replay):
        act.add_argument(
            "--gateway", metavar="ADDRESS", help="http(s):// or grpc(s)://HOST:PORT (default: the run's own)"
        )
        act.add_argument("--user", default="", help="whom the editor belongs to (default: the token's name)")
        act.add_argument("--client", default="", metavar="NAME/VERSION", help="the editor")
        act.add_argument("--ca-file", type=Path, metavar="PEM", help="whose certificates are trusted")
        act.add_argument(
            "--buffer",
            type=Path,
            metavar="FILE",
            help="what is not acknowledged waits here (default: one a gateway, in ~/.cache/headrace)",
        )
        options.run_arguments(act)


def run(args: argparse.Namespace) -> int:
    from headrace.producers.client import FeedbackClient

    refused: list[str] = []
    address, buffer = _target(args)
    client = FeedbackClient(
        address,
        buffer=buffer,
        user=args.user,
        client=args.client,
        token=os.environ.get(TOKEN_VARIABLE, ""),
        ca_file=args.ca_file,
        events_max=1_000_000,
        on_refused=lambda events: refused.extend(f"{e.event_id}: {reason}" for e, reason in events),
    )
    before = client.status()
    try:
        (_send if args.act == "send" else _replay)(client, args, refused)
        _flush(client)
        after = client.status()
    finally:
        client.close(0.0)
    done = {
        "sent": after.sent - before.sent,
        "refused": len(refused),
        "waiting": after.waiting,
        "error": after.last_error,
        "buffer": str(buffer),
    }
    _tell(done, refused, as_json=args.json)
    return FeedbackError.exit_code if after.waiting or refused else 0


def _tell(done: dict[str, Any], refused: list[str], *, as_json: bool) -> None:
    if as_json:
        options.print_json({**done, "reasons": refused})
        return
    print(f"{done['sent']:,} acknowledged, {done['refused']:,} refused, {done['waiting']:,} still waiting")
    for line in refused[:20]:
        print(f"  refused {line}", file=sys.stderr)
    if done["waiting"]:
        print(f"  waiting: {done['error'] or 'no answer yet'}", file=sys.stderr)
        print(f"  kept in {done['buffer']} for the next command to this gateway", file=sys.stderr)


def _flush(client: "FeedbackClient") -> None:
    """Sends for `FLUSH_S` at most; says what stands in the way as soon as something does."""
    end_s, told = time.monotonic() + FLUSH_S, ""
    while not client.flush(max(0.0, min(TELL_S, end_s - time.monotonic()))):
        error = client.status().last_error
        if error and error != told:
            print(f"headrace: not acknowledged yet, trying for {FLUSH_S:.0f} s: {error}", file=sys.stderr)
            told = error
        if time.monotonic() >= end_s:
            return


def _send(client: "FeedbackClient", args: argparse.Namespace, refused: list[str]) -> None:
    fields = {"accepted_length": args.length, "event_id": args.event_id}
    fields |= {name: getattr(args, name) for name in MEASURES}
    client.publish(
        suggestion_id=args.suggestion,
        kind=args.kind,
        **{name: value for name, value in fields.items() if value is not None},
    )


def _replay(client: "FeedbackClient", args: argparse.Namespace, refused: list[str]) -> None:
    read = _reader(args)
    for number, line in _lines(args.file):
        try:
            for event in read(json.loads(line)):
                client.publish_event(event)
        except (ValueError, RecursionError, WireError, FeedbackError) as error:
            if isinstance(error, FeedbackError) and error.retriable:
                raise
            refused.append(f"{args.file}:{number}: {error}")


def _reader(args: argparse.Namespace) -> "Callable[[Any], list[Event]]":
    """The adapter of a format, with what the command line says of the user."""
    import importlib

    if args.format == "headrace":
        return lambda line: [_own(line, args)]
    name = {"continue": "continue_log"}.get(args.format, args.format)
    adapter = importlib.import_module(f"headrace.producers.adapters.{name}")
    told: dict[str, Any] = {"user": args.user, "client": args.client}
    if args.format != "tabby":  # whose events carry no code
        told["with_text"] = args.with_text
    return lambda line: list(adapter.log_line(line, **told))


def _own(line: object, args: argparse.Namespace) -> "Event":
    import msgspec

    from headrace.rpc.feedback import Event

    event = msgspec.convert(line, Event)
    return msgspec.structs.replace(
        event,
        user=args.user or event.user,
        client=args.client or event.client,
        text=event.text if args.with_text else "",
    )


def _lines(name: str) -> Iterator[tuple[int, bytes]]:
    if name == "-":
        yield from ((n, line) for n, line in enumerate(sys.stdin.buffer, 1) if line.strip())
        return
    with Path(name).open("rb") as file:
        yield from ((n, line) for n, line in enumerate(file, 1) if line.strip())


def _target(args: argparse.Namespace) -> tuple[str, Path]:
    """The gateway's address, and the buffer: by default a file for each gateway, so that nothing that waits
    for one goes to another."""
    if args.gateway:
        address, place = args.gateway, args.gateway
    else:
        home = options.place(args).home
        address, place = f"http://{addresses_of(home)[1]}", str(home.resolve())
    if args.buffer:
        return address, args.buffer
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise ConfigError(f"XDG_CACHE_HOME: expected an absolute path, got {cache!r}")
    name = hashlib.sha256(place.encode(errors="surrogateescape")).hexdigest()[:12]
    return address, Path(cache) / "headrace" / f"feedback-{name}.db"

"""`headrace feedback send SUGGESTION KIND` and `headrace feedback replay-log FILE --format vscode`: publish
through the client that plug-ins use.

What no gateway has acknowledged at the end stays in the buffer file and goes out with the next command.
"""

import argparse
import json
import os
import sys
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
DETAIL = f"""  headrace feedback send SUGGESTION accepted --length 31 --user ada
  headrace feedback replay-log editor.jsonl --format vscode --user ada
The token is taken from ${TOKEN_VARIABLE}."""


def arguments(parser: argparse.ArgumentParser) -> None:
    acts = parser.add_subparsers(dest="act", metavar="send|replay-log", required=True)
    send = acts.add_parser("send", help="one event", allow_abbrev=False)
    send.add_argument("suggestion", metavar="SUGGESTION")
    send.add_argument("kind", metavar="KIND", help="shown, accepted, partially_accepted, rejected, ...")
    send.add_argument("--length", type=int, metavar="UTF16", help="accepted length, cumulative")
    send.add_argument("--event-id", metavar="ID", help="of the event (default: a new one)")
    replay = acts.add_parser("replay-log", help="a recorded log, one JSON object a line", allow_abbrev=False)
    replay.add_argument("file", metavar="FILE", help="- for standard input")
    replay.add_argument("--format", choices=FORMATS, default="headrace")
    replay.add_argument("--with-text", action="store_true", help="publish code too: the user opted in")
    for act in (send, replay):
        act.add_argument(
            "--gateway", metavar="ADDRESS", help="http(s):// or grpc(s)://HOST:PORT (default: the run's own)"
        )
        act.add_argument("--user", default="", help="whom the editor belongs to (default: the token's name)")
        act.add_argument("--client", default="", metavar="NAME/VERSION", help="the editor")
        act.add_argument("--ca-file", type=Path, metavar="PEM", help="whose certificates are trusted")
        act.add_argument("--buffer", type=Path, metavar="FILE", help="what is not acknowledged waits here")
        options.run_arguments(act)


def run(args: argparse.Namespace) -> int:
    from headrace.producers.client import FeedbackClient

    refused: list[str] = []
    client = FeedbackClient(
        args.gateway or f"http://{addresses_of(options.place(args).home)[1]}",
        buffer=args.buffer or _default_buffer(),
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
        client.flush(FLUSH_S)
        after = client.status()
    finally:
        client.close(0.0)
    done = {
        "sent": after.sent - before.sent,
        "refused": len(refused),
        "waiting": after.waiting,
        "error": after.last_error,
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


def _send(client: "FeedbackClient", args: argparse.Namespace, refused: list[str]) -> None:
    fields = {"accepted_length": args.length, "event_id": args.event_id}
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


def _lines(name: str) -> Iterator[tuple[int, str]]:
    if name == "-":
        yield from ((n, line) for n, line in enumerate(sys.stdin, 1) if line.strip())
        return
    with Path(name).open(encoding="utf-8") as file:
        yield from ((n, line) for n, line in enumerate(file, 1) if line.strip())


def _default_buffer() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise ConfigError(f"XDG_CACHE_HOME: expected an absolute path, got {cache!r}")
    return Path(cache) / "headrace" / "feedback.db"

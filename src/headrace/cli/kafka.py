"""`headrace kafka up|down|status`: a real one-node Apache Kafka on this machine, for tests and for trying."""

import argparse
from pathlib import Path

from headrace.cli import options

DETAIL = """Needs Java and, the first time, Maven, which fetches Apache Kafka's jars."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("act", choices=["up", "down", "status"])
    parser.add_argument(
        "--dir",
        type=Path,
        default=options.local_kafka_dir(),
        help="data, logs and pid file of the broker (default: $HEADRACE_KAFKA_DIR, or ./.kafka)",
    )
    parser.add_argument("--port", type=int, default=0, help="of the listener (default: a free one)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    from headrace.bus import local_kafka

    if args.act == "up":
        local_kafka.up(args.dir, port=args.port)
    elif args.act == "down":
        local_kafka.down(args.dir)
    now = local_kafka.status(args.dir)
    if args.json:
        options.print_json({"running": now.running, "address": now.address, "pid": now.pid})
    elif now.running:
        print(f"Apache Kafka {local_kafka.VERSION} answers at {now.address} (its files: {args.dir})")
    else:
        print(f"no broker runs in {args.dir}")
    return 0 if now.running == (args.act != "down") else 1

"""`headrace kafka up|down|status`: a real one-node Apache Kafka on this machine, for tests and for trying."""

import argparse
import os
from pathlib import Path

from headrace.cli import options

DETAIL = """Needs Java and, the first time, Maven, which fetches Apache Kafka's jars."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("act", choices=["up", "down", "status"])
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(os.environ.get("HEADRACE_KAFKA_DIR", ".kafka")),
        help="data, logs and pid file of the broker (default: ./.kafka)",
    )
    parser.add_argument("--port", type=int, default=0, help="of the listener (default: a free one)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    from headrace.bus import local_kafka

    if args.act == "up":
        address: str | None = local_kafka.up(args.dir, port=args.port)
    elif args.act == "down":
        local_kafka.down(args.dir)
        address = None
    else:
        address = local_kafka.status(args.dir)
    if args.json:
        options.print_json({"running": address is not None, "address": address})
    elif address:
        print(f"Apache Kafka answers at {address} (its files: {args.dir})")
    else:
        print("no Kafka runs here" if args.act == "status" else "stopped")
    return 1 if args.act == "status" and address is None else 0

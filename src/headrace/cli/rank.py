"""`headrace rank`: a process that computes training steps together with a trainer of several ranks.

A trainer starts the ranks of its own machine by itself (`--trainer.ranks 2`); this command is what it starts.
"""

import argparse

DETAIL = "Ends when the trainer does. It reads no log and writes nothing."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", required=True, metavar="tcp://HOST:PORT", help="where the trainer waits")
    parser.add_argument("--rank", required=True, type=int, help="from 1 to SIZE - 1")
    parser.add_argument("--size", required=True, type=int, help="ranks, the trainer among them")
    parser.add_argument("--threads", type=int, default=1, help="of torch")


def run(args: argparse.Namespace) -> int:
    from headrace.consumers import ranks
    from headrace.errors import ConfigError

    if not 1 <= args.rank < args.size:
        raise ConfigError(f"--rank: expected 1 to {args.size - 1}, got {args.rank}")
    ranks.help_out(args.address, args.rank, args.size, args.threads)
    return 0

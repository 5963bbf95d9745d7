"""`headrace gateway`: the process that takes editors' feedback; `headrace gateway forget USER` destroys the
key of what a user's events stored.

Its addresses stand in the run directory (`gateway.addresses`: gRPC, HTTP) while it runs.
"""

import argparse
import asyncio
import gc
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli import options
from headrace.cli.files import write_whole
from headrace.cli.options import Place
from headrace.cli.process import run_process
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.producers.config import GatewayConfig

DETAIL = """Serves gRPC (gateway.grpc) and HTTP (gateway.http). Tokens: gateway.tokens_file, or
$HEADRACE_FEEDBACK_TOKENS='NAME TOKEN,...'. Without tokens it serves this machine only.
With `forget USER` it serves nothing: the key of USER's stored code is destroyed, in every copy of the log."""
ADDRESSES = ".addresses"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("forget",), help="instead of serving")
    parser.add_argument("user", nargs="?", metavar="USER", help="whose code nobody shall read any more")
    options.process_arguments(parser, "gateway")


def run(args: argparse.Namespace) -> int:
    where = options.place(args)
    if args.action == "forget":
        return _forget(where, args)
    return run_process(
        args.name,
        where.run_dir,
        lambda stop: _serve(where, args, stop),
        module="headrace.producers.feedback",
        level=args.log_level,
    )


async def _serve(where: Place, args: argparse.Namespace, stop: asyncio.Event) -> None:
    from headrace.producers import feedback
    from headrace.wire.topics import FEEDBACK

    own = None if where.run_dir is None else where.run_dir / f"{args.name}{ADDRESSES}"
    config = where.settings.gateway if own is None else _as_before(where.settings.gateway, own)

    def ready(addresses: feedback.Addresses) -> None:
        if own is not None:
            write_whole(own, f"{addresses.grpc}\n{addresses.http}\n".encode())

    # Events come and go in large numbers and in no cycles: the collector finds nothing, for a quarter of the
    # time of the process (benchmarks/feedback.md) at the usual thresholds.
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    async with options.opened(where) as bus:
        await bus.create_topics([FEEDBACK])
        await feedback.run(bus, where.settings.run, config, stop, ready)


def addresses_of(run_dir: Path, name: str = "gateway") -> tuple[str, str]:
    """Where the gateway of a run listens: gRPC, HTTP. Raises ConfigError."""
    path = run_dir / f"{name}{ADDRESSES}"
    try:
        grpc, http = path.read_text().split()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: expected the addresses of a gateway (headrace gateway): {error}"
        ) from error
    return grpc, http


def _as_before(config: "GatewayConfig", own: Path) -> "GatewayConfig":
    """Free ports become those of the last start, if nobody took them since: editors find it again."""
    import msgspec

    if not own.is_file():
        return config
    grpc, http = addresses_of(own.parent, own.name.removesuffix(ADDRESSES))
    return msgspec.structs.replace(config, grpc=_earlier(grpc, config.grpc), http=_earlier(http, config.http))


def _earlier(earlier: str, configured: str) -> str:
    host, _, port = configured.rpartition(":")
    if port != "0" or earlier.rpartition(":")[0] != host:
        return configured
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(earlier.rpartition(":")[2])))
        except (OSError, ValueError):
            return configured
    return earlier


def _forget(where: Place, args: argparse.Namespace) -> int:
    """0; 1 when no key of the user is there."""
    from headrace.producers import feedback
    from headrace.producers.gateway.text_keys import TextKeys

    if not args.user:
        raise ConfigError("forget: expected the name of a USER, got none")
    config = where.settings.gateway
    path = Path(config.home) / feedback.KEYS_FILE
    pseudonyms = feedback.pseudonyms_of(config)
    user = pseudonyms.of(args.user)
    keys = TextKeys(path) if path.is_file() else None
    gone = keys is not None and keys.forget(user)
    others = [r for r in ([] if keys is None else keys.rotations()) if r != pseudonyms.rotation]
    if others:
        print(
            f"headrace: there are keys under other secrets ({', '.join(others)}), where this user has other "
            "names: forget again with each of those as gateway.secret_file",
            file=sys.stderr,
        )
    if args.json:
        options.print_json({"user": user, "destroyed": gone, "other_secrets": others})
    elif gone:
        print(f"{user}: key destroyed; what this user's events stored under it is unreadable from now on")
    else:
        print(
            f"headrace: {user}: no key: nothing that this user's events stored under it is readable",
            file=sys.stderr,
        )
    return 0 if gone else 1

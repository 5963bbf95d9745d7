"""The feedback gateway: editors' reports over gRPC and HTTP, durable on the topic `feedback` before they are
acknowledged.

    bytes -> door (who, how much) -> intake (checked, pseudonyms) -> writer (the log) -> acknowledgement

Here its parts are put together and their lives end in order. Any number of gateways may run; an editor keeps
to one while it answers.
"""

import asyncio
import contextlib
import logging
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from headrace import log
from headrace.bus.protocol import Bus
from headrace.clock import Clock, SystemClock
from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.producers.config import GatewayConfig
from headrace.producers.gateway import keys
from headrace.producers.gateway.door import Door
from headrace.producers.gateway.intake import Intake
from headrace.producers.gateway.over_grpc import GrpcHalf
from headrace.producers.gateway.over_http import HttpHalf, is_loopback
from headrace.producers.gateway.text_keys import TextKeys
from headrace.producers.gateway.writer import Writer
from headrace.wire import pseudonyms

SECRET_FILE: Final = "pseudonym.secret"
KEYS_FILE: Final = "text-keys.sqlite"
HEALTH_S: Final = 0.5

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Addresses:
    grpc: str
    http: str


async def run(
    bus: Bus,
    run: RunConfig,
    config: GatewayConfig,
    stop: asyncio.Event,
    ready: Callable[[Addresses], None],
    *,
    clock: Clock | None = None,
) -> None:
    """Serves until `stop` is set; then what is under way has `stop_ms_max` to become durable. `ready` gets
    the addresses once both are open. Raises ConfigError, and BusError when the log refuses for good."""
    clock = clock or SystemClock()
    known = keys.load(config.tokens_file, events_per_s=config.rate_events_per_s)
    check_reach(config, open_to_all=known.open)
    credentials, context = _tls(config)
    intake = Intake(
        run=run.name,
        region=run.region,
        pseudonyms=pseudonyms_of(config),
        text_keys=TextKeys(Path(config.home) / KEYS_FILE) if config.store_text else None,
        clock=clock,
    )
    writer = Writer(bus, config, clock)
    await writer.look()
    door = Door(config, known, intake, writer)
    halves = GrpcHalf(door, credentials), HttpHalf(door, context)
    writing = asyncio.create_task(writer.run())
    try:
        addresses = Addresses(await halves[0].start(config.grpc), await halves[1].start(config.http))
        log.event(_logger, "serving", grpc=addresses.grpc, http=addresses.http, open=known.open)
        ready(addresses)
        while not stop.is_set() and not writing.done():
            await halves[0].tell_health()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_either(stop, writing), HEALTH_S)
        writer.drain()
        async with asyncio.timeout(config.stop_ms_max / 1000):
            await writing
    except TimeoutError:
        log.event(_logger, "left unacknowledged", level=logging.WARNING, after_ms=config.stop_ms_max)
    finally:
        writing.cancel()
        for half in halves:
            await half.stop()
        log.event(_logger, "stopped", written=writer.written, repeated=writer.repeated)


def pseudonyms_of(config: GatewayConfig) -> pseudonyms.Pseudonyms:
    """Users' other names, by the secret that the settings point at; one is made in `home` if none is given.
    Raises ConfigError."""
    if config.secret_file or os.environ.get(pseudonyms.VARIABLE):
        return pseudonyms.load(Path(config.secret_file) if config.secret_file else None)
    return pseudonyms.made(Path(config.home) / SECRET_FILE)


def check_reach(config: GatewayConfig, *, open_to_all: bool) -> None:
    """Raises ConfigError for an address that is none, and for a gateway that other machines reach without a
    token, or in plain text."""
    for name, address in (("grpc", config.grpc), ("http", config.http)):
        if not re.fullmatch(r".+:[0-9]+", address):
            raise ConfigError(f"gateway.{name}: expected an address HOST:PORT, got {address!r}")
        if is_loopback(address):
            continue
        if open_to_all:
            raise ConfigError(
                f"gateway.{name}: expected tokens (gateway.tokens_file) to serve {address}, got none"
            )
        if not config.tls_cert and not config.plaintext:
            raise ConfigError(
                f"gateway.{name}: expected gateway.tls_cert to serve {address}, or gateway.plaintext behind "
                "a proxy that ends TLS, got neither"
            )


def _tls(config: GatewayConfig) -> tuple[grpc.ServerCredentials | None, ssl.SSLContext | None]:
    if bool(config.tls_cert) != bool(config.tls_key) or (config.tls_client_ca and not config.tls_cert):
        raise ConfigError(
            "gateway.tls_cert, tls_key: expected both or neither, and both for tls_client_ca, got "
            f"{config.tls_cert!r}, {config.tls_key!r}, {config.tls_client_ca!r}"
        )
    if not config.tls_cert:
        return None, None
    try:
        chain, key = Path(config.tls_cert).read_bytes(), Path(config.tls_key).read_bytes()
        authority = Path(config.tls_client_ca).read_bytes() if config.tls_client_ca else None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.tls_client_ca or None)
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"gateway.tls_cert, tls_key, tls_client_ca: cannot be read: {error}") from error
    if authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    credentials = grpc.ssl_server_credentials(
        [(key, chain)], root_certificates=authority, require_client_auth=authority is not None
    )
    return credentials, context


async def _either(stop: asyncio.Event, writing: "asyncio.Task[None]") -> None:
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({stopping, writing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()

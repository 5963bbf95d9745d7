"""What every call to a Kafka cluster shares: settings, security, deadlines and the names of errors.

Not here: sending (`sending`), reading (`reading`), questions about topics and groups (`admin`).

aiokafka retries most faults for ever, in silence. Here every call has a deadline: a broker may restart within
it, and after it comes BusUnavailable with the address and the last error.
"""

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from aiokafka.errors import (
    ConcurrentTransactions,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    ProducerClosed,
    ProducerFenced,
    UnknownProducerId,
)
from aiokafka.helpers import create_ssl_context

from headrace.errors import BusError, BusUnavailable, ConfigError, Fenced

CONNECT_S = 7.0  # with the start of a command before it, its absence is said within 10 s
RETRY_S = 30.0  # a broker that restarts is back after 3.5 s, a failover within 10 s (facts of the field)
RETRY_PAUSE_S = 0.1
REQUEST_MS = 10_000
_PLAIN = ("security_protocol", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password")
_TLS = {
    "ssl_cafile": "cafile",
    "ssl_certfile": "certfile",
    "ssl_keyfile": "keyfile",
    "ssl_password": "password",
}

_T = TypeVar("_T")


class Connection:
    """Address and settings of one cluster."""

    def __init__(
        self, address: str, security: Mapping[str, str], *, session_ms: int, retry_s: float = RETRY_S
    ):
        self.address = address
        self.session_ms = session_ms
        self.retry_s = retry_s
        self.settings: dict[str, Any] = {
            "bootstrap_servers": address.split(","),
            "request_timeout_ms": REQUEST_MS,
            **_secured(security),
        }

    async def opened(self, client: _T, start: Callable[[], Awaitable[object]]) -> _T:
        """`client` after `start()`. BusUnavailable at once when nothing listens, or after CONNECT_S."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await _start(start)
        except TimeoutError as error:
            raise BusUnavailable(
                f"kafka:{self.address}: expected a broker within {CONNECT_S:g} s, none answered"
            ) from error
        except KafkaError as error:
            raise BusUnavailable(f"kafka:{self.address}: expected a broker, got {_text(error)}") from error
        return client

    async def started(self, client: _T, start: Callable[[], Awaitable[object]], *, wait_s: float = 0.0) -> _T:
        """`client` after `start()`, tried again for `retry_s`, and `wait_s` more, with the broker away."""
        last: BaseException | None = None
        try:
            async with asyncio.timeout(self.retry_s + wait_s):
                while True:
                    try:
                        await _start(start)
                        return client
                    except KafkaConnectionError as error:
                        last = error
                    except KafkaError as error:
                        raise self.named("start", error) from error
                    await asyncio.sleep(RETRY_PAUSE_S)
        except TimeoutError as error:
            raise self.late("start", last) from error

    async def call(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """The result of `attempt`, tried again for `retry_s` while the fault may pass. Raises as `named`."""
        last: BaseException | None = None
        try:
            async with asyncio.timeout(self.retry_s):
                while True:
                    try:
                        return await attempt()
                    except (KafkaError, TimeoutError) as error:
                        last = error
                        if isinstance(error, KafkaError) and not _may_pass(error):
                            raise self.named(what, error) from error
                    await asyncio.sleep(RETRY_PAUSE_S)
        except TimeoutError as error:
            raise self.late(what, last) from error

    def late(self, what: str, last: BaseException | None = None) -> BusUnavailable:
        reason = "" if last is None else f", last error: {_text(last)}"
        return BusUnavailable(
            f"kafka:{self.address}: {what}: expected an answer within {self.retry_s:g} s{reason}"
        )

    def named(self, what: str, error: KafkaError) -> BusError:
        """aiokafka's error as ours: Fenced, BusUnavailable if trying again can help, BusError if not."""
        error = _reason(error)
        place = f"kafka:{self.address}: {what}"
        if isinstance(error, ProducerFenced):
            return Fenced(f"{place}: expected to hold the transactional id, a newer process took it")
        if _may_pass(error):
            return BusUnavailable(f"{place}: {_text(error)}")
        return BusError(f"{place}: {_text(error)}")


async def _start(start: Callable[[], Awaitable[object]]) -> None:
    await start()
    await asyncio.sleep(0)  # aiokafka can't stop a client whose tasks have not begun to run


def _reason(error: KafkaError) -> KafkaError:
    """What is behind a plain KafkaError: aiokafka's sending task, or its search of a coordinator, wraps what
    it did not expect."""
    wrapped = type(error) is KafkaError and isinstance(error.__cause__, KafkaError)
    return error.__cause__ if wrapped else error


def _may_pass(error: KafkaError) -> bool:
    error = _reason(error)
    passing = (ConcurrentTransactions, KafkaTimeoutError, ProducerClosed, UnknownProducerId)
    return bool(error.retriable) or isinstance(error, passing)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _secured(security: Mapping[str, str]) -> dict[str, Any]:
    """aiokafka's arguments for TLS and SASL. Unknown names are refused, with the nearest one."""
    known = [*_PLAIN, *_TLS]
    for name in security:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0)
            raise ConfigError(
                f"bus.security: expected one of {known}, got {name!r}; did you mean {near[0]!r}?"
            )
    settings: dict[str, Any] = {name: security[name] for name in _PLAIN if name in security}
    if "SSL" in security.get("security_protocol", "").split("_"):
        settings["ssl_context"] = create_ssl_context(
            **{argument: security[name] for name, argument in _TLS.items() if name in security}
        )
    return settings

"""The log, by address: `open_bus("sqlite:run/log.db")`, `open_bus("sqlite::memory:")`,
`open_bus("kafka:host:9092,other:9092")`.

Not here: the protocol (`bus.protocol`). Kafka's client is imported only for a Kafka address.
"""

from collections.abc import Mapping

from headrace.bus.protocol import Bus
from headrace.clock import Clock
from headrace.errors import ConfigError


def open_bus(
    address: str,
    *,
    clock: Clock | None = None,
    session_ms: int | None = None,
    security: Mapping[str, str] | None = None,
) -> Bus:
    """The bus at `address`, to be entered with `async with`.

    `clock` stamps the records of an embedded log (a broker has its own). `session_ms`: silence after which a
    group member is taken for dead (10 s). `security`: TLS and SASL settings of a Kafka connection
    (docs/bus.md). Raises ConfigError.
    """
    scheme, _, rest = address.partition(":")
    session = {} if session_ms is None else {"session_ms": session_ms}
    if scheme == "sqlite" and rest and not security:
        from headrace.bus.sqlite import SqliteBus

        return SqliteBus(rest, clock=clock, **session)
    if scheme == "kafka" and rest:
        from headrace.bus.kafka import KafkaBus

        return KafkaBus(rest.removeprefix("//"), security=security or {}, **session)
    raise ConfigError(
        f"bus: expected sqlite:PATH, sqlite::memory: or kafka:HOST:PORT[,HOST:PORT], got {address!r}"
    )

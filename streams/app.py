"""The experience join as a Faust app: `faust -A headrace.streams.app worker`. At least once; see
`hosts.faust`.

Settings come from the environment, under the names that `headrace` takes:
`HEADRACE_BUS__ADDRESS=kafka:host:port`, `HEADRACE_STORE__URI=file:///…`,
`HEADRACE_EXPERIENCE__JOIN__ORPHAN_MS=…`, and `HEADRACE_FAUST__STORE=rocksdb` for Faust's own.
"""

import os
from collections.abc import Mapping

import msgspec

from headrace.config import resolve
from headrace.errors import ConfigError
from headrace.store.blobs import Blobs
from headrace.streams.experience import ExperienceJoin
from headrace.streams.hosts.faust import FaustConfig, StreamApp, stream_app
from headrace.streams.run import StreamConfig


class _Bus(msgspec.Struct, frozen=True, kw_only=True):
    address: str = ""


class _Store(msgspec.Struct, frozen=True, kw_only=True):
    uri: str = ""


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    bus: _Bus = _Bus()
    store: _Store = _Store()
    experience: StreamConfig = StreamConfig()
    faust: FaustConfig = FaustConfig()


def experience_app(environment: Mapping[str, str]) -> StreamApp:
    """Raises ConfigError."""
    prefixes = tuple(f"HEADRACE_{name.upper()}__" for name in _Settings.__struct_fields__)
    ours = {name: value for name, value in environment.items() if name.startswith(prefixes)}
    settings = resolve(_Settings, environment=ours)
    scheme, _, brokers = settings.bus.address.partition(":")
    if scheme != "kafka" or not brokers:
        raise ConfigError(f"HEADRACE_BUS__ADDRESS: expected kafka:host:port, got {settings.bus.address!r}")
    if not settings.store.uri:
        raise ConfigError("HEADRACE_STORE__URI: expected where blobs live, as file:///…, got nothing")
    join = ExperienceJoin(settings.experience.join)
    return stream_app(join, brokers.removeprefix("//"), Blobs.open(settings.store.uri), settings.faust)


app = experience_app(os.environ)

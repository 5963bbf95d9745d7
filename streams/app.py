"""The processors as Faust apps, at least once; see `hosts.faust`:

    faust -A headrace.streams.app worker             the experience join
    faust -A headrace.streams.app:feedback worker    the feedback join
    faust -A headrace.streams.app:users worker       the limit of a user's weight, behind it

Settings come from the environment, under the names that `headrace` takes:
`HEADRACE_BUS__ADDRESS=kafka:host:port`, `HEADRACE_STORE__URI=file:///…`,
`HEADRACE_EXPERIENCE__JOIN__ORPHAN_MS=…`, `HEADRACE_FEEDBACK_JOIN__JOIN__WINDOW_MS=…`, and
`HEADRACE_FAUST__STORE=rocksdb` for Faust's own.
"""

import os
from collections.abc import Mapping

import msgspec

from headrace.config import resolve
from headrace.errors import ConfigError
from headrace.store.blobs import Blobs
from headrace.streams.experience import ExperienceJoin
from headrace.streams.feedback import FeedbackJoin
from headrace.streams.hosts.faust import FaustConfig, StreamApp, stream_app
from headrace.streams.processor import Processor
from headrace.streams.run import FeedbackStreamConfig, StreamConfig
from headrace.streams.users import UsersLimit


class _Bus(msgspec.Struct, frozen=True, kw_only=True):
    address: str = ""


class _Store(msgspec.Struct, frozen=True, kw_only=True):
    uri: str = ""


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    bus: _Bus = _Bus()
    store: _Store = _Store()
    experience: StreamConfig = StreamConfig()
    feedback_join: FeedbackStreamConfig = FeedbackStreamConfig()
    faust: FaustConfig = FaustConfig()


def experience_app(environment: Mapping[str, str]) -> StreamApp:
    """Raises ConfigError."""
    settings = _settings(environment)
    return _app(settings, ExperienceJoin(settings.experience.join))


def feedback_app(environment: Mapping[str, str]) -> StreamApp:
    """Raises ConfigError."""
    settings = _settings(environment)
    return _app(settings, FeedbackJoin(settings.feedback_join.join))


def users_app(environment: Mapping[str, str]) -> StreamApp:
    """Raises ConfigError."""
    settings = _settings(environment)
    return _app(settings, UsersLimit(settings.feedback_join.users))


_APPS = {"app": experience_app, "feedback": feedback_app, "users": users_app}


def __getattr__(name: str) -> StreamApp:
    """The app that Faust's command line asks for, and no other: each has tables and timers of its own."""
    if name not in _APPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = globals()[name] = _APPS[name](os.environ)
    return app


def _settings(environment: Mapping[str, str]) -> _Settings:
    prefixes = tuple(f"HEADRACE_{name.upper()}__" for name in _Settings.__struct_fields__)
    ours = {name: value for name, value in environment.items() if name.startswith(prefixes)}
    settings = resolve(_Settings, environment=ours)
    if not settings.bus.address.startswith("kafka:") or settings.bus.address == "kafka:":
        raise ConfigError(f"HEADRACE_BUS__ADDRESS: expected kafka:host:port, got {settings.bus.address!r}")
    if not settings.store.uri:
        raise ConfigError("HEADRACE_STORE__URI: expected where blobs live, as file:///…, got nothing")
    return settings


def _app(settings: _Settings, processor: Processor) -> StreamApp:
    brokers = settings.bus.address.partition(":")[2].removeprefix("//")
    return stream_app(processor, brokers, Blobs.open(settings.store.uri), settings.faust)

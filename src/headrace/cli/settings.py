"""The tree of all settings: the root struct that composes what each folder owns, and a run's `run.toml`.

Not here: the settings of the parts (`<folder>/config.py`), merging and checking (`headrace.config`).
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.cli.files import write_whole
from headrace.config import RunConfig, resolve
from headrace.consumers.config import EvaluationConfig, RelayConfig, RolloutsConfig
from headrace.envs.config import EnvConfig
from headrace.inference.config import InferenceConfig
from headrace.producers.config import EditorsConfig, GatewayConfig, PromptsConfig, SuggestionsConfig
from headrace.store.blobs import GRACE_MS
from headrace.streams.release import CanaryConfig
from headrace.streams.run import FeedbackStreamConfig, StreamConfig
from headrace.trainer.config import TrainerConfig
from headrace.wire.release import ReleaseConfig

RUN_FILE = "run.toml"


class BusConfig(msgspec.Struct, frozen=True, kw_only=True):
    address: str = ""
    """`sqlite:PATH` or `kafka:host:port[,host:port]`; empty: `bus.sqlite` in the run directory."""
    security: dict[str, str] = {}
    """TLS and SASL settings that pass through to the Kafka client."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    uri: str = ""
    """Where blobs live: `file://`, `s3://` ...; empty: `store/` in the run directory."""
    grace_ms: Annotated[int, msgspec.Meta(ge=600_000)] = GRACE_MS
    """A blob that no record names so long after it was written may be removed. Far above the time between an
    upload and its transaction, ten minutes at least."""


class DemoConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `headrace demo` adds to the loop."""

    minutes: float = 3.0
    """Training time of one `headrace demo`; the loop also ends at `run.steps_max`."""
    workers: int = 2
    ready_s: float = 120.0
    """A process that isn't ready after this long has failed."""
    stop_s: float = 20.0
    """A process that hasn't stopped after this long is killed."""
    background_nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 5
    """Of an online demo: how far the trainer and the rollout workers stand back from the processor."""
    alone_s: float = 20.0
    """Of an online demo: editors without rollouts, to compare the latency."""
    trials: int = 2000
    """Of an online demo: suggestions asked for before and after, on files that nobody trains on."""
    trials_quick: int = 200
    """The same, in a demo of few steps."""
    silence_share: float = 0.0
    """Of an online demo: first tokens that are silence in the seed it begins with; 0: the seed as it is,
    which never is silent."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set, by the part that owns it."""

    run: RunConfig = RunConfig()
    bus: BusConfig = BusConfig()
    store: StoreConfig = StoreConfig()
    prompts: PromptsConfig = PromptsConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    env: EnvConfig = EnvConfig()
    inference: InferenceConfig = InferenceConfig()
    experience: StreamConfig = StreamConfig()
    feedback_join: FeedbackStreamConfig = FeedbackStreamConfig()
    trainer: TrainerConfig = TrainerConfig()
    relay: RelayConfig = RelayConfig()
    release: ReleaseConfig = ReleaseConfig()
    canary: CanaryConfig = CanaryConfig()
    gateway: GatewayConfig = GatewayConfig()
    suggestions: SuggestionsConfig = SuggestionsConfig()
    editors: EditorsConfig = EditorsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    demo: DemoConfig = DemoConfig()


def load(
    run_dir: Path | None,
    *,
    files: Iterable[Path] = (),
    flags: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """The settings of a run: its `run.toml` if it has one, then `files`, environment and flags.

    Addresses left empty become those of `run_dir`. Raises ConfigError with the place.
    """
    own = run_dir / RUN_FILE if run_dir is not None else None
    chain = [*([own] if own is not None and own.is_file() else []), *files]
    settings = resolve(
        Settings,
        files=chain,
        environment=os.environ if environment is None else environment,
        flags=flags,
    )
    return settings if run_dir is None else _placed(settings, run_dir)


_PLACES = (("bus", "address"), ("store", "uri"), ("relay", "stage_dir"), ("gateway", "home"))
"""Settings that stand in `run.toml` as they were given: a run directory may be moved."""


def _placed(settings: Settings, run_dir: Path) -> Settings:
    """`settings` with addresses in `run_dir` where none were given."""
    home = run_dir.resolve()
    return msgspec.structs.replace(
        settings,
        bus=msgspec.structs.replace(
            settings.bus, address=settings.bus.address or f"sqlite:{home / 'bus.sqlite'}"
        ),
        store=msgspec.structs.replace(settings.store, uri=settings.store.uri or (home / "store").as_uri()),
        relay=msgspec.structs.replace(settings.relay, stage_dir=str(home / settings.relay.stage_dir)),
        gateway=msgspec.structs.replace(settings.gateway, home=str(home / settings.gateway.home)),
    )


def named_after(run_dir: Path, run: RunConfig) -> RunConfig:
    """`run` with the name of its directory: several runs may share one Kafka, each needs its own."""
    return msgspec.structs.replace(run, name=re.sub(r"[^A-Za-z0-9_.-]+", "-", run_dir.resolve().name))


def save(settings: Settings, run_dir: Path) -> Path:
    """Writes the resolved settings as `run.toml`, whole or not at all; the path."""
    path = run_dir / RUN_FILE
    movable = msgspec.to_builtins(_placed(Settings(), run_dir))
    own = msgspec.to_builtins(settings)
    for section, name in _PLACES:
        if own[section][name] == movable[section][name]:
            own[section][name] = msgspec.to_builtins(Settings())[section][name]
    write_whole(path, ("# The resolved settings of this run.\n" + to_toml(own)).encode())
    return path


def to_toml(tree: Mapping[str, Any], place: str = "") -> str:
    """TOML of nested tables of scalars and lists; None is left out (TOML has no such value)."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in tree.items() if _is_leaf(value)]
    text = "".join(line + "\n" for line in lines)
    for key, value in tree.items():
        if isinstance(value, Mapping):
            name = f"{place}.{_key(key)}" if place else _key(key)
            text += f"\n[{name}]\n{to_toml(value, name)}"
    return text


def _is_leaf(value: Any) -> bool:
    return value is not None and not isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return json.dumps(value)  # strings, numbers and booleans are written alike in JSON and TOML

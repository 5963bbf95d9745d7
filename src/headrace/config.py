"""Settings: frozen msgspec structs beside their owners; TOML, environment and flags mirror one tree.

Later wins: defaults, TOML files in order, environment (`HEADRACE_TRAINER__LR=3e-6`), flags (`--trainer.lr
3e-6`; a list: `--canary.stages 0.1,0.5`). Unknown keys fail with the nearest name. Not here: the settings
themselves, except `RunConfig`, which every process of a run shares.
"""

import difflib
import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from headrace.errors import ConfigError

ENVIRONMENT_PREFIX = "HEADRACE_"
_T = TypeVar("_T", bound=msgspec.Struct)
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
AtLeastZero = Annotated[int, msgspec.Meta(ge=0)]


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What all processes of a run share."""

    name: str = "demo"
    seed: int = 0
    region: str = "local"
    steps_max: AtLeastOne = 100
    """The run ends after this training step."""
    groups_per_step: AtLeastZero = 32
    """Closed groups that one training step consumes, trained or dropped. 0: nothing is simulated."""
    live_per_step: AtLeastZero = 0
    """Live units that one training step consumes at most, beside the groups."""
    live_wait_ms: AtLeastZero = 0
    """How long a step that has its groups waits for live units that are missing in their share: with fewer
    steps of more units, what people do weighs more beside quick rollouts. 0: what is there rides along."""
    group_size: AtLeastOne = 8
    lag_versions_max: AtLeastZero = 2
    """No token older than this many versions is trained."""

    def __post_init__(self) -> None:
        if not self.groups_per_step + self.live_per_step:
            raise ValueError("groups_per_step, live_per_step: expected one of them above 0, got 0 and 0")


def resolve(
    config_type: type[_T],
    *,
    files: Iterable[Path] = (),
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> _T:
    """The settings of `config_type`, merged. `flags` are dotted names without dashes. Raises ConfigError with
    the place."""
    tree: dict[str, Any] = {}
    for path in files:
        _merge(tree, _checked(config_type, _read_toml(path), str(path)))
    for name, value in (environment or {}).items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            dotted = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _merge(tree, _told(config_type, dotted, value, f"environment {name}"))
    for dotted, value in (flags or {}).items():
        _merge(tree, _told(config_type, dotted, value, f"--{dotted}"))
    try:
        return msgspec.convert(tree, config_type, strict=False, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from error


def changed(config: _T, flags: Mapping[str, str]) -> _T:
    """`config` with some settings replaced, by dotted name. Raises ConfigError with the name and the nearest
    known one, or what its value should be."""
    tree = msgspec.to_builtins(config)
    for dotted, value in flags.items():
        _merge(tree, _told(type(config), dotted, value, dotted))
    try:
        return msgspec.convert(tree, type(config), strict=False, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{', '.join(flags)}: {error}") from error


def canonical_json(config: msgspec.Struct) -> str:
    """All fields, defaults included, keys sorted: what goes into the ledger."""
    return msgspec.json.encode(msgspec.to_builtins(config), order="sorted").decode()


def config_sha256(config: msgspec.Struct) -> str:
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()


def dotted_fields(config_type: type[msgspec.Struct], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """`trainer.lr` -> (type, default) for every leaf of the tree, to go through them all."""
    leaves: dict[str, tuple[Any, Any]] = {}
    for field in msgspec.structs.fields(config_type):
        name = prefix + field.name
        if _is_struct(field.type):
            leaves |= dotted_fields(field.type, name + ".")
        else:
            default = field.default if field.default is not msgspec.NODEFAULT else None
            leaves[name] = (field.type, default)
    return leaves


def _path(wanted: type[Any], value: Any) -> Any:
    if wanted is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"expected a {wanted.__name__}, got {value!r}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _told(config_type: type[msgspec.Struct], dotted: str, text: str, place: str) -> dict[str, Any]:
    """The tree of one setting that was given as text; of a list as `0.1,0.5` or `[0.1, 0.5]` (JSON)."""
    value: Any = text
    kind = msgspec.inspect.type_info(dotted_fields(config_type).get(dotted, (str, None))[0])
    if isinstance(kind, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
        try:
            value = msgspec.json.decode(text) if text.startswith("[") else _parts(text)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{place}: expected a list, as a,b or as JSON, got {text!r}: {error}"
            ) from error
    return _checked(config_type, _nested(dotted, value), place)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    first, _, rest = dotted.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _checked(config_type: type[msgspec.Struct], tree: dict[str, Any], place: str) -> dict[str, Any]:
    """`tree`, once every key in it is known. Raises ConfigError that names the nearest known key."""
    known = {field.name: field.type for field in msgspec.structs.fields(config_type)}
    for key, value in tree.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(sorted(known))}"
            raise ConfigError(f"{place}: unknown key {key!r}: {hint}")
        if isinstance(value, dict) and _is_struct(known[key]):
            _checked(known[key], value, f"{place}: {key}")
    return tree


def _is_struct(field_type: Any) -> bool:
    return isinstance(field_type, type) and issubclass(field_type, msgspec.Struct)

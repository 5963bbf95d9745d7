"""Records, times and sizes as a person reads them on a terminal.

Packed arrays of a record (`wire.packed`) become lists of numbers again; long values cut unless asked for
whole. It reads deliveries and returns text: no bus, no printing.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.bus.protocol import Delivery
from headrace.errors import ConfigError, WireError
from headrace.wire import packed
from headrace.wire.codec import DECODED_BYTES_MAX, decode
from headrace.wire.topics import TOPICS

TEXT_MAX = 72
ITEMS_MAX = 8
_DIM, _BOLD, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_COLOURS = ("\x1b[36m", "\x1b[32m", "\x1b[33m", "\x1b[35m", "\x1b[34m")
_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_U32 = {"tokens_in", "tokens_out"}
_F32 = {"logp"}
_U8 = {"loss_mask"}


def record_type(delivery: Delivery) -> str:
    """`RolloutStep` of `headrace.RolloutStep.v1`; the whole `ce_type` of a foreign record; `bytes` without
    one."""
    name = (delivery.header("ce_type") or b"").decode(errors="replace")
    parts = name.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "headrace" else name or "bytes"


def value(delivery: Delivery, *, full: bool = False) -> Any:
    """The record as plain dicts, lists, strings and numbers.

    A topic without record types (state, foreign topics) is read as MessagePack without a schema, then as
    bytes. Raises WireError, with the place, for a record that is not what its topic carries.
    """
    if delivery.value is None:
        return None
    if delivery.topic in TOPICS and TOPICS[delivery.topic].records:
        try:
            record = decode(delivery.topic, delivery.value, delivery.headers)
        except WireError as error:
            raise WireError(f"{delivery.place}: {error}") from error
        return readable(msgspec.to_builtins(record, builtin_types=(bytes,)), full=full)
    return readable(_schemaless(delivery.value), full=full)


def line(delivery: Delivery, *, colour: bool, full: bool = False) -> str:
    """`place time key Type field=value ...` on one line."""
    kind = record_type(delivery)
    key = "-" if delivery.key is None else delivery.key.decode(errors="replace")
    try:
        content = value(delivery, full=full)
        body = _fields(content, colour)
    except WireError as error:
        kind, body = "UNDECODABLE", f"{str(error).partition(': ')[2]} ({len(delivery.value or b'')} bytes)"
    key, kind = _inert(key), _inert(kind)
    head = f"{delivery.place} {clock(delivery.timestamp_ms)}"
    if not colour:
        return f"{head} {key} {kind} {body}"
    hue = "\x1b[31m" if kind == "UNDECODABLE" else _COLOURS[sum(kind.encode()) % len(_COLOURS)]
    return f"{_DIM}{head}{_RESET} {_BOLD}{key}{_RESET} {hue}{kind}{_RESET} {body}"


def readable(content: Any, *, full: bool = False, name: str = "") -> Any:
    """`content` with packed arrays as lists, other bytes as text or hex; long values cut unless `full`."""
    if isinstance(content, dict):
        return {str(key): readable(item, full=full, name=str(key)) for key, item in content.items()}
    if isinstance(content, bytes):
        return readable(_unpacked(name, content), full=full)
    if isinstance(content, list | tuple):
        items = [readable(item, full=full, name=name) for item in content]
        return items if full or len(items) <= ITEMS_MAX else [*items[:ITEMS_MAX], f"... {len(items)} in all"]
    if isinstance(content, str) and not full:
        return shortened(content, TEXT_MAX)
    return content


def _unpacked(name: str, content: bytes) -> Any:
    if name in _U32 and len(content) % 4 == 0:
        return packed.unpack_u32(content)
    if name in _F32 and len(content) % 4 == 0:
        return [round(x, 4) for x in packed.unpack_f32(content)]
    if name in _U8:
        return list(content)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content.hex()
    return text if text.isprintable() else content.hex()


def _schemaless(content: bytes) -> Any:
    import msgpack  # type: ignore[import-untyped]

    if len(content) <= DECODED_BYTES_MAX:
        try:
            return msgpack.unpackb(content, strict_map_key=False)
        except (ValueError, msgpack.UnpackException):  # not MessagePack: shown as it is
            pass
    return content


def _fields(content: Any, colour: bool) -> str:
    if not isinstance(content, dict):
        return str(content)
    key, end = (_DIM, _RESET) if colour else ("", "")
    return " ".join(
        f"{key}{name}={end}{_inert(item) if isinstance(item, str) else item}"
        for name, item in content.items()
        if item not in ("", None, [], {})
    )


def _inert(text: str) -> str:
    """Quoted where it holds a space, or anything that a terminal would obey."""
    return text if text.isprintable() and " " not in text else repr(text)


def printable(text: str) -> str:
    """`text` with what a terminal would obey spelled out; spaces stay."""
    return text if text.isprintable() else repr(text)[1:-1]


def shortened(text: str, most: int) -> str:
    """At most `most` characters of `text`; the middle is left out of a longer one."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[: most - 3 - half]}...{text[len(text) - half :]}"


def clock(timestamp_ms: int) -> str:
    """`2026-11-30T12:00:00.123Z`."""
    moment = datetime.fromtimestamp(timestamp_ms / 1000, tz=UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{timestamp_ms % 1000:03d}Z"


def time_ms(text: str, now_ms: int) -> int:
    """Milliseconds since the epoch of an age before now (`90s`, `5m`, `2h`, `1d`) or a UTC time in ISO form.
    Raises ConfigError."""
    if match := _AGE.fullmatch(text):
        return now_ms - int(float(match[1]) * _UNIT_MS[match[2]])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"time: expected `5m`, `2h` or `2026-11-30T12:00`, or an offset, got {text!r}"
        ) from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def duration(milliseconds: float) -> str:
    """`850 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`, `89 d 23 h`."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def size(count: int | None) -> str:
    """`1.5 MB`; `-` where the broker does not tell."""
    if count is None:
        return "-"
    if count < 1000:
        return f"{count} B"
    scaled, units = float(count), ("kB", "MB", "GB", "TB")
    for unit in units:
        scaled /= 1000
        if scaled < 999.95 or unit == units[-1]:
            break
    return f"{scaled:.1f} {unit}"


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that isn't there, with the nearest one that is."""
    names: Sequence[str] = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listed = f"{', '.join(names[:20])}{' ...' if len(names) > 20 else ''}"
    expected = f"expected one of {listed}" if names else "there is none"
    hint = f"did you mean {near[0]!r}?" if near else expected
    return f"unknown {what} {name!r}: {hint}"

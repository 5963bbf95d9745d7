"""What one asks of a replica, and what comes back: plain types, the same for a server and for an engine in
this process.

They mirror `inference.proto`, with numbers unpacked. Not here: transport (`rpc.client`, `inference.server`)
and computing (`inference.engine`). Positions count tokens from the start of the prefix.
"""

from typing import Literal, Protocol

import msgspec

from headrace.wire.records import Span

Lane = Literal["rollout", "live"]
Finish = Literal["stop", "length", "cancelled"]
Cohort = Literal["", "stable", "canary"]


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """One member of a group."""

    member: int
    own_tokens: tuple[int, ...] = ()
    """Everything after the prefix so far; empty in the first turn."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `(seed, group_id, member, position)` fixes every sample, whatever else is in the batch."""

    run: str
    group_id: str
    lane: Lane = "rollout"
    prefix_tokens: tuple[int, ...]
    """The prompt, shared by all sequences; computed once."""
    sequences: tuple[Sequence, ...]
    temperature: float = 1.0
    """0 means greedy, with log-probabilities at temperature 1."""
    greedy: bool = False
    """The likeliest token, with log-probabilities at `temperature`."""
    tokens_max: int
    """Per sequence; the engine stops earlier, as `length`, where the context ends."""
    stop_tokens: tuple[int, ...] = ()
    """Generation ends after one of these, which is kept."""
    seed: int
    """In [0, 2^64)."""
    stream_tokens: bool = False
    version_min: int = 0
    """Generation waits until the replica serves this version or a newer one."""
    user: str = ""
    """Pseudonym; in the live lane it chooses the side of a release."""
    version: int | None = None
    """Exactly this one of the versions that the replica hosts."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What one member wrote in this request."""

    member: int
    tokens: tuple[int, ...]
    """Empty only when `cancelled` before the first one."""
    logp: tuple[float, ...]
    """float32 values, one a token, at the sampling temperature."""
    finish: Finish
    spans: tuple[Span, ...]
    """Cover the tokens in order: which weights version computed each."""
    weights_version: int
    """When generation started."""
    routes: bytes
    """u8 `routes_shape`: every token fed forward: prefix, own tokens, all outputs but the last."""
    routes_shape: tuple[int, int, int]
    """Tokens, layers, top_k."""
    started_ms: int
    ended_ms: int
    cohort: Cohort = ""
    """Side of the release in force when generation started; empty outside the live lane and without one."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What one member wrote since its last progress; `completion` comes with the last one and holds all."""

    member: int
    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    completion: Completion | None = None


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`version` and `root` are those served now; before the first weights `root` is empty."""

    replica: str
    version: int
    root: str
    slots: int
    slots_used: int
    queued_live: int
    queued_rollout: int
    tokens_generated: int
    tokens_prefilled: int
    busy_s: float
    up_s: float
    hosted: tuple[tuple[int, str], ...] = ()
    """Version and root of all weights in memory, the newest included."""
    stable: int | None = None
    """Of the release in force; None when there is none."""
    canary: int | None = None
    share: float = 0.0


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a weight load. `serving`: the version asked for is the one served now."""

    serving: bool
    version: int
    root: str
    pause_ms: float
    detail: str
    unfit: bool = False
    """The weights have their root and still can't be served, by any replica."""


class Generator(Protocol):
    """Whatever can answer a request: `rpc.client.InferenceClient`, `inference.replica.Replica`."""

    async def generate(self, request: Generation, *, timeout_s: float) -> list[Completion]:
        """One completion a sequence, in the order of the request. Raises InferenceError; InferenceUnavailable
        or Overloaded when trying again can help."""
        ...

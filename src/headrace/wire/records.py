"""What flows through the topics: one frozen type per record, as MessagePack maps.

Field names are the format: readers ignore fields they do not know, and refuse a record that lacks one without
a default. Adding a field with a default is a compatible change; anything else is a new `VERSION` of the type.
Arrays of numbers travel as packed little-endian bytes (`wire.packed`), never as lists.

Not here: how records become bytes (`wire.codec`), where they go (`wire.topics`).

Identity: a *group* is the trainable unit (`group_id`); a rollout is `group_id/member`; `attempt` counts the
tries of one group, and a reader keeps the highest attempt that is whole.
"""

from typing import ClassVar, Literal

import msgspec

Source = Literal["sim", "live"]
SILENT = "silent"
"""Finish of a live step whose model chose to show nothing."""

GROUP_SIZE_MAX = 1 << 16
"""Members of a group; the field's groups have 8 to 128."""
VERSION_MAX = TIME_MS_MAX = 1 << 53
"""Of weights, and broker times: what every reader can calculate with, JSON included."""
TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-3, 100.0
"""Of sampling (0 is greedy): outside, scores divided by it are no longer finite in float32."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of everything on a topic."""

    VERSION: ClassVar[int] = 1


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what lives inside a record."""


class Sampling(Part, frozen=True, kw_only=True):
    temperature: float = 1.0
    tokens_max: int = 16
    """Upper bound of generated tokens in one turn."""
    turns_max: int = 2


class Prompt(Record, frozen=True, kw_only=True):
    """One group to roll out."""

    run: str
    group_id: str
    env: str
    task_id: str
    seed: int
    group_size: int
    sampling: Sampling
    components: dict[str, float]
    """Required reward components and their weights in the total."""
    weights_version: int
    """Version when admitted."""
    admitted_ms: int
    deadline_ms: int
    """Broker time after which the group closes with what it has."""
    region: str = "local"


class Span(Part, frozen=True, kw_only=True):
    """Output tokens `[start, end)` of one step were generated under `weights_version`."""

    start: int
    end: int
    weights_version: int


class ToolCall(Part, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, str]


class RolloutStep(Record, frozen=True, kw_only=True):
    """One agent turn: only new tokens; the context is rebuilt by appending steps in order."""

    run: str
    group_id: str
    member: int
    attempt: int
    step: int
    last: bool
    """No further step of this rollout follows."""
    source: Source
    segment: int = 0
    base_length: int
    """Tokens of context before `tokens_in`."""
    prefix_length: int
    """Tokens of the prompt that the whole group shares; attention blocks are aligned to it (kernels)."""
    tokens_in: bytes
    """u32: new context tokens (the prompt in step 0, a tool's result later)."""
    tokens_out: bytes
    """u32: generated tokens."""
    logp: bytes
    """f32, one per output token, at the sampling temperature."""
    loss_mask: bytes
    """u8, one per output token: 1 = trained."""
    spans: tuple[Span, ...]
    weights_version: int
    """Version when the generation of this step started."""
    routes: bytes = b""
    """u8 or u16 `[tokens, layers, top_k]` in the router's order, for every token that this step's request fed
    forward and no earlier step recorded: absolute token positions from `routes_start` on. The last output
    token is fed only in the next turn."""
    routes_start: int = 0
    routes_shape: tuple[int, ...] = ()
    tool_call: ToolCall | None = None
    tool_result: str | None = None
    finish: str
    temperature: float
    started_ms: int
    ended_ms: int
    region: str = "local"
    worker: str = ""
    user: str = ""
    """Pseudonym of whom a live suggestion was made for."""
    cohort: str = ""
    """Of a gradual release: which version the user was given, and why (`stable`, `canary`)."""
    text_length: int = 0
    """Of a live suggestion's text, in UTF-16 code units, as editors count accepted lengths."""


class Reward(Record, frozen=True, kw_only=True):
    """One component's judgement of one rollout."""

    run: str
    group_id: str
    member: int
    attempt: int
    component: str
    verdict: Literal["score", "quarantine"] = "score"
    value: float = 0.0
    range_min: float = 0.0
    range_max: float = 1.0
    evidence: str = ""
    grader: str = ""
    """Name and version of what judged."""


class Feedback(Record, frozen=True, kw_only=True):
    """What an editor reports of one suggestion."""

    run: str = ""
    event_id: str
    suggestion_id: str
    kind: Literal["shown", "accepted", "partially_accepted", "rejected", "ignored", "undone", "persisted"]
    editor_ms: int
    view_id: str = ""
    user: str = ""
    """Pseudonym: a keyed hash."""
    client: str = ""
    accepted_length: int | None = None
    """UTF-16 code units, cumulative."""
    superseded_by: str | None = None
    continues: str | None = None
    """An earlier suggestion of which this one shows the rest: the user typed the start of it."""
    region: str = "local"
    text: bytes = b""
    """Code, encrypted under the user's key; empty unless the user opted in."""
    persisted_s: int | None = None
    difference: float | None = None


class Exposure(Record, frozen=True, kw_only=True):
    """What became of one live suggestion, for the comparison of weights versions. One a unit."""

    run: str
    group_id: str
    version: int
    cohort: str
    user: str
    region: str
    silent: bool
    """The model chose to show nothing."""
    shown: bool
    accepted: float
    """Accepted share of the text, 0 to 1, after everything that the window brought."""
    reward: float
    quarantined: bool = False
    latency_ms: int
    """From the request to the whole answer, as inference measured it."""
    opened_ms: int
    closed_ms: int


class Judgement(Record, frozen=True, kw_only=True):
    """A suggestion whose window has ended, on its way to its reward: what it is worth, before the others of
    its user are looked at."""

    exposure: Exposure
    attempt: int
    outcome: str
    """`accepted`, `partially_accepted`, `undone`, `rejected`, `ignored`, `silent`."""
    evidence: str = ""
    abuse: str = ""
    """Why it must not be trained; empty: nothing against it."""


class Rollout(Part, frozen=True, kw_only=True):
    """A member of a closed group. `reward` is None when a required component never came."""

    member: int
    attempt: int
    steps: tuple[RolloutStep, ...]
    components: dict[str, float]
    reward: float | None
    quarantined: bool = False
    whole: bool = True
    """Its last step arrived."""


class Claim(Part, frozen=True, kw_only=True):
    """Claim check: the value lies in the blob store under its content hash."""

    uri: str
    sha256: str
    bytes: int


class Experience(Record, frozen=True, kw_only=True):
    """A closed group: all that the trainer needs."""

    run: str
    group_id: str
    source: Source
    env: str
    task_id: str
    group_size: int
    rollouts: tuple[Rollout, ...]
    missing: tuple[int, ...] = ()
    """Members without a whole, fully rewarded rollout."""
    closed: Literal["complete", "timeout", "failed"]
    """failed: the workers gave the group up, see `reason`."""
    reason: str = ""
    admitted_version: int
    opened_ms: int
    closed_ms: int
    region: str = "local"
    user: str = ""
    """Pseudonym of whom a live suggestion was made for."""
    claim: Claim | None = None
    """Set instead of `rollouts` when the record would pass 900 kB."""


class GroupFailed(Record, frozen=True, kw_only=True):
    """A worker gave a group up (sandbox or inference failed on every attempt). Travels on `rollout.steps`."""

    run: str
    group_id: str
    attempt: int
    reason: str
    worker: str = ""


class Consumed(Part, frozen=True, kw_only=True):
    """One record behind a training step, in the order of the batch."""

    topic: str
    partition: int
    offset: int
    group_id: str
    source: Source = "sim"
    env: str = ""
    region: str = ""
    tokens: int = 0
    """Generated by the longest member: what the accounts' length buckets go by."""
    revoked: bool = False
    """Weights that were revoked when the step began generated some of it."""


class Drop(Part, frozen=True, kw_only=True):
    """A unit, or a member of it, that was read and not trained."""

    group_id: str
    reason: str
    member: int | None = None
    tokens: int = 0
    env: str = ""


class Checkpoint(Part, frozen=True, kw_only=True):
    """The state after `step`, in the blob store; durable when the record that names it is written."""

    uri: str
    sha256: str
    step: int | None = None
    """None: the step of the record that names it."""
    bytes: int = 0


class TrainStep(Record, frozen=True, kw_only=True):
    """The ledger: everything needed to compute this step again."""

    run: str
    step: int
    """Counts from 1; step N turns version N - 1 into version N."""
    version_from: int
    version_to: int
    consumed: tuple[Consumed, ...]
    positions: dict[str, int]
    """`topic/partition` -> next position after this step."""
    admitted: tuple[str, ...]
    drops: tuple[Drop, ...]
    config: str
    """Resolved hyperparameters as canonical JSON."""
    config_sha256: str
    seed: int
    code: str
    """Headrace version and source hash."""
    libraries: dict[str, str]
    threads: int
    kernel_probe: str
    metrics: dict[str, float]
    root_before: str
    root_after: str
    checkpoint: Checkpoint | None = None
    """The newest that became durable since the record before; it may be of an earlier step."""
    checkpoints_pruned: tuple[int, ...] = ()
    """Steps whose checkpoints are no longer kept from this record on."""
    started_ms: int
    ended_ms: int


class Encoding(Part, frozen=True, kw_only=True):
    """One way to obtain a version: `full` needs no base."""

    kind: Literal["full", "delta"]
    uri: str
    sha256: str
    bytes: int
    base_version: int | None = None
    base_root: str | None = None


class WeightsPublished(Record, frozen=True, kw_only=True):
    run: str
    version: int
    root: str
    step: int
    manifest_uri: str
    manifest_sha256: str
    encodings: tuple[Encoding, ...]
    checkpoint: Checkpoint | None = None
    """The trainer's whole state at this version: with version 0 of a run that began from a checkpoint."""
    published_ms: int


class WeightsPromoted(Record, frozen=True, kw_only=True):
    run: str
    version: int
    share: float
    """Of the users, 0 to 1."""
    pinned: bool = False
    """By hand, until another record by hand: no automatic decision moves it."""
    by: Literal["canary", "hand"] = "canary"
    evidence: str = ""
    """JSON of what was compared, or a person's words."""


class WeightsRevoked(Record, frozen=True, kw_only=True):
    """The version serves no user any more, from now on."""

    run: str
    version: int
    by: Literal["canary", "hand"] = "canary"
    evidence: str = ""


class WeightsAck(Record, frozen=True, kw_only=True):
    """The version a replica really serves."""

    run: str
    region: str
    replica: str
    version: int
    root: str
    outcome: Literal["serving", "refused"]
    role: Literal["", "stable", "canary"] = ""
    """For whom: all but what a release in force gives to others, or the live users of that side."""
    unfit: bool = False
    """Of a refusal: the weights themselves are bad, their root is right: no replica can serve them."""
    detail: str = ""
    pause_ms: float = 0.0
    acked_ms: int


class Turn(Part, frozen=True, kw_only=True):
    """One turn as a person reads it."""

    call: str
    result: str
    finish: str


class Evaluation(Record, frozen=True, kw_only=True):
    """One held-out task tried once under one weights version; never trained on."""

    run: str
    version: int
    round: str
    """Which comparison it belongs to, e.g. `before`, `after`, `watch`."""
    mode: Literal["sampled", "greedy"]
    task_id: str
    kind: str
    sample: int
    passed: bool
    passed_first: bool
    reward: float
    turns: tuple[Turn, ...]
    finish: str


class DeadLetter(Record, frozen=True, kw_only=True):
    """A record that could not be decoded or handled, with its original bytes and position."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    error: str
    """Type of the error."""
    reason: str
    by: str
    """Process that could not handle it."""
    at_ms: int

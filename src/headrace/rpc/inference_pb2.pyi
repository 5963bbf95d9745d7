from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT: _ClassVar[Lane]
    LIVE: _ClassVar[Lane]
ROLLOUT: Lane
LIVE: Lane

class Sequence(_message.Message):
    __slots__ = ("member", "own_tokens")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    OWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    member: int
    own_tokens: bytes
    def __init__(self, member: _Optional[int] = ..., own_tokens: _Optional[bytes] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("run", "group_id", "lane", "prefix_tokens", "sequences", "temperature", "greedy", "tokens_max", "stop_tokens", "seed", "stream_tokens", "version_min", "user", "version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STREAM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    group_id: str
    lane: Lane
    prefix_tokens: bytes
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    temperature: float
    greedy: bool
    tokens_max: int
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    stream_tokens: bool
    version_min: int
    user: str
    version: int
    def __init__(self, run: _Optional[str] = ..., group_id: _Optional[str] = ..., lane: _Optional[_Union[Lane, str]] = ..., prefix_tokens: _Optional[bytes] = ..., sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ..., temperature: _Optional[float] = ..., greedy: _Optional[bool] = ..., tokens_max: _Optional[int] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., stream_tokens: _Optional[bool] = ..., version_min: _Optional[int] = ..., user: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "end", "weights_version")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    weights_version: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., weights_version: _Optional[int] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("member", "tokens", "logp", "done", "finish", "spans", "weights_version", "routes", "layers", "top_k", "started_ms", "ended_ms", "cohort")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGP_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    member: int
    tokens: bytes
    logp: bytes
    done: bool
    finish: str
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    weights_version: int
    routes: bytes
    layers: int
    top_k: int
    started_ms: int
    ended_ms: int
    cohort: str
    def __init__(self, member: _Optional[int] = ..., tokens: _Optional[bytes] = ..., logp: _Optional[bytes] = ..., done: _Optional[bool] = ..., finish: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., weights_version: _Optional[int] = ..., routes: _Optional[bytes] = ..., layers: _Optional[int] = ..., top_k: _Optional[int] = ..., started_ms: _Optional[int] = ..., ended_ms: _Optional[int] = ..., cohort: _Optional[str] = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("version", "path", "root", "hold")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    version: int
    path: str
    root: str
    hold: bool
    def __init__(self, version: _Optional[int] = ..., path: _Optional[str] = ..., root: _Optional[str] = ..., hold: _Optional[bool] = ...) -> None: ...

class LoadWeightsReply(_message.Message):
    __slots__ = ("serving", "version", "root", "pause_ms", "detail", "unfit")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    serving: bool
    version: int
    root: str
    pause_ms: float
    detail: str
    unfit: bool
    def __init__(self, serving: _Optional[bool] = ..., version: _Optional[int] = ..., root: _Optional[str] = ..., pause_ms: _Optional[float] = ..., detail: _Optional[str] = ..., unfit: _Optional[bool] = ...) -> None: ...

class SetReleaseRequest(_message.Message):
    __slots__ = ("run", "stable", "canary", "share")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    run: str
    stable: int
    canary: int
    share: float
    def __init__(self, run: _Optional[str] = ..., stable: _Optional[int] = ..., canary: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...

class SetReleaseReply(_message.Message):
    __slots__ = ("set", "detail")
    SET_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    set: bool
    detail: str
    def __init__(self, set: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class Hosted(_message.Message):
    __slots__ = ("version", "root")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    version: int
    root: str
    def __init__(self, version: _Optional[int] = ..., root: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("replica", "version", "root", "slots", "slots_used", "queued_live", "queued_rollout", "tokens_generated", "tokens_prefilled", "busy_s", "up_s", "hosted", "stable", "canary", "share")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_LIVE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PREFILLED_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    HOSTED_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
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
    hosted: _containers.RepeatedCompositeFieldContainer[Hosted]
    stable: int
    canary: int
    share: float
    def __init__(self, replica: _Optional[str] = ..., version: _Optional[int] = ..., root: _Optional[str] = ..., slots: _Optional[int] = ..., slots_used: _Optional[int] = ..., queued_live: _Optional[int] = ..., queued_rollout: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., tokens_prefilled: _Optional[int] = ..., busy_s: _Optional[float] = ..., up_s: _Optional[float] = ..., hosted: _Optional[_Iterable[_Union[Hosted, _Mapping]]] = ..., stable: _Optional[int] = ..., canary: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...

from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PublishRequest(_message.Message):
    __slots__ = ("events", "number")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    number: int
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("event_id", "suggestion_id", "kind", "editor_ms", "view_id", "user", "client", "accepted_length", "superseded_by", "continues", "text", "persisted_s", "difference")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    SUGGESTION_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EDITOR_MS_FIELD_NUMBER: _ClassVar[int]
    VIEW_ID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_BY_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PERSISTED_S_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    suggestion_id: str
    kind: str
    editor_ms: int
    view_id: str
    user: str
    client: str
    accepted_length: int
    superseded_by: str
    continues: str
    text: str
    persisted_s: int
    difference: float
    def __init__(self, event_id: _Optional[str] = ..., suggestion_id: _Optional[str] = ..., kind: _Optional[str] = ..., editor_ms: _Optional[int] = ..., view_id: _Optional[str] = ..., user: _Optional[str] = ..., client: _Optional[str] = ..., accepted_length: _Optional[int] = ..., superseded_by: _Optional[str] = ..., continues: _Optional[str] = ..., text: _Optional[str] = ..., persisted_s: _Optional[int] = ..., difference: _Optional[float] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("number", "accepted", "duplicates", "refused")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    number: int
    accepted: int
    duplicates: int
    refused: _containers.RepeatedCompositeFieldContainer[Refusal]
    def __init__(self, number: _Optional[int] = ..., accepted: _Optional[int] = ..., duplicates: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("index", "event_id", "reason")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    index: int
    event_id: str
    reason: str
    def __init__(self, index: _Optional[int] = ..., event_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RawPublishRequest(_message.Message):
    __slots__ = ("events", "number")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedScalarFieldContainer[bytes]
    number: int
    def __init__(self, events: _Optional[_Iterable[bytes]] = ..., number: _Optional[int] = ...) -> None: ...

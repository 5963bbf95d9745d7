"""What a stream processor is: a pure state machine over the records of one key.

`(state of the key, event) -> (state, records out, timer)`. It touches nothing: no bus, no clock, no random
numbers, no globals. Hosts (`streams.hosts`) read, keep the states (`streams.fold`, `streams.changelog`) and
send what comes out.

Time is broker time: an event happens when the log took it. `handle` and `on_timer` may change the state they
are given and hand it back; on a fault the host throws its states away and reads them again from the log.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from headrace.wire.records import Record
from headrace.wire.topics import Topic

S = TypeVar("S", bound=msgspec.Struct)


class Event(NamedTuple):
    """A record at its place in the log."""

    topic: str
    partition: int
    offset: int
    at_ms: int
    """Broker time."""
    record: Record


class Output(NamedTuple):
    """A record to send. The same `event_id` is the same record, however often it is sent."""

    topic: str
    key: str
    record: Record
    event_id: str


class Result(NamedTuple):
    """What became of one call.

    `state` None: forget the key. `changed` False: the state and its timer stay as they were. `counts` go to
    the host's counters.
    """

    state: msgspec.Struct | None
    outputs: Sequence[Output] = ()
    timer_ms: int | None = None
    """Broker time from which `on_timer` is due; one timer for each key."""
    counts: Sequence[str] = ()
    changed: bool = True


class Processor(Protocol):
    """Its state type is a msgspec Struct (or a tagged union of them). A state that grows keeps its growth in
    a list field named `log`, to which it only appends: the changelog then writes each item about once."""

    name: str
    inputs: tuple[Topic, ...]
    """Co-partitioned: all of a key lies in the same partition of each."""
    outputs: tuple[Topic, ...]
    state_topic: Topic
    state_type: Any
    item_type: Any
    """Type of the items of `log`; None when no state grows."""
    open_max: int
    """Open states in one partition; one more is given up."""
    open_bytes_max: int
    """Their `weight` together."""
    settled_max: int
    """Settled states in one partition; the oldest are forgotten first."""
    compact: bool
    """States lie in memory as they lie in the changelog, and are decoded for each batch that touches them:
    for many small states. One must fit into a head (`changelog.HEAD_BYTES`)."""

    def key(self, record: Record) -> str: ...

    def weight(self, state: Any) -> int:
        """Bytes that an open state holds, at least 1; 0 for a settled one, which is only remembered for a
        while."""
        ...

    def handle(self, key: str, state: Any | None, event: Event) -> Result:
        """The next state after `event`. Raises WireError, with the state untouched, for a record that makes
        no sense: the host puts it into `dead.letters`."""
        ...

    def on_timer(self, key: str, state: Any, now_ms: int) -> Result:
        """`now_ms` >= the timer: every record of the key up to that time has been handled."""
        ...

    def give_up(self, key: str, state: Any, reason: str, now_ms: int) -> Result:
        """Settles an open state that the host cannot keep, accounted with `reason`."""
        ...

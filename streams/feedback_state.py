"""What the feedback join keeps of one suggestion, and its windows and limits.

Not here: what changes it (`streams.feedback`).
"""

import msgspec

from headrace.config import AtLeastOne, AtLeastZero
from headrace.streams.suggestion import Rewards, Signals
from headrace.streams.waiting import Held


class FeedbackConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Windows and limits of the join."""

    window_ms: AtLeastOne = 720_000
    """From the making of a suggestion to its judgement: two minutes to accept it, ten to see what becomes of
    it."""
    settle_ms: AtLeastZero | None = None
    """When given: a suggestion whose fate is known closes so long after its last signal. The shorter, the
    sooner it is trained, and the fewer undos and edits are seen."""
    orphan_ms: AtLeastOne = 60_000
    """An event waits so long for its suggestion."""
    flicker_ms: AtLeastZero = 100
    """A suggestion that another superseded within so long was never read."""
    closed_memory_ms: AtLeastZero = 600_000
    """A closed suggestion is remembered so long; its events are orphans after that."""
    rewards: Rewards = Rewards()
    events_max: AtLeastOne = 64
    """Different events of one suggestion; one more is abuse."""
    held_bytes_max: AtLeastOne = 524_288
    """Events that wait for one suggestion."""
    open_max: AtLeastOne = 2_500_000
    """Open suggestions in one partition."""
    open_bytes_max: AtLeastOne = 1 << 30
    closed_max: AtLeastOne = 2_500_000
    """Remembered in one partition; the oldest are forgotten first."""


class Open(msgspec.Struct, tag="o", array_like=True):
    """A suggestion that was made, and what was said of it so far."""

    run: str
    attempt: int
    version: int
    cohort: str
    user: str
    """For whom it was made; if that is nobody by name, who spoke of it first."""
    region: str
    made_ms: int
    latency_ms: int
    text_length: int
    signals: Signals
    seen: bytes = b""
    """Hashes of the ids of its events."""
    early: Held | None = None
    """Events that the log took before the suggestion, as long as more of them may come."""


class Continued(msgspec.Struct, tag="c", array_like=True):
    """The rest of another suggestion: what is said of it is said of that one."""

    to: str
    first_ms: int
    user: str
    """Who said so."""
    made: bool = False
    """Inference made it, too, and the unit has been accounted."""
    seen: bytes = b""


class Closed(msgspec.Struct, tag="x", array_like=True):
    at_ms: int


State = Held | Open | Continued | Closed

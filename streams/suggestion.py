"""What became of one suggestion: its signals in the order of the log, and what they are worth.

Not here: which record belongs to it, when it is closed, what goes out (`streams.feedback`).

The order is that of the log (broker time). The editor's clock says one thing only: how long the suggestion
stood there, as the difference of two stamps of the same clock, however wrong that is set.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Literal, NamedTuple

import msgspec

from headrace.errors import WireError
from headrace.rpc.feedback import ID_BYTES_MAX, PERSISTED_S_MAX
from headrace.wire.codec import encode_plain
from headrace.wire.records import VERSION_MAX, Feedback

EVENT_BYTES_MAX = 262_144

Name = Literal[
    "never_shown",
    "superseded",
    "accepted",
    "partially_accepted",
    "undone",
    "rejected",
    "ignored",
    "silent",
    "no_text",
]


Worth = Annotated[float, msgspec.Meta(ge=-1.0, le=1.0)]


class Rewards(msgspec.Struct, frozen=True, kw_only=True):
    """What each outcome is worth. By default showing pays above an accept probability of 25 %."""

    accepted: Worth = 0.75
    rejected: Worth = -0.25
    ignored: Worth = 0.0
    silent: Worth = 0.0
    no_text: Worth = -0.25
    """An answer that is neither a suggestion nor silence. Left untrained, it is where a policy flees to from
    what is rejected."""
    edited_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    """How much of an accept is lost when all of its text is edited away again while it is watched; in
    proportion for a part of the text."""

    def __post_init__(self) -> None:
        if self.accepted <= self.rejected:
            raise ValueError(
                f"accepted: expected more than rejected ({self.rejected:g}), got {self.accepted:g}"
            )

    @property
    def break_even(self) -> float:
        """The chance of an accept above which showing pays, if all else is a reject."""
        return (self.silent - self.rejected) / (self.accepted - self.rejected)


class Outcome(NamedTuple):
    name: Name
    share: float
    """Of the text, 0 to 1, that was accepted and still stood when the window ended."""
    reward: float | None
    """None: no judgement, and nothing to train."""


class Signals(msgspec.Struct, array_like=True, gc=False):
    """All that a suggestion's events leave behind."""

    shown: bool = False
    shown_ms: int = 0
    shown_editor_ms: int = 0
    accepted_units: int = 0
    """The most that was said; UTF-16 code units."""
    whole: bool = False
    undone: bool = False
    rejected: bool = False
    superseded: bool = False
    """Typed over before anybody could read it."""
    continued: bool = False
    """Typed through: its rest is shown under another id."""
    persisted_s: int = 0
    difference: float = 0.0
    """Share of the accepted text that was edited away, at `persisted_s` after the accept."""
    settled_ms: int | None = None
    """Time of the last signal that ends it, unless another comes."""

    def add(self, event: Feedback, at_ms: int, *, text_length: int, flicker_ms: int) -> None:
        self.continued |= event.continues is not None
        if event.kind not in ("ignored", "shown"):
            self.shown = True
        match event.kind:
            case "shown":
                self.shown, self.shown_ms, self.shown_editor_ms = True, at_ms, event.editor_ms
                self.superseded, self.settled_ms = False, self.settled_ms if self.whole else None
            case "accepted":
                self.whole, self.undone, self.settled_ms = True, False, at_ms
            case "partially_accepted":
                self._accept_part(event.accepted_length or 0, text_length, at_ms)
            case "rejected":
                self.rejected, self.settled_ms = True, at_ms
            case "ignored":
                self.superseded = (
                    event.superseded_by is not None and self._stood_ms(event, at_ms) < flicker_ms
                )
                self.settled_ms = at_ms
            case "undone":
                self.undone, self.settled_ms = True, at_ms
                self.whole, self.accepted_units, self.persisted_s, self.difference = False, 0, 0, 0.0
            case "persisted":
                seconds = event.persisted_s or 0
                if seconds >= self.persisted_s:
                    self.persisted_s, self.difference = seconds, event.difference or 0.0

    def outcome(self, text_length: int, rewards: Rewards) -> Outcome:
        """A later accept supersedes a reject; an accept that was undone is one."""
        if not text_length:
            return Outcome("no_text", 0.0, rewards.no_text)
        if not self.shown:
            return Outcome("never_shown", 0.0, None)
        if self.undone:
            return Outcome("undone", 0.0, rewards.rejected)
        share = 1.0 if self.whole else min(self.accepted_units / text_length, 1.0)
        if share > 0:
            reward = rewards.accepted * share * (1.0 - rewards.edited_share * self.difference)
            name: Name = "accepted" if share == 1.0 else "partially_accepted"
            return Outcome(name, share * (1.0 - self.difference), reward)
        if self.rejected:
            return Outcome("rejected", 0.0, rewards.rejected)
        if self.superseded and not self.continued:
            return Outcome("superseded", 0.0, None)
        return Outcome("ignored", 0.0, rewards.ignored)

    def _accept_part(self, units: int, text_length: int, at_ms: int) -> None:
        if units == 0:
            return
        self.accepted_units, self.undone = max(self.accepted_units, units), False
        # The rest still stands there: only the whole of it settles anything.
        self.settled_ms = at_ms if self.accepted_units >= text_length else None

    def _stood_ms(self, event: Feedback, at_ms: int) -> int:
        """How long it stood there: by the editor's clock, or by the log's where that one ran backwards."""
        stood_ms = event.editor_ms - self.shown_editor_ms
        return stood_ms if stood_ms >= 0 else at_ms - self.shown_ms


def outcome_of(events: Sequence[Feedback], text_length: int, *, rewards: Rewards, flicker_ms: int) -> Outcome:
    """Of a suggestion whose events all came in time: what the feedback join says of them, for whoever tries
    versions without a log."""
    signals = Signals()
    for event in events:
        signals.add(event, event.editor_ms, text_length=text_length, flicker_ms=flicker_ms)
    return signals.outcome(text_length, rewards)


def check(event: Feedback) -> None:
    """Raises WireError for an event that decodes and yet makes no sense."""
    size = len(encode_plain(event))
    _expect(size <= EVENT_BYTES_MAX, "event", f"at most {EVENT_BYTES_MAX} bytes", size)
    for place, identity in (("event_id", event.event_id), ("continues", event.continues)):
        size = 1 if identity is None else len(identity.encode())
        sound = 1 <= size <= ID_BYTES_MAX and "\0" not in (identity or "")
        _expect(sound, place, f"1 to {ID_BYTES_MAX} bytes without NUL", size)
    length = event.accepted_length
    _expect(length is not None or event.kind != "partially_accepted", "accepted_length", "a number", length)
    in_range = length is None or 0 <= length <= VERSION_MAX
    _expect(in_range, "accepted_length", f"0 to {VERSION_MAX}", length)
    difference = event.difference
    in_range = difference is None or (isfinite(difference) and 0.0 <= difference <= 1.0)
    _expect(in_range, "difference", "0 to 1", difference)
    seconds = event.persisted_s
    _expect(seconds is not None or event.kind != "persisted", "persisted_s", "a number", seconds)
    in_range = seconds is None or 0 <= seconds <= PERSISTED_S_MAX
    _expect(in_range, "persisted_s", f"0 to {PERSISTED_S_MAX}", seconds)
    _expect(abs(event.editor_ms) <= VERSION_MAX, "editor_ms", f"at most {VERSION_MAX}", event.editor_ms)


def _expect(holds: bool, place: str, expected: str, came: object) -> None:
    if not holds:
        raise WireError(f"{place}: expected {expected}, got {came}")

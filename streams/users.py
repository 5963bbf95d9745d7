"""The limit of one user's weight: judgements become rewards, or a quarantine for who gives too many. A pure
processor, keyed by user.

Not here: how a suggestion is judged (`streams.feedback`). This is a stage of its own because a user's
suggestions lie in all partitions of their topics, and only here together (docs/adr/0011-users-limit.md).

Time is that at which suggestions were made, by the broker's clock, so that a join which catches up after an
hour flags nobody. In each window of `window_ms` the first `units_max` of a user pass. Accepts that no person
can give, more than `accepts_max` of the suggestions of one second, put all that the user gives for `flag_ms`
into quarantine.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from headrace.config import AtLeastOne
from headrace.streams.processor import Event, Output, Result
from headrace.wire.records import Exposure, Judgement, Record, Reward
from headrace.wire.topics import EXPOSURES, JUDGEMENTS, REWARDS, USERS_STATE, Topic

GRADER = "streams.feedback/1"
COMPONENT = "user"
WINDOWS, SECONDS = 24, 32
"""Windows and seconds that are counted at a time: suggestions are judged out of order, by as much as the
window of the feedback join. What is older than all of them can no longer be counted, and is not trained."""
HASH_BYTES = 8
RECENT = 64
"""Judgements that are known when they come again."""
TIMER_MS = 60_000


class UsersConfig(msgspec.Struct, frozen=True, kw_only=True):
    window_ms: AtLeastOne = 600_000
    """In which a user's suggestions are counted; the windows follow each other."""
    units_max: AtLeastOne = 600
    """Suggestions of one user that are trained in a window."""
    accepts_max: AtLeastOne = 10
    """Of the suggestions made for one user within one second."""
    flag_ms: AtLeastOne = 3_600_000
    """All that a user with too many accepts gives for so long is quarantined."""
    users_max: AtLeastOne = 1_000_000
    """Remembered in one partition; who was heard of longest ago is forgotten first."""


class Tally(msgspec.Struct, array_like=True):
    """What one user gave of late."""

    windows: list[tuple[int, int]]
    """(number of the window, suggestions), newest last."""
    seconds: list[tuple[int, int]]
    """(second, accepts), newest last."""
    flagged_ms: int | None
    """Until then."""
    last_ms: int
    recent: bytes


class UsersLimit:
    """Implements `streams.processor.Processor`."""

    name = "users"
    inputs: tuple[Topic, ...] = (JUDGEMENTS,)
    outputs: tuple[Topic, ...] = (REWARDS, EXPOSURES)
    state_topic = USERS_STATE
    state_type: Any = Tally
    item_type: Any = None
    compact = True
    open_max = 1
    open_bytes_max = 1

    def __init__(self, config: UsersConfig | None = None) -> None:
        self._config = config = config or UsersConfig()
        self.settled_max = config.users_max

    def key(self, record: Record) -> str:
        assert isinstance(record, Judgement), type(record)
        return record.exposure.user or record.exposure.group_id

    def weight(self, state: Tally) -> int:
        return 0  # nothing waits here

    def handle(self, key: str, state: Tally | None, event: Event) -> Result:
        judgement = event.record
        assert isinstance(judgement, Judgement), type(judgement)
        exposure = judgement.exposure
        if not exposure.user:
            return Result(None, _outputs(judgement, judgement.abuse), changed=False)
        state = Tally([], [], None, 0, b"") if state is None else state
        identity = blake2b(exposure.group_id.encode(), digest_size=HASH_BYTES).digest()
        known = state.recent
        if any(known[at : at + HASH_BYTES] == identity for at in range(0, len(known), HASH_BYTES)):
            return Result(state, counts=("duplicate",), changed=False)
        state.recent = (known + identity)[-HASH_BYTES * RECENT :]
        state.last_ms = max(state.last_ms, event.at_ms)
        abuse = judgement.abuse or self._abuse(state, exposure)
        timer_ms = -(-(state.last_ms + 2 * self._config.window_ms) // TIMER_MS) * TIMER_MS
        if state.flagged_ms is not None:
            timer_ms = max(timer_ms, state.flagged_ms + 1)
        return Result(state, _outputs(judgement, abuse), timer_ms, ("quarantined" if abuse else "passed",))

    def on_timer(self, key: str, state: Tally, now_ms: int) -> Result:
        return Result(None)

    def give_up(self, key: str, state: Tally, reason: str, now_ms: int) -> Result:
        return Result(state, changed=False)

    def _abuse(self, state: Tally, exposure: Exposure) -> str:
        """Counts a unit; why it must not be trained, or nothing."""
        config, made_ms = self._config, exposure.opened_ms
        number = made_ms // config.window_ms
        if len(state.windows) == WINDOWS and number < state.windows[0][0]:
            return f"user: older than the last {WINDOWS} windows of {config.window_ms // 1000} s"
        state.windows, units = _counted(state.windows, number, 1, WINDOWS)
        accepted = exposure.accepted > 0
        state.seconds, accepts = _counted(state.seconds, made_ms // 1000, int(accepted), SECONDS)
        if accepts > config.accepts_max:
            state.flagged_ms = max(state.flagged_ms or 0, made_ms + config.flag_ms)
        if state.flagged_ms is not None and made_ms <= state.flagged_ms:
            return f"user: more than {config.accepts_max} accepts within a second"
        if units > config.units_max:
            return f"user: more than {config.units_max} suggestions within {config.window_ms // 1000} s"
        return ""


def _counted(
    counts: Iterable[tuple[int, int]], slot: int, more: int, slots_max: int
) -> tuple[list[tuple[int, int]], int]:
    """The counts with `more` in `slot`, of which the newest stay, and that of `slot`."""
    merged = dict(counts)
    merged[slot] = merged.get(slot, 0) + more
    return sorted(merged.items())[-slots_max:], merged[slot]


def _outputs(judgement: Judgement, abuse: str) -> tuple[Output, Output]:
    exposure = judgement.exposure
    if abuse:
        exposure = msgspec.structs.replace(exposure, quarantined=True)
    group_id = exposure.group_id
    reward = Reward(
        run=exposure.run,
        group_id=group_id,
        member=0,
        attempt=judgement.attempt,
        component=COMPONENT,
        verdict="quarantine" if abuse else "score",
        value=0.0 if abuse else exposure.reward,
        range_min=-1.0,
        range_max=1.0,
        evidence=abuse or judgement.evidence,
        grader=GRADER,
    )
    return (
        Output(REWARDS.name, group_id, reward, f"{group_id}/user"),
        Output(EXPOSURES.name, group_id, exposure, f"{group_id}/exposure"),
    )

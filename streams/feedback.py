"""The feedback join: what editors report of a suggestion becomes one judgement. A pure processor.

Not here: what signals are worth (`streams.suggestion`), the limit of one user's weight (`streams.users`), any
I/O (see `streams.processor`).

A suggestion is made by inference (its live step on `rollout.steps`), and its window begins at the broker time
of that step. It closes once, whatever the order in which the two topics are read:

    judged      shown, and accepted, rejected, undone or ignored; or silent by choice: a `Judgement`
    not judged  never shown, superseded before it could be read, or the rest of another suggestion:
                `GroupFailed` with that reason, so that the unit is accounted, and is never trained
    orphan      an event whose suggestion is not made within `orphan_ms` after it: to `dead.letters`

A suggestion that is *typed through* is one unit: when the first event of an id names another in `continues`,
this and all later ones are sent on to that other, under their own event ids.

The window is `window_ms`, so long that edits after an accept are seen. With `settle_ms` a suggestion whose
fate is known closes so long after its last signal, if that is sooner: rewards come within seconds, and undos
and edits after that count as late.
"""

from hashlib import blake2b
from typing import Any

import msgspec

from headrace.config import AtLeastOne, AtLeastZero
from headrace.errors import WireError
from headrace.streams.processor import Event, Output, Result
from headrace.streams.suggestion import Rewards, Signals, check
from headrace.wire.codec import CONTENT_TYPE, at, encode_plain, type_name
from headrace.wire.records import (
    VERSION_MAX,
    DeadLetter,
    Exposure,
    Feedback,
    GroupFailed,
    Judgement,
    Record,
    RolloutStep,
)
from headrace.wire.topics import (
    DEAD_LETTERS,
    EXPOSURES,
    FEEDBACK,
    FEEDBACK_STATE,
    JUDGEMENTS,
    ROLLOUT_STEPS,
    Topic,
)

SILENT = "silent"
"""Finish of a step that shows nothing, because the model chose so."""
TIMER_MS = 250
"""Timers are rounded up to this: many suggestions share one, which then costs little for each."""
HASH_BYTES = 8
OPEN_BYTES = 400
"""What an open suggestion holds in memory, rounded up (benchmarks/feedback.md)."""


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


class Waiting(msgspec.Struct, array_like=True, gc=False):
    """An event before its suggestion is known."""

    at_ms: int
    partition: int
    offset: int
    event: Feedback


class Held(msgspec.Struct, tag="h", array_like=True):
    """Events without a suggestion, in the order of the log."""

    events: list[Waiting]
    bytes: int


class Open(msgspec.Struct, tag="o", array_like=True):
    """A suggestion that was made, and what was said of it so far."""

    run: str
    attempt: int
    version: int
    cohort: str
    user: str
    region: str
    made_ms: int
    latency_ms: int
    text_length: int
    signals: Signals
    seen: bytes = b""
    """Hashes of the ids of its events."""


class Continued(msgspec.Struct, tag="c", array_like=True):
    """The rest of another suggestion: what is said of it is said of that one."""

    to: str
    first_ms: int
    made: bool
    """Inference made it, too, and the unit has been accounted."""
    seen: bytes


class Closed(msgspec.Struct, tag="x", array_like=True):
    at_ms: int


State = Held | Open | Continued | Closed


class FeedbackJoin:
    """Implements `streams.processor.Processor`."""

    name = "feedback"
    inputs: tuple[Topic, ...] = (ROLLOUT_STEPS, FEEDBACK)
    outputs: tuple[Topic, ...] = (JUDGEMENTS, EXPOSURES, ROLLOUT_STEPS, FEEDBACK, DEAD_LETTERS)
    state_topic = FEEDBACK_STATE
    state_type: Any = State
    item_type: Any = None
    compact = True

    def __init__(self, config: FeedbackConfig | None = None) -> None:
        self._config = config = config or FeedbackConfig()
        self.open_max = config.open_max
        self.open_bytes_max = config.open_bytes_max
        self.settled_max = config.closed_max

    def key(self, record: Record) -> str:
        if isinstance(record, Feedback):
            return record.suggestion_id
        assert isinstance(record, RolloutStep | GroupFailed), type(record)
        return record.group_id

    def weight(self, state: State) -> int:
        match state:
            case Closed():
                return 0
            case Held():
                return OPEN_BYTES + state.bytes
        return OPEN_BYTES + len(state.seen)

    def handle(self, key: str, state: State | None, event: Event) -> Result:
        record = event.record
        if isinstance(record, Feedback):
            check(record)
            return self._heard(key, state, event, record)
        if isinstance(record, RolloutStep) and record.source == "live":
            _check_step(record)
            return self._made(key, state, event.at_ms, record)
        return Result(state, counts=("passed",), changed=False)

    def on_timer(self, key: str, state: State, now_ms: int) -> Result:
        match state:
            case Open():
                return self._judged(key, state, self._end_ms(state))
            case Held():
                return self._orphans(state, now_ms)
            case Continued():
                return self._closed(state.first_ms + self._config.window_ms)
        return Result(None)

    def give_up(self, key: str, state: State, reason: str, now_ms: int) -> Result:
        match state:
            case Open():
                return self._dropped(key, state, reason, now_ms, "given_up")
            case Held():
                return Result(None, [_letter(waiting, reason, now_ms) for waiting in state.events])
            case Continued():
                return self._closed(now_ms)
        return Result(state, changed=False)

    # Records that come in.

    def _made(self, key: str, state: State | None, at_ms: int, step: RolloutStep) -> Result:
        match state:
            case Closed():
                return Result(state, counts=("late",), changed=False)
            case Open():
                return Result(state, counts=("duplicate",), changed=False)
            case Continued(made=True):
                return Result(state, counts=("duplicate",), changed=False)
            case Continued() if at_ms > state.first_ms + self._config.window_ms:
                return Result(state, counts=("late",), changed=False)
        made = Open(
            run=step.run,
            attempt=step.attempt,
            version=step.weights_version,
            cohort=step.cohort,
            user=step.user,
            region=step.region,
            made_ms=at_ms,
            latency_ms=max(step.ended_ms - step.started_ms, 0),
            text_length=step.text_length,
            signals=Signals(),
        )
        if isinstance(state, Continued) and state.first_ms <= self._end_ms(made):
            state.made = True
            return self._continued(key, made, state)
        held = state.events if isinstance(state, Held) else []
        if step.finish == SILENT:
            return self._judged(key, made, at_ms, silent=True, counts=("late",) * len(held))
        outputs: list[Output] = []
        counts: list[str] = []
        for waiting in held:
            refused = self._refusal(made, waiting.event, waiting.at_ms)
            if refused:
                outputs.append(_letter(waiting, refused, at_ms))
            counts.append("dead" if refused else self._add(made, waiting.event, waiting.at_ms))
            if counts[-1] == "abuse":
                return self._abuse(key, made, waiting.at_ms, outputs, counts)
        return Result(made, outputs, self._timer(made), counts)

    def _heard(self, key: str, state: State | None, event: Event, record: Feedback) -> Result:
        match state:
            case Closed():
                return Result(state, counts=("late",), changed=False)
            case Continued():
                return self._sent_on(state, record)
            case Held():
                return self._held(state, event, record)
        refused = "" if state is None else self._refusal(state, record, event.at_ms)
        if refused:
            raise WireError(refused)
        to = record.continues if record.continues != key else None
        if state is None:
            if to is not None:
                return self._sent_on(Continued(to, event.at_ms, False, b""), record)
            return self._held(Held([], 0), event, record)
        if to is not None and not state.seen and event.at_ms <= self._end_ms(state):
            continued = Continued(to, event.at_ms, True, b"")
            return _both(self._continued(key, state, continued), self._sent_on(continued, record))
        count = self._add(state, record, event.at_ms)
        if count == "abuse":
            return self._abuse(key, state, event.at_ms, [], [count])
        changed = count == "heard"
        return Result(state, (), self._timer(state) if changed else None, (count,), changed)

    def _refusal(self, state: Open, record: Feedback, at_ms: int) -> str:
        """Why an event may not judge this suggestion; empty when it may."""
        if record.user and state.user and record.user != state.user:
            return "user: expected whom the suggestion was made for, got another"
        if state.made_ms > at_ms + self._config.orphan_ms:
            return self._orphan_reason
        return ""

    def _add(self, state: Open, record: Feedback, at_ms: int) -> str:
        """Takes an event in; what became of it: `heard`, or nothing changed."""
        if at_ms > self._end_ms(state):
            return "late"
        identity = _hash(record.event_id)
        if _holds(state.seen, identity):
            return "duplicate"
        if len(state.seen) >= HASH_BYTES * self._config.events_max:
            return "abuse"
        state.seen += identity
        flicker_ms = self._config.flicker_ms
        state.signals.add(record, at_ms, text_length=state.text_length, flicker_ms=flicker_ms)
        return "heard"

    def _held(self, state: Held, event: Event, record: Feedback) -> Result:
        if any(waiting.event.event_id == record.event_id for waiting in state.events):
            return Result(state, counts=("duplicate",), changed=False)
        size = len(encode_plain(record))
        if len(state.events) > self._config.events_max or state.bytes + size > self._config.held_bytes_max:
            raise WireError(
                f"suggestion: expected one that was made, or at most {self._config.events_max} events and "
                f"{self._config.held_bytes_max} bytes that wait for it, got more"
            )
        state.events.append(Waiting(event.at_ms, event.partition, event.offset, record))
        state.bytes += size
        first_ms = state.events[0].at_ms
        return Result(state, (), _rounded(first_ms + self._config.orphan_ms + 1), ("held",))

    def _sent_on(self, state: Continued, record: Feedback) -> Result:
        """To the suggestion that this one continues; what continues itself there was sent on."""
        identity = _hash(record.event_id)
        if _holds(state.seen, identity):
            return Result(state, counts=("duplicate",), changed=False)
        if len(state.seen) >= HASH_BYTES * self._config.events_max:
            raise WireError(f"event: expected at most {self._config.events_max} of one suggestion, got more")
        state.seen += identity
        on = msgspec.structs.replace(record, suggestion_id=state.to, continues=state.to)
        output = Output(FEEDBACK.name, state.to, on, record.event_id)
        return Result(state, (output,), _rounded(state.first_ms + self._config.window_ms + 1), ("sent_on",))

    # What goes out.

    def _end_ms(self, state: Open) -> int:
        """The last broker time that counts."""
        end_ms = state.made_ms + self._config.window_ms
        settled_ms, settle_ms = state.signals.settled_ms, self._config.settle_ms
        if settle_ms is None or settled_ms is None:
            return end_ms
        return min(end_ms, max(state.made_ms, settled_ms + settle_ms))

    def _timer(self, state: Open) -> int:
        return _rounded(self._end_ms(state) + 1)

    def _judged(
        self, key: str, state: Open, at_ms: int, *, silent: bool = False, counts: tuple[str, ...] = ()
    ) -> Result:
        rewards = self._config.rewards
        outcome = state.signals.outcome(state.text_length, rewards)
        name = SILENT if silent else outcome.name
        reward = rewards.silent if silent else outcome.reward
        if reward is None:
            return self._dropped(key, state, name, at_ms, name)
        shown = state.signals.shown
        exposure = _exposure(
            key, state, at_ms, silent=silent, shown=shown, accepted=outcome.share, reward=reward
        )
        judgement = Judgement(
            exposure=exposure, attempt=state.attempt, outcome=name, evidence=_evidence(name, state.signals)
        )
        return self._closed(at_ms, (_judgement(key, judgement),), (*counts, f"closed.{name}"))

    def _abuse(self, key: str, state: Open, at_ms: int, outputs: list[Output], counts: list[str]) -> Result:
        at_ms = max(at_ms, state.made_ms)
        exposure = _exposure(key, state, at_ms, shown=state.signals.shown, quarantined=True)
        reason = f"more than {self._config.events_max} events of one suggestion"
        judgement = Judgement(exposure=exposure, attempt=state.attempt, outcome="abuse", abuse=reason)
        return self._closed(at_ms, (*outputs, _judgement(key, judgement)), (*counts, "closed.abuse"))

    def _continued(self, key: str, made: Open, state: Continued) -> Result:
        dropped = self._dropped(key, made, f"continues {state.to}", made.made_ms, "continued")
        timer_ms = _rounded(state.first_ms + self._config.window_ms + 1)
        return Result(state, dropped.outputs[:1], timer_ms, dropped.counts)

    def _dropped(self, key: str, state: Open, reason: str, at_ms: int, count: str) -> Result:
        failed = GroupFailed(run=state.run, group_id=key, attempt=state.attempt, reason=reason)
        return self._closed(
            at_ms,
            (
                Output(ROLLOUT_STEPS.name, key, failed, f"{key}/failed"),
                Output(EXPOSURES.name, key, _exposure(key, state, at_ms), f"{key}/exposure"),
            ),
            (f"closed.{count}",),
        )

    @property
    def _orphan_reason(self) -> str:
        return f"orphan: expected its suggestion within {self._config.orphan_ms} ms, none came"

    def _orphans(self, state: Held, now_ms: int) -> Result:
        """Those that have waited long enough; the others go on waiting."""
        wait_ms = self._config.orphan_ms
        old = [waiting for waiting in state.events if waiting.at_ms + wait_ms < now_ms]
        letters = [_letter(waiting, self._orphan_reason, waiting.at_ms + wait_ms) for waiting in old]
        counts = ("orphan",) * len(letters)
        rest = state.events[len(old) :]
        if not rest:
            return Result(None, letters, counts=counts)
        size = sum(len(encode_plain(waiting.event)) for waiting in rest)
        return Result(Held(rest, size), letters, _rounded(rest[0].at_ms + wait_ms + 1), counts)

    def _closed(self, at_ms: int, outputs: tuple[Output, ...] = (), counts: tuple[str, ...] = ()) -> Result:
        return Result(Closed(at_ms), outputs, _rounded(at_ms + self._config.closed_memory_ms), counts)


def _check_step(step: RolloutStep) -> None:
    """Raises WireError."""
    if not 0 <= step.text_length <= VERSION_MAX:
        raise WireError(f"text_length: expected 0 to {VERSION_MAX}, got {step.text_length}")
    if (step.member, step.step, step.last) != (0, 0, True):
        came = (step.member, step.step, step.last)
        raise WireError(f"live step: expected member 0, step 0, last, got {came}")


def _both(first: Result, second: Result) -> Result:
    """Two calls on the same state as one."""
    return second._replace(outputs=(*first.outputs, *second.outputs), counts=(*first.counts, *second.counts))


def _exposure(
    key: str,
    state: Open,
    at_ms: int,
    *,
    silent: bool = False,
    shown: bool = False,
    accepted: float = 0.0,
    reward: float = 0.0,
    quarantined: bool = False,
) -> Exposure:
    return Exposure(
        run=state.run,
        group_id=key,
        version=state.version,
        cohort=state.cohort,
        user=state.user,
        region=state.region,
        silent=silent,
        shown=shown,
        accepted=accepted,
        reward=reward,
        quarantined=quarantined,
        latency_ms=state.latency_ms,
        opened_ms=state.made_ms,
        closed_ms=at_ms,
    )


def _judgement(key: str, judgement: Judgement) -> Output:
    return Output(JUDGEMENTS.name, judgement.exposure.user or key, judgement, f"{key}/judgement")


def _evidence(name: str, signals: Signals) -> str:
    if name == "partially_accepted":
        name = f"{name} {signals.accepted_units}"
    if signals.persisted_s:
        name += f", {signals.difference:.3g} edited away after {signals.persisted_s} s"
    return name


def _letter(waiting: Waiting, reason: str, at_ms: int) -> Output:
    """For an event that was read before it could be judged. Its bytes are those of the record; unknown fields
    of a later version stay at its place in the log."""
    record = waiting.event
    place = f"{FEEDBACK.name}/{waiting.partition}/{waiting.offset}"
    letter = DeadLetter(
        topic=FEEDBACK.name,
        partition=waiting.partition,
        offset=waiting.offset,
        key=record.suggestion_id.encode(),
        value=encode_plain(record),
        headers=(
            ("ce_id", record.event_id.encode()),
            ("ce_type", type_name(Feedback).encode()),
            ("content-type", CONTENT_TYPE),
        ),
        error="WireError",
        reason=f"{at(FEEDBACK.name, waiting.partition, waiting.offset)}: {reason}",
        by="streams.feedback",
        at_ms=at_ms,
    )
    return Output(DEAD_LETTERS.name, place, letter, place)


def _hash(event_id: str) -> bytes:
    return blake2b(event_id.encode(), digest_size=HASH_BYTES).digest()


def _holds(seen: bytes, identity: bytes) -> bool:
    return any(seen[start : start + HASH_BYTES] == identity for start in range(0, len(seen), HASH_BYTES))


def _rounded(time_ms: int) -> int:
    return -(-time_ms // TIMER_MS) * TIMER_MS

"""The feedback join: what editors report of a suggestion becomes one judgement. A pure processor.

Not here: what signals are worth (`streams.suggestion`), the limit of one user's weight (`streams.users`), any
I/O (see `streams.processor`).

A suggestion is made by inference (its live step on `rollout.steps`), and its window begins at the broker time
of that step. It closes once, whatever the order in which the two topics are read:

    judged      shown, and accepted, rejected, undone or ignored; at once when it is silent by choice, or
                no text that could be shown: a `Judgement`
    not judged  never shown, superseded before it could be read, or the rest of another suggestion:
                `GroupFailed` with that reason, so that the unit is accounted, and is never trained
    orphan      an event whose suggestion is not made within `orphan_ms` after it: to `dead.letters`

A suggestion that is *typed through* is one unit: when the first event of an id names another in `continues`,
this and all later ones are sent on to that other, under their own event ids.

The window is `window_ms`, so long that edits after an accept are seen. With `settle_ms` a suggestion whose
fate is known closes so long after its last signal, if that is sooner: rewards come within seconds, and undos
and edits after that count as late.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from headrace.errors import WireError
from headrace.streams.feedback_state import Closed, Continued, FeedbackConfig, Open, State
from headrace.streams.processor import Event, Output, Result
from headrace.streams.suggestion import Signals, check
from headrace.streams.waiting import Held, Waiting
from headrace.wire.records import (
    SILENT,
    VERSION_MAX,
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

__all__ = ["FeedbackConfig", "FeedbackJoin"]

TIMER_MS = 250
"""Timers are rounded up to this: many suggestions share one, which then costs little for each."""
FOREIGN = "user: expected whom the suggestion was made for, got another"
HASH_BYTES = 8
OPEN_BYTES = 400
"""What an open suggestion holds in memory, rounded up (benchmarks/feedback.md)."""


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
        return (
            OPEN_BYTES
            + len(state.seen)
            + (state.early.bytes if isinstance(state, Open) and state.early else 0)
        )

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
                return Result(None, [waiting.letter(reason, now_ms) for waiting in state.events])
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
        if (
            isinstance(state, Continued)
            and state.first_ms <= self._end_ms(made)
            and _may_judge(state.user, made)
        ):
            state.made = True
            return self._continued(key, made, state)
        held = state if isinstance(state, Held) else Held([])
        late = ("late",) * len(held.events)
        if step.finish == SILENT:
            return self._judged(key, made, at_ms, silent=True, counts=late)
        if not step.text_length:
            return self._judged(key, made, at_ms, counts=late)
        early = [waiting for waiting in held.events if waiting.at_ms < at_ms]
        if early:
            made.early = Held(early, held.bytes)
        return self._replayed(key, made, held.events)

    def _heard(self, key: str, state: State | None, event: Event, record: Feedback) -> Result:
        match state:
            case Closed():
                return Result(state, counts=("late",), changed=False)
            case Continued():
                return self._sent_on(state, record)
            case Held():
                return self._held(state, Waiting(event.at_ms, event.partition, event.offset, record))
        to = record.continues if record.continues != key else None
        waiting = Waiting(event.at_ms, event.partition, event.offset, record)
        if state is None:
            if to is not None:
                return self._sent_on(Continued(to, event.at_ms, record.user), record)
            return self._held(Held([]), waiting)
        if not _may_judge(record.user, state):
            raise WireError(FOREIGN)
        first = not state.seen and state.early is None
        if to is not None and first and event.at_ms <= self._end_ms(state):
            continued = Continued(to, event.at_ms, record.user, made=True)
            return _both(self._continued(key, state, continued), self._sent_on(continued, record))
        if event.at_ms < state.made_ms:
            return self._early(key, state, waiting)
        state.early = None
        count = self._add(state, record, event.at_ms)
        if count == "abuse":
            return self._abuse(key, state, event.at_ms, [], [count])
        changed = count == "heard"
        return Result(state, (), self._timer(state) if changed else None, (count,), changed)

    def _early(self, key: str, state: Open, waiting: Waiting) -> Result:
        """An event that the log took before its suggestion, read after it: taken as if it had waited."""
        early = state.early or Held([])
        if early.holds(waiting, self._config.orphan_ms):
            return Result(state, counts=("duplicate",), changed=False)
        early.add(waiting, events_max=self._config.events_max + 1, bytes_max=self._config.held_bytes_max)
        state.early = early
        return self._replayed(key, state, [waiting])

    def _replayed(self, key: str, state: Open, events: Sequence[Waiting]) -> Result:
        """`state` after events that waited for it."""
        outputs: list[Output] = []
        counts: list[str] = []
        for waiting in events:
            foreign = not _may_judge(waiting.event.user, state)
            if foreign or self._is_orphan(state, waiting):
                counts.append("foreign" if foreign else "orphan")
                outputs.append(waiting.letter(FOREIGN if foreign else self._orphan_reason, state.made_ms))
                continue
            counts.append(self._add(state, waiting.event, waiting.at_ms))
            if counts[-1] == "abuse":
                return self._abuse(key, state, waiting.at_ms, outputs, counts)
        return Result(state, outputs, self._timer(state), counts)

    def _is_orphan(self, state: Open, waiting: Waiting) -> bool:
        return waiting.at_ms + self._config.orphan_ms < state.made_ms

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
        state.user = state.user or record.user
        flicker_ms = self._config.flicker_ms
        state.signals.add(record, at_ms, text_length=state.text_length, flicker_ms=flicker_ms)
        return "heard"

    def _held(self, state: Held, waiting: Waiting) -> Result:
        if state.holds(waiting, self._config.orphan_ms):
            return Result(state, counts=("duplicate",), changed=False)
        state.add(waiting, events_max=self._config.events_max + 1, bytes_max=self._config.held_bytes_max)
        return Result(state, (), _rounded(state.events[0].at_ms + self._config.orphan_ms + 1), ("held",))

    def _sent_on(self, state: Continued, record: Feedback) -> Result:
        """To the suggestion that this one continues; what continues itself there was sent on."""
        identity = _hash(record.event_id)
        if _holds(state.seen, identity):
            return Result(state, counts=("duplicate",), changed=False)
        if len(state.seen) >= HASH_BYTES * self._config.events_max:
            raise WireError(f"event: expected at most {self._config.events_max} of one suggestion, got more")
        state.seen += identity
        # Code stays with the event that brought it: a chain of links would copy it from link to link.
        on = msgspec.structs.replace(record, suggestion_id=state.to, continues=state.to, text=b"")
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
        outputs = (
            Output(ROLLOUT_STEPS.name, key, failed, f"{key}/failed"),
            Output(EXPOSURES.name, key, _exposure(key, state, at_ms), f"{key}/exposure"),
        )
        return self._closed(at_ms, outputs, (f"closed.{count}",))

    @property
    def _orphan_reason(self) -> str:
        return f"orphan: expected its suggestion within {self._config.orphan_ms} ms, none came"

    def _orphans(self, state: Held, now_ms: int) -> Result:
        """Those that have waited long enough; the others go on waiting."""
        wait_ms = self._config.orphan_ms
        old = state.drop_older(now_ms - wait_ms)
        letters = [waiting.letter(self._orphan_reason, waiting.at_ms + wait_ms) for waiting in old]
        counts = ("orphan",) * len(letters)
        if not state.events:
            return Result(None, letters, counts=counts)
        return Result(state, letters, _rounded(state.events[0].at_ms + wait_ms + 1), counts)

    def _closed(self, at_ms: int, outputs: tuple[Output, ...] = (), counts: tuple[str, ...] = ()) -> Result:
        return Result(Closed(at_ms), outputs, _rounded(at_ms + self._config.closed_memory_ms), counts)


def _check_step(step: RolloutStep) -> None:
    """Raises WireError."""
    if not 0 <= step.text_length <= VERSION_MAX:
        raise WireError(f"text_length: expected 0 to {VERSION_MAX}, got {step.text_length}")
    if (step.member, step.step, step.last) != (0, 0, True):
        came = (step.member, step.step, step.last)
        raise WireError(f"live step: expected member 0, step 0, last, got {came}")


def _may_judge(user: str, state: Open) -> bool:
    return not user or not state.user or user == state.user


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


def _hash(event_id: str) -> bytes:
    return blake2b(event_id.encode(), digest_size=HASH_BYTES).digest()


def _holds(seen: bytes, identity: bytes) -> bool:
    return any(seen[start : start + HASH_BYTES] == identity for start in range(0, len(seen), HASH_BYTES))


def _rounded(time_ms: int) -> int:
    return -(-time_ms // TIMER_MS) * TIMER_MS

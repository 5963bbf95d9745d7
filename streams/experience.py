"""The experience join: prompts, rollout steps and rewards of a group become one `Experience`. A pure
processor.

Not here: what the trainer admits, how rewards are computed, any I/O (see `streams.processor`).

A group opens at its Prompt, or at a step or reward that was read before it, and closes once:

    complete   every member has a whole rollout with all required components (or a quarantine verdict)
    timeout    the Prompt's deadline passed by broker time; what is there goes out, `missing` names the rest
    failed     a worker gave the newest attempt up, a limit was passed, or no Prompt came; see `reason`

A deadline and a worker's failure end a group at their broker time: what the log took until then counts,
whenever it is read. So the outcome of equal records is equal, in whatever order the topics are read. (A group
that is complete closes at once, even if a failure from before is read later: nothing is missing.)

A live suggestion is a group of one without a Prompt: it opens at its step, closes with the judgement of
`streams.feedback` (a reward, a quarantine or `GroupFailed`), and goes out on a topic of its own, so that the
trainer can give each source its share.

After that the group is remembered for `closed_memory_ms`, so that nothing late can open it again. No reward
is ever invented: a rollout without all of its required components has reward None.
"""

from functools import cached_property
from math import isfinite, prod
from typing import Any, Literal

import msgspec

from headrace.errors import WireError
from headrace.streams.group import Group, Kept
from headrace.streams.processor import Event, Output, Result
from headrace.wire.records import (
    GROUP_SIZE_MAX,
    TIME_MS_MAX,
    Experience,
    GroupFailed,
    Prompt,
    Record,
    Reward,
    RolloutStep,
)
from headrace.wire.topics import (
    EXPERIENCE,
    EXPERIENCE_LIVE,
    EXPERIENCE_STATE,
    PROMPTS,
    REWARDS,
    ROLLOUT_STEPS,
    Topic,
)

Closing = Literal["complete", "timeout", "failed"]


class ExperienceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the join."""

    closed_memory_ms: int = 6 * 3_600_000
    """A closed group is remembered so long: longer than a worker may hold a prompt before it is rolled out
    again."""
    live_memory_ms: int = 600_000
    """The same of a live suggestion, which nobody rolls out again: only what was sent twice must be known."""
    orphan_ms: int = 600_000
    """Steps and rewards wait so long for their Prompt."""
    group_bytes_max: int = 64 << 20
    """Decoded records of one group."""
    open_groups_max: int = 250_000
    """In one partition. Live suggestions are many and small: `open_bytes_max` is what they meet first."""
    open_bytes_max: int = 1 << 30
    """Decoded records of all open groups of a partition."""
    closed_groups_max: int = 500_000
    """Remembered in one partition; the oldest are forgotten first."""


class Open(msgspec.Struct, tag="open", dict=True):
    """A group on its way: all that it got, in the order of arrival."""

    log: list[Kept]

    @cached_property
    def group(self) -> Group:
        return Group.of(self.log)


class Closed(msgspec.Struct, tag="closed", frozen=True):
    """The group went out; nothing opens it again."""

    at_ms: int


class ExperienceJoin:
    """Implements `streams.processor.Processor`."""

    name = "experience"
    inputs: tuple[Topic, ...] = (PROMPTS, ROLLOUT_STEPS, REWARDS)
    outputs: tuple[Topic, ...] = (EXPERIENCE, EXPERIENCE_LIVE)
    state_topic = EXPERIENCE_STATE
    state_type: Any = Open | Closed
    item_type: Any = Kept
    compact = False

    def __init__(self, config: ExperienceConfig | None = None) -> None:
        self._config = config = config or ExperienceConfig()
        self.open_max = config.open_groups_max
        self.open_bytes_max = config.open_bytes_max
        self.settled_max = config.closed_groups_max

    def key(self, record: Record) -> str:
        assert isinstance(record, Prompt | RolloutStep | Reward | GroupFailed), type(record)
        return record.group_id

    def weight(self, state: Open | Closed) -> int:
        return state.group.bytes if isinstance(state, Open) else 0

    def handle(self, key: str, state: Open | Closed | None, event: Event) -> Result:
        if isinstance(state, Closed):
            return Result(state, counts=("late",), changed=False)
        state = Open([]) if state is None else state
        group = state.group
        check(event.record, group.prompt)
        if group.ends_ms is not None and event.at_ms > group.ends_ms:
            return Result(state, counts=("late",), changed=False)
        kept = Kept.of(event.at_ms, event.record)
        if not group.add(kept):
            return Result(state, counts=("duplicate",), changed=False)
        state.log.append(kept)
        if isinstance(event.record, Prompt | GroupFailed) or group.live is event.record:
            # Records after the group's end do not count, whichever was read first.
            state.__dict__["group"] = group = Group.of(state.log)
        if group.bytes > self._config.group_bytes_max:
            reason = f"group: expected at most {self._config.group_bytes_max} bytes, got {group.bytes}"
            return self.give_up(key, state, reason, group.last_ms)
        if group.complete:
            return self._close(key, group, "complete", "", group.last_ms)
        return Result(state, timer_ms=self._end_ms(group) + 1)

    def on_timer(self, key: str, state: Open | Closed, now_ms: int) -> Result:
        if isinstance(state, Closed):
            return Result(None)
        group, end_ms = state.group, self._end_ms(state.group)
        if group.failure is not None:
            return self._close(key, group, "failed", group.failure.reason, end_ms)
        if group.ends_ms is not None:
            return self._close(key, group, "timeout", "", end_ms)
        reason = f"no prompt came within {self._config.orphan_ms} ms"
        return self._close(key, group, "failed", reason, end_ms)

    def give_up(self, key: str, state: Open | Closed, reason: str, now_ms: int) -> Result:
        if isinstance(state, Closed):
            return Result(state, changed=False)
        return self._close(key, state.group, "failed", reason, now_ms, with_rollouts=False)

    def _end_ms(self, group: Group) -> int:
        return group.first_ms + self._config.orphan_ms if group.ends_ms is None else group.ends_ms

    def _close(
        self, key: str, group: Group, closed: Closing, reason: str, at_ms: int, *, with_rollouts: bool = True
    ) -> Result:
        rollouts = group.rollouts() if with_rollouts else ()
        experience = Experience(
            run=group.run,
            group_id=key,
            source=group.source,
            env=group.env,
            task_id=group.prompt.task_id if group.prompt else "",
            group_size=len(group.members),
            rollouts=rollouts,
            missing=group.missing() if with_rollouts else tuple(group.members),
            closed=closed,
            reason=reason or group.thrown_out,
            admitted_version=group.admitted_version,
            opened_ms=group.first_ms,
            closed_ms=at_ms,
            region=group.region,
            user=group.user,
        )
        topic, memory_ms = EXPERIENCE, self._config.closed_memory_ms
        if group.live is not None:
            topic, memory_ms = EXPERIENCE_LIVE, self._config.live_memory_ms
        return Result(
            Closed(at_ms),
            (Output(topic.name, key, experience, key),),
            timer_ms=at_ms + memory_ms,
            counts=(f"closed.{closed}" if group.live is None else f"closed.live.{closed}",),
        )


def check(record: Record, prompt: Prompt | None) -> None:
    """Raises WireError for a record that decodes and yet makes no sense: numbers out of range, lengths that
    differ."""
    if isinstance(record, Prompt):
        _expect(
            1 <= record.group_size <= GROUP_SIZE_MAX,
            "group_size",
            f"1 to {GROUP_SIZE_MAX}",
            record.group_size,
        )
        # The timer after it must still be a number that the state can hold.
        _expect(
            record.deadline_ms <= TIME_MS_MAX, "deadline_ms", f"at most {TIME_MS_MAX}", record.deadline_ms
        )
        _expect(bool(record.components), "components", "at least one", record.components)
        _expect(
            all(map(isfinite, record.components.values())), "components", "finite weights", record.components
        )
        return
    if isinstance(record, GroupFailed):
        return
    assert isinstance(record, RolloutStep | Reward), type(record)
    size = 1 << 31 if prompt is None else prompt.group_size
    _expect(0 <= record.member < size, "member", f"0 to {size - 1}", record.member)
    if isinstance(record, Reward):
        if record.verdict == "score":
            bounds = f"{record.range_min} to {record.range_max}"
            in_range = isfinite(record.value) and record.range_min <= record.value <= record.range_max
            _expect(in_range, f"value of {record.component}", bounds, record.value)
        return
    _expect(record.step >= 0, "step", "at least 0", record.step)
    if record.source == "live":
        whole = (record.member, record.step, record.last) == (0, 0, True)
        _expect(whole, "live step", "member 0, step 0, last", (record.member, record.step, record.last))
    tokens = len(record.tokens_out) // 4
    fed = len(record.tokens_in) // 4 + tokens - (record.step == 0)  # a step's last output is fed in the next
    lengths = (len(record.tokens_out), len(record.logp), len(record.loss_mask))
    _expect(
        lengths == (4 * tokens, 4 * tokens, tokens), "tokens_out, logp, loss_mask", "4n, 4n, n bytes", lengths
    )
    if record.routes:
        shape = record.routes_shape
        _expect(shape[:1] == (fed,), "routes_shape", f"{fed} tokens first", shape)
        _expect(
            len(record.routes) in (prod(shape), 2 * prod(shape)),
            "routes",
            f"u8 or u16 {shape}",
            len(record.routes),
        )


def _expect(holds: bool, place: str, expected: str, came: Any) -> None:
    if not holds:
        raise WireError(f"{place}: expected {expected}, got {came}")

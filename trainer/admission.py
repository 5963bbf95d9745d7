"""Which closed groups are trained, and why the others are not. Every unit read gets an answer.

A pure function of the records, the version and the ids seen; the first reason in `Reason` that holds is the
one counted. Members that are stale or too long are *withheld*: their tokens are not trained, their reward
stays in the group's baseline, their siblings are trained. A live suggestion is a group of one, measured
against a running mean.
"""

import math
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from headrace.errors import WireError
from headrace.policy.model import ModelConfig
from headrace.trainer import sequence
from headrace.trainer.advantage import advantages, rewards_equal
from headrace.wire.records import Consumed, Drop, Experience, Rollout, Source

Reason = Literal[
    "malformed",  # undecodable, or its counts contradict each other; also dead-lettered
    "duplicate",  # this group was read before
    "failed",  # the workers gave it up
    "never_shown",  # a live suggestion that no user saw
    "superseded",  # one that was typed over before anybody could read it
    "continued",  # one that only shows the rest of another, which is judged for both
    "incomplete",  # a member, or a required reward, never came
    "quarantined",  # a guard does not trust one of its rollouts
    "zero_advantage",  # all rewards are equal
    "over_long",  # more tokens than sequence_tokens_max
    "empty",  # nothing in it is trained
    "revoked",  # weights that were rolled back generated some of it: what their users did is no guide
    "stale",  # older than lag_versions_max; like the one before, after what follows from the records alone
    "user_cap",  # more live units of one user than a step trains
]
MALFORMED: Final = "malformed"
REVOKED: Final[Reason] = "revoked"
CAPPED: Final[Reason] = "user_cap"
BY_THE_STEP: Final[tuple[Reason, ...]] = (REVOKED, "stale")
"""A group none of whose members is left is dropped for these before what follows from its records alone."""
REWARD_MAX: Final = 1e6
"""What is above is a fault of a grader, and would drown every other gradient."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of the batch: where it lies, and what it holds or why that can't be known."""

    consumed: Consumed
    experience: Experience | WireError

    @property
    def place(self) -> str:
        return f"{self.consumed.topic}[{self.consumed.partition}]@{self.consumed.offset}"


@dataclass(frozen=True, slots=True)
class Unit:
    """An admitted group: members to train and their advantages."""

    group_id: str
    place: str
    env: str
    source: Source
    sequences: tuple[sequence.Sequence, ...]
    advantages: tuple[float, ...]

    @property
    def temperature(self) -> float:
        return self.sequences[0].temperature


@dataclass(slots=True)
class Admission:
    """The answer for one batch. `rewards`: of every rollout that has one, trained or not."""

    units: list[Unit] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    malformed: list[tuple[Entry, WireError]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    live_rewards: list[float] = field(default_factory=list)
    """Of the live units admitted."""
    read: list[str] = field(default_factory=list)
    """Ids answered for good: a later record of one is a duplicate. Malformed ones may be sent again."""


def admit(
    entries: Sequence[Entry],
    *,
    version: int,
    seen: Container[str],
    model: ModelConfig,
    lag_versions_max: int,
    sequence_tokens_max: int,
    scale_std: bool,
    baseline: float | None = None,
    user_units_max: int = 1 << 31,
    train_revoked: bool = False,
) -> Admission:
    """Admits `entries`, in order, to the step that starts from `version`. `baseline`: what single live units
    are measured against; when there is none yet, the mean of those that are admitted."""
    answer = Admission()
    users: Counter[str] = Counter()
    for entry in entries:
        group_id = entry.consumed.group_id
        try:
            if isinstance(entry.experience, WireError):
                raise entry.experience
            experience = entry.experience
            if group_id in seen or group_id in answer.read:
                answer.drops.append(_drop(experience, "duplicate"))
                continue
            reason = _group_reason(experience)
            members = [] if reason else _members(experience, version, model)
        except WireError as error:
            answer.malformed.append((entry, error))
            answer.drops.append(Drop(group_id=group_id, reason=MALFORMED))
            continue
        answer.read.append(group_id)
        answer.rewards += [r.reward for r in experience.rollouts if r.reward is not None]
        if reason:
            answer.drops.append(_drop(experience, reason))
            continue
        oldest = version - lag_versions_max
        revoked = entry.consumed.revoked and not train_revoked
        withheld = {m.member: _member_reason(m, oldest, sequence_tokens_max, revoked) for m in members}
        if experience.source == "live" and experience.user and not any(withheld.values()):
            users[experience.user] += 1
            if users[experience.user] > user_units_max:
                withheld = dict.fromkeys(withheld, CAPPED)
        _admit_group(answer, entry, experience, members, withheld, scale_std)
    if answer.live_rewards:
        own = math.fsum(answer.live_rewards) / len(answer.live_rewards)
        answer.units = [_measured(unit, own if baseline is None else baseline) for unit in answer.units]
    return answer


def _measured(unit: Unit, baseline: float) -> Unit:
    """A live unit, whose advantage was its reward so far, against what such units bring."""
    if unit.source != "live":
        return unit
    return replace(unit, advantages=tuple(reward - baseline for reward in unit.advantages))


def _admit_group(
    answer: Admission,
    entry: Entry,
    experience: Experience,
    members: list[sequence.Sequence],
    withheld: dict[int, Reason | None],
    scale_std: bool,
) -> None:
    """Adds the group as a unit, or as a drop when none of its members is left. A live unit has its reward in
    place of an advantage."""
    reasons = [reason for reason in withheld.values() if reason]
    if len(reasons) == len(members):
        by_the_step = (reason for reason in BY_THE_STEP if reason in reasons)
        answer.drops.append(_drop(experience, next(by_the_step, reasons[0])))
        return
    rewards = [_reward(rollout) for rollout in experience.rollouts]
    if experience.source == "live":
        answer.live_rewards += rewards
        values = rewards
    else:
        values = advantages(rewards, scale_std=scale_std)
    kept = [(m, a) for m, a in zip(members, values, strict=True) if not withheld[m.member]]
    answer.units.append(
        Unit(
            group_id=experience.group_id,
            place=entry.place,
            env=experience.env,
            source=experience.source,
            sequences=tuple(member for member, _ in kept),
            advantages=tuple(advantage for _, advantage in kept),
        )
    )
    for member in members:
        # A member that wrote nothing has no token to withhold.
        reason = withheld[member.member]
        if reason and reason != "empty":
            answer.drops.append(
                Drop(
                    group_id=experience.group_id,
                    reason=reason,
                    member=member.member,
                    tokens=member.tokens_trained,
                    env=experience.env,
                )
            )


def _group_reason(experience: Experience) -> Reason | None:
    rollouts = experience.rollouts
    if experience.closed == "failed":
        return _why_failed(experience.reason)
    whole = len(rollouts) == experience.group_size and all(r.whole for r in rollouts)
    if experience.missing or not whole or any(r.reward is None and not r.quarantined for r in rollouts):
        return "incomplete"
    if any(rollout.quarantined for rollout in rollouts):
        return "quarantined"
    rewards = [_reward(rollout) for rollout in rollouts]
    if not all(math.isfinite(reward) and abs(reward) <= REWARD_MAX for reward in rewards):
        raise WireError(f"rollouts: expected rewards within ±{REWARD_MAX:g}, got {rewards}")
    single = experience.source == "live"
    if single and len(rewards) != 1:
        raise WireError(f"rollouts: expected one of a live suggestion, got {len(rewards)}")
    return "zero_advantage" if not single and rewards_equal(rewards) else None


def _why_failed(reason: str) -> Reason:
    """Of a closed group without a judgement: the words of `streams.feedback`, or of whoever gave it up."""
    match reason.split(" "):
        case ["never_shown"]:
            return "never_shown"
        case ["superseded"]:
            return "superseded"
        case ["continues", _]:
            return "continued"
    return "failed"


def _members(experience: Experience, version: int, model: ModelConfig) -> list[sequence.Sequence]:
    """Raises WireError for what no honest writer sends."""
    numbers = [rollout.member for rollout in experience.rollouts]
    if len(set(numbers)) != len(numbers):
        raise WireError(f"rollouts: expected different members, got {numbers}")
    members = [sequence.sequence_of(rollout, model) for rollout in experience.rollouts]
    first = members[0]
    for member in members:
        newest = int(member.version_T.max()) if member.version_T.numel() else member.oldest_version
        if newest > version:
            raise WireError(
                f"member {member.member}: spans: expected versions up to {version}, got {newest}:"
                " these tokens are of another incarnation of the run"
            )
        if member.prefix_P.tolist() != first.prefix_P.tolist():
            raise WireError(
                f"member {member.member}: expected the prefix of member {first.member}, got another"
            )
        if member.temperature != first.temperature:
            raise WireError(
                f"member {member.member}: temperature: expected {first.temperature} as of member"
                f" {first.member}, got {member.temperature}"
            )
    return members


def _member_reason(member: sequence.Sequence, oldest: int, tokens_max: int, revoked: bool) -> Reason | None:
    if member.tokens > tokens_max:
        return "over_long"
    if not member.tokens_trained:
        return "empty"
    if revoked:
        return REVOKED
    return "stale" if member.oldest_version < oldest else None


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None, "asked only of complete groups"
    return rollout.reward


def _drop(experience: Experience, reason: Reason) -> Drop:
    tokens = sum(len(step.tokens_out) // 4 for rollout in experience.rollouts for step in rollout.steps)
    return Drop(group_id=experience.group_id, reason=reason, tokens=tokens, env=experience.env)

"""The units behind one step of the ledger: what each brought, read from its record.

Without torch: advantages are those of `trainer.advantage`, lag and tokens are counted here. Not here: what a
unit did to the gradient (`gradient_shares`), how it looks (`step`).
"""

import json
from dataclasses import dataclass
from typing import Any

from headrace.bus.protocol import Bus, TopicPartition
from headrace.cli.reading import at_places
from headrace.errors import StoreError, StoreUnavailable
from headrace.store.blobs import BlobReader
from headrace.store.claims import check_out
from headrace.trainer.advantage import advantages
from headrace.wire.codec import at
from headrace.wire.records import Consumed, Experience, Rollout, TrainStep

TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class Member:
    """One rollout of a unit. `withheld`: why its tokens were not trained; empty when they were."""

    member: int
    reward: float | None
    advantage: float | None
    """None where the unit was not trained."""
    tokens: int
    """Trained, or withheld."""
    lag: int
    withheld: str = ""


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One record that the step consumed. `members` is empty where the record can't be read; `problem` says
    why."""

    consumed: Consumed
    outcome: str
    members: tuple[Member, ...] = ()
    problem: str = ""

    @property
    def place(self) -> str:
        return at(self.consumed.topic, self.consumed.partition, self.consumed.offset)

    @property
    def tokens(self) -> int:
        """Trained."""
        return sum(member.tokens for member in self.members if not member.withheld)

    @property
    def lag(self) -> int | None:
        """Of the oldest token trained, in versions."""
        return max((member.lag for member in self.members if not member.withheld), default=None)


async def unit_rows(bus: Bus, blobs: BlobReader | None, step: TrainStep) -> list[UnitRow]:
    """Every record of the step, in its order. Raises StoreUnavailable."""
    places = [(TopicPartition(c.topic, c.partition), c.offset) for c in step.consumed]
    records = await at_places(bus, places)
    outcomes = _outcomes(step)
    std = _scaled(step)
    rows = []
    for consumed in step.consumed:
        place = at(consumed.topic, consumed.partition, consumed.offset)
        said = outcomes.get(consumed.group_id, [])
        outcome = said.pop(0) if said else "no answer recorded"
        item = records.get(place)
        if item is None:
            rows.append(UnitRow(consumed, outcome, problem="gone from the log"))
            continue
        if not isinstance(item.record, Experience):
            rows.append(UnitRow(consumed, outcome, problem=f"unreadable: {item.record}"))
            continue
        experience = item.record
        if experience.claim is not None:
            if blobs is None:
                rows.append(UnitRow(consumed, outcome, problem="in the store: --store.uri"))
                continue
            try:
                experience = await check_out(experience, blobs)
            except StoreUnavailable:
                raise
            except StoreError as error:
                rows.append(UnitRow(consumed, outcome, problem=str(error)))
                continue
        rows.append(UnitRow(consumed, outcome, _members(experience, step, outcome, std)))
    return rows


def _outcomes(step: TrainStep) -> dict[str, list[str]]:
    """What the ledger says of each id, in the order of its records: unreadable ones first, the answer,
    duplicates after it."""
    found: dict[str, list[str]] = {}
    for drop in step.drops:
        if drop.member is None:
            found.setdefault(drop.group_id, []).append(drop.reason)
    for group_id in step.admitted:
        found.setdefault(group_id, []).append(TRAINED)
    order = {"malformed": 0, "duplicate": 2}
    return {group_id: sorted(said, key=lambda word: order.get(word, 1)) for group_id, said in found.items()}


def _members(experience: Experience, step: TrainStep, outcome: str, std: bool) -> tuple[Member, ...]:
    rewards = [rollout.reward for rollout in experience.rollouts]
    known = [reward for reward in rewards if reward is not None]
    trained = outcome == TRAINED and len(known) == len(rewards)
    values = advantages(known, scale_std=std) if trained else [None] * len(rewards)
    withheld = {d.member: d.reason for d in step.drops if d.group_id == experience.group_id}
    return tuple(
        Member(
            rollout.member,
            rollout.reward,
            value,
            sum(sum(part.loss_mask) for part in rollout.steps),
            step.version_from - _oldest(rollout),
            withheld.get(rollout.member, "") if trained else outcome,
        )
        for rollout, value in zip(experience.rollouts, values, strict=True)
    )


def _oldest(rollout: Rollout) -> int:
    """The oldest weights that one of its tokens was generated under."""
    spans = [span.weights_version for part in rollout.steps for span in part.spans]
    return min(spans or [part.weights_version for part in rollout.steps], default=0)


def _scaled(step: TrainStep) -> bool:
    """Whether the step divided advantages by the standard deviation."""
    trainer = parsed(step.config).get("trainer")
    return bool(trainer.get("advantage_std")) if isinstance(trainer, dict) else False


def settings_changed(step: TrainStep) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (value of the step, default now), of each setting of the step that is not its default.
    One that this version does not know has the default None."""
    import msgspec

    from headrace.config import RunConfig
    from headrace.trainer.config import StepSettings, TrainerConfig

    defaults = flat(msgspec.to_builtins(StepSettings(run=RunConfig(), trainer=TrainerConfig())))
    own = flat(parsed(step.config))
    return {
        name: (value, defaults.get(name))
        for name, value in sorted(own.items())
        if value != defaults.get(name)
    }


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"trainer": {"lr": 1}}` as `{"trainer.lr": 1}`."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves


def parsed(text: str) -> dict[str, Any]:
    """The JSON object in `text`; empty when it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

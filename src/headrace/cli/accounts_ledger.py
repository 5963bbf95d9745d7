"""What the ledger alone says became of each unit: the first of the two sides of `headrace account`.

Checked on the way: steps without a hole, each consumed record with exactly one answer, no unit answered for
good twice. Not here: the records behind it.
"""

from collections import Counter, defaultdict

from headrace.bus.protocol import Bus
from headrace.cli.accounts import TRAINED, Answer, LedgerSide, Origin
from headrace.cli.reading import ledger
from headrace.wire.codec import at
from headrace.wire.records import Consumed, TrainStep

PASSING = ("duplicate", "malformed")
"""Answers that are not for good: the unit was, or may be, answered by another record."""


async def by_ledger(bus: Bus, run: str) -> LedgerSide:
    """Raises WireError for a record of the run that can't be read."""
    side = LedgerSide()
    async for delivery, step in ledger(bus, run):
        if step.step != side.steps + 1:
            side.contradictions.append(
                f"{delivery.place}: expected step {side.steps + 1} of the ledger, found step {step.step}"
            )
        side.steps = step.step
        side.positions = dict(step.positions)
        fold(side, step)
    return side


def fold(side: LedgerSide, step: TrainStep) -> None:
    """Adds the answers of one step."""
    whole: dict[str, list[str]] = defaultdict(list)
    for drop in step.drops:
        if drop.member is None:
            whole[drop.group_id].append(drop.reason)
        else:
            side.withheld[drop.reason] += 1
            side.withheld_tokens[drop.reason] += drop.tokens
    for group_id, count in Counter(step.admitted).items():
        whole[group_id] += [TRAINED] * count
    consumed: dict[str, list[Consumed]] = defaultdict(list)
    for unit in step.consumed:
        consumed[unit.group_id].append(unit)
    for group_id in sorted(whole.keys() | consumed.keys()):
        _fold_unit(side, step.step, group_id, consumed.get(group_id, []), whole.get(group_id, []))


def _fold_unit(side: LedgerSide, step: int, group_id: str, read: list[Consumed], said: list[str]) -> None:
    if len(read) != len(said):
        side.contradictions.append(
            f"{group_id}: step {step} of the ledger consumed {len(read)} records of it and answered"
            f" {len(said)}: {', '.join(said) or 'nothing'}"
        )
    side.duplicates += said.count("duplicate")
    good = [reason for reason in said if reason not in PASSING]
    before = side.answers.get(group_id)
    if good and before is not None and before.outcome != "malformed":
        side.contradictions.append(
            f"{group_id}: {before.outcome} in step {before.step} of the ledger, and {good[0]} in step {step}"
        )
    if len(good) > 1:
        side.contradictions.append(f"{group_id}: step {step} of the ledger says {' and '.join(good)}")
    malformed = said.count("malformed")
    if not read or (not good and not malformed):
        return
    if before is not None and not good:  # it has an answer, or is as unreadable as it was
        side.malformed_again += malformed
        return
    if before is not None:
        side.malformed_again += 1
    side.malformed_again += malformed if good else malformed - 1
    unit = next((unit for unit in read if unit.region), read[0]) if good else read[0]
    side.answers[group_id] = Answer(
        good[0] if good else "malformed",
        Origin(unit.source, unit.env, unit.region, unit.tokens),
        "" if good and malformed else at(unit.topic, unit.partition, unit.offset),
        step,
    )

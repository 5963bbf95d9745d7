"""Whether this trainer, its seed, its store and its topics are those of the run that the ledger tells of.

Checked at each start, before anything is computed or written: a trainer that goes on with the ledger of
another run would spoil both. Not here: whether the ledger itself is whole (`consumers.ledger`), whether each
step is what it says (`consumers.replay`).
"""

from headrace.bus.protocol import Bus, Delivery, TopicPartition
from headrace.config import RunConfig
from headrace.consumers.batches import positions_of
from headrace.consumers.ledger import Ledger
from headrace.errors import OffsetGone, StoreError, StoreUnavailable, TrainingError, WireError
from headrace.store.blobs import BlobReader
from headrace.wire.codec import decode
from headrace.wire.records import Consumed, Experience
from headrace.wire.topics import EXPERIENCE


async def check_start(blobs: BlobReader, ledger: Ledger, *, run: RunConfig, seed_root: str) -> None:
    """Before another trainer of this name is fenced. Raises TrainingError (the run began with another seed,
    model or store), StoreUnavailable. `seed_root`: of the weights that this trainer would begin with."""
    _check_seed(ledger, run, seed_root)
    await _check_store(blobs, ledger, run)


async def check_topics(bus: Bus, ledger: Ledger, *, run: RunConfig, group: str) -> None:
    """Once nobody else can write the ledger. Raises TrainingError or OffsetGone that names what the topics
    should hold and do not, BusUnavailable. `group`: the trainer's consumer group."""
    _check_announced(ledger, run)
    await _check_positions(bus, ledger, run, group)
    await _check_records(bus, ledger, run)


def _check_announced(ledger: Ledger, run: RunConfig) -> None:
    """A step and its version are one transaction: neither topic is ahead of the other."""
    newest = max(ledger.published, default=0)
    if newest != ledger.version:
        raise TrainingError(
            f"run {run.name!r}: expected the ledger to end at step {newest}, the newest version announced; it"
            f" ends at {ledger.version}: a topic was lost or made anew"
        )


def _check_seed(ledger: Ledger, run: RunConfig, seed_root: str) -> None:
    if ledger.steps and ledger.steps[-1].seed != run.seed:
        raise TrainingError(
            f"run {run.name!r}: expected run.seed {ledger.steps[-1].seed}, as in the ledger, got {run.seed}:"
            " another run has this name"
        )
    first = ledger.published.get(0)
    # What began with a stored state names it: `consumers.start` checks that.
    if first is not None and first.checkpoint is None and first.root != seed_root:
        raise TrainingError(
            f"run {run.name!r}: expected to start from the seed of root {first.root}, got {seed_root}:"
            " the run began with another model"
        )


async def _check_store(blobs: BlobReader, ledger: Ledger, run: RunConfig) -> None:
    first = ledger.published.get(0)
    if first is None:
        return
    try:
        await blobs.get(first.manifest_uri, first.manifest_sha256)
    except StoreUnavailable:
        raise
    except StoreError as error:
        raise TrainingError(
            f"run {run.name!r}: expected the store that it began with, this one lacks version 0: {error}"
        ) from error


async def _check_positions(bus: Bus, ledger: Ledger, run: RunConfig, group: str) -> None:
    topics = sorted({tp.topic for tp in positions_of(ledger.steps[-1].positions)}) if ledger.steps else []
    committed = await bus.committed(group, topics or [EXPERIENCE.name])
    if not ledger.steps:
        if committed and not ledger.published:
            raise TrainingError(
                f"run {run.name!r}: expected its ledger, for {group} has read {_shown(committed)}; there is"
                " none: its topics were lost or made anew"
            )
        return
    head = ledger.steps[-1]
    positions = positions_of(head.positions)
    ahead = {tp: offset for tp, offset in committed.items() if offset > positions.get(tp, offset)}
    if ahead:
        raise TrainingError(
            f"run {run.name!r}: expected {group} to have read up to {_shown(positions)}, as step {head.step}"
            f" says, found {_shown(ahead)}: the end of the ledger was lost"
        )
    ends = await bus.ends(topics)
    for tp, position in positions.items():
        if position > ends.get(tp, 0):
            raise OffsetGone(
                f"{tp}@{position}: expected a topic that reaches so far, for step {head.step} has read up to"
                f" there; it ends at {ends.get(tp, 0)}: another topic under the same name"
            )


async def _check_records(bus: Bus, ledger: Ledger, run: RunConfig) -> None:
    """Of each partition, the record read last by the newest step: it shows whether the topic is the same."""
    if not ledger.steps:
        return
    head = ledger.steps[-1]
    newest: dict[TopicPartition, Consumed] = {}
    for consumed in head.consumed:
        tp = TopicPartition(consumed.topic, consumed.partition)
        if tp not in newest or consumed.offset > newest[tp].offset:
            newest[tp] = consumed
    begins = await bus.begins(sorted({tp.topic for tp in newest}))
    for tp, consumed in newest.items():
        if consumed.offset < begins[tp]:
            continue  # retention took it: then nothing can be told
        found = [d async for d in bus.read_range(tp, consumed.offset, consumed.offset + 1)]
        stands = _group_of(found[0]) if found else "no record"
        if stands != consumed.group_id:
            raise TrainingError(
                f"run {run.name!r}: {tp}@{consumed.offset}: expected group {consumed.group_id!r}, as step"
                f" {head.step} read it, found {stands!r}: another topic under the same name"
            )


def _group_of(delivery: Delivery) -> str:
    try:
        record = decode(delivery.topic, delivery.value or b"", delivery.headers)
    except WireError:
        return (delivery.key or b"").decode(errors="replace")
    assert isinstance(record, Experience), "the only type of this topic"
    return record.group_id


def _shown(positions: dict[TopicPartition, int]) -> str:
    return ", ".join(f"{tp}@{offset}" for tp, offset in sorted(positions.items()))

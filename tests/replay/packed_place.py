"""A run of the tiny model as a source to replay from. Not tests.

The model, its log and its records live with the trainer's tests.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "trainer"))

from training_place import CONFIG, Place, messages
from training_process import seed

from headrace.consumers.ledger import read_ledger
from headrace.consumers.replay import Replayed, Source, replay, state_before
from headrace.store.blobs import Blobs
from headrace.trainer import provenance

__all__ = ["CONFIG", "Place", "messages", "replayed", "seed", "source_of"]


async def source_of(place: Place, bus: Any) -> Source:
    """The run in `place`."""
    name = place.run.name
    return Source(bus, Blobs.open(place.store), await read_ledger(bus, name), name, f"trainer-{name}", seed())


async def replayed(source: Source, first: int, last: int) -> list[Replayed]:
    state = await state_before(source, first, now=provenance.collect())
    return [done async for done in replay(source, state, last)]

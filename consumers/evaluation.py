"""Held-out rounds under versions of the weights: one whole round by command, and small ones beside a run.

The engine runs in this process, on weights taken from the store and checked against their announced root: no
round slows the replicas that serve rollouts, and what is tried is what was announced. Not here: what a round
is (`consumers.examiner`), what two rounds say together (`consumers.comparison`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

import torch

from headrace import log
from headrace.bus.dead_letters import decode_or_dead_letter
from headrace.bus.outage import Outage
from headrace.bus.protocol import Bus, Delivery, Message
from headrace.clock import SystemClock
from headrace.config import RunConfig
from headrace.consumers.arena import Arena
from headrace.consumers.comparison import Difference, compare
from headrace.consumers.config import EvaluationConfig
from headrace.consumers.durable import produce
from headrace.consumers.examiner import Examiner, Round, evaluations
from headrace.consumers.versions import Held, Versions
from headrace.envs.config import EnvConfig
from headrace.errors import BusUnavailable, StoreError
from headrace.inference.config import InferenceConfig
from headrace.inference.replica import Replica
from headrace.inference.weights import ServedWeights
from headrace.kernels import invariant
from headrace.policy import checkpoint
from headrace.store.blobs import Blobs
from headrace.wire.records import WeightsPublished
from headrace.wire.topics import WEIGHTS

__all__ = ["Difference", "compare", "evaluate", "run"]

_logger = logging.getLogger(__name__)

WATCH: Final = "watch"
POLL_MS: Final = 500
ANNOUNCEMENTS_MAX: Final = 256
"""Enough to reach the nearest full snapshot, as for the relay."""


async def evaluate(
    bus: Bus,
    run: RunConfig,
    config: EvaluationConfig,
    blobs: Blobs,
    version: int,
    round: str,
    stop: asyncio.Event,
    *,
    env: EnvConfig,
) -> None:
    """One whole round named `round` under `version` of the run's weights; returns early when `stop` is set.

    Tries that are on the log already for this round and version are not made again. Raises StoreError when
    the version was never announced or cannot be had, SandboxError when a task failed on every attempt.
    """
    async with (
        serving(bus, run, config, blobs, version, slots=_slots(config, config.samples)) as replica,
        Arena.open(env, "heldout") as arena,
    ):
        log.event(_logger, "round_start", round=round, version=version, sandbox=arena.describe())
        examiner = Examiner(bus, run, config, replica, arena, env.name)
        await examiner.hold(
            Round(name=round, version=version, tasks=config.tasks, samples=config.samples), stop
        )


@asynccontextmanager
async def serving(
    bus: Bus, run: RunConfig, config: EvaluationConfig, blobs: Blobs, version: int, *, slots: int
) -> AsyncIterator[Replica]:
    """A replica in this process that serves `version` of the run's weights to `slots` requests at a time.
    Raises StoreError when the version was never announced or cannot be had."""
    weights = _Announced(bus, run, config, blobs, version_max=version)
    begins, ends = await bus.begins([WEIGHTS.name]), await bus.ends([WEIGHTS.name])
    for tp, end in ends.items():
        await weights.learn([d async for d in bus.read_range(tp, begins[tp], end)])
    newest = weights.versions.newest
    if newest is None or newest.version != version:
        raise StoreError(f"weights {version}: expected an announcement of run {run.name}, found none")
    async with _engine(config, slots) as replica:
        await _serve(replica, await weights.versions.obtain())
        yield replica


async def run(
    bus: Bus,
    run: RunConfig,
    config: EvaluationConfig,
    blobs: Blobs,
    stop: asyncio.Event,
    *,
    env: EnvConfig,
) -> None:
    """Small rounds named `watch`, each time `watch_versions` versions have passed, until `stop` is set.

    Versions that passed while a round was held are skipped: the newest is next. Raises BusUnavailable when
    the log stays away for longer than `outage_ms_max`.
    """
    outage = Outage(config.outage_ms_max)
    async with (
        _engine(config, _slots(config, config.watch_samples)) as replica,
        Arena.open(env, "heldout") as arena,
    ):
        examiner = Examiner(bus, run, config, replica, arena, env.name)
        weights = _Announced(bus, run, config, blobs)
        while not stop.is_set():
            try:
                await _watch(bus, run, config, weights, replica, examiner, outage, stop)
            except BusUnavailable as error:
                await outage.pause(error)


async def _watch(
    bus: Bus,
    run: RunConfig,
    config: EvaluationConfig,
    weights: "_Announced",
    replica: Replica,
    examiner: Examiner,
    outage: Outage,
    stop: asyncio.Event,
) -> None:
    """Until `stop`, or until the log is away."""
    last = max((e.version for e in await evaluations(bus, run.name) if e.round == WATCH), default=None)
    async with bus.reader(await bus.begins([WEIGHTS.name])) as reader:
        while not stop.is_set():
            deliveries = await reader.read(wait_ms=POLL_MS)
            outage.alive()
            await weights.learn(deliveries)
            newest = weights.versions.newest
            due = newest is not None and (last is None or newest.version >= last + config.watch_versions)
            if deliveries or not due:
                continue  # first to the end of the announcements: only the newest version matters
            try:
                held = await weights.versions.obtain()
            except StoreError as error:
                log.event(_logger, "weights_not_loaded", level=logging.WARNING, reason=error)
                continue
            await _serve(replica, held)
            last = held.version
            await examiner.hold(
                Round(
                    name=WATCH,
                    version=held.version,
                    tasks=config.watch_tasks,
                    samples=config.watch_samples,
                ),
                stop,
            )


class _Announced:
    """The announcements of one run up to a version, and the way to their weights."""

    def __init__(
        self,
        bus: Bus,
        run: RunConfig,
        config: EvaluationConfig,
        blobs: Blobs,
        version_max: int | None = None,
    ) -> None:
        self.versions = Versions(blobs, ANNOUNCEMENTS_MAX)
        self._bus = bus
        self._run = run
        self._config = config
        self._version_max = version_max

    async def learn(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            record = decode_or_dead_letter(delivery, by="evaluation", now_ms=SystemClock().now_ms())
            if isinstance(record, Message):
                await produce(self._bus, [record], outage_ms_max=self._config.outage_ms_max)
            elif (
                isinstance(record, WeightsPublished)
                and record.run == self._run.name
                and (self._version_max is None or record.version <= self._version_max)
            ):
                self.versions.announce(record)


def _slots(config: EvaluationConfig, samples: int) -> int:
    """Room for every try of all tasks in flight."""
    return config.tasks_in_flight * max(samples, 1)


@asynccontextmanager
async def _engine(config: EvaluationConfig, slots: int) -> AsyncIterator[Replica]:
    """A replica in this process."""
    torch.set_num_threads(config.threads)
    invariant.warm_up()
    model, _, _ = checkpoint.load_seed()
    inference = InferenceConfig(replica="evaluation", slots=slots, live_slots=0)
    async with Replica(model, inference) as replica:
        yield replica


async def _serve(replica: Replica, held: Held) -> None:
    tensors = checkpoint.from_bf16(held.weights)
    await replica.install(ServedWeights(version=held.version, root=held.root, tensors=tensors))

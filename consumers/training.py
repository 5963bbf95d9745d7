"""The trainer's process: closed groups in, one transaction per step out.

    records -> admission -> loss -> optimizer -> publish -> commit

A step's ledger record, the announcement of its weights, its dead letters and the consumed offsets are one
transaction, so a group is trained exactly once whoever dies, when. A second trainer of the same run fences
the first. Not here: the arithmetic (`trainer`), the input (`consumers.batches`), what a restart does
(`consumers.recovery`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TypeVar

import msgspec
import torch

from headrace import failpoints, log
from headrace.bus.outage import Outage
from headrace.bus.protocol import Bus, Message, Positions, TopicPartition, Transactor
from headrace.clock import Age, Clock, SystemClock
from headrace.config import RunConfig
from headrace.consumers import identity, publishing, sweep
from headrace.consumers.batches import Batch, Batches, positions_of
from headrace.consumers.checkpoints import Checkpoints
from headrace.consumers.ledger import Ledger, log_step, read_ledger, step_record
from headrace.consumers.ranks import step_runner
from headrace.consumers.recovery import recover
from headrace.consumers.replay import RunStep
from headrace.consumers.revocations import Revocations
from headrace.errors import BusUnavailable, Fenced, StoreUnavailable
from headrace.kernels import invariant
from headrace.policy.checkpoint import load_seed, weights_root
from headrace.policy.model import ModelConfig, Weights
from headrace.store.blobs import GRACE_MS, Blobs
from headrace.trainer import checkpoint, provenance
from headrace.trainer.config import StepSettings, TrainerConfig
from headrace.trainer.learner import Cancelled
from headrace.trainer.state import State, published
from headrace.trainer.step import run_step
from headrace.wire.codec import encode
from headrace.wire.records import Checkpoint, Record, WeightsPublished
from headrace.wire.topics import EXPERIENCE, EXPERIENCE_LIVE, TRAIN_STEPS, WEIGHTS

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

SOURCES = (EXPERIENCE.name, EXPERIENCE_LIVE.name)
"""Topics that a step consumes."""


Announced = Callable[[int, Weights], Weights | None]
"""Version and weights (float32, bf16-exact) to those that are announced in their place; None: themselves."""


async def run(
    bus: Bus,
    run: RunConfig,
    config: TrainerConfig,
    blobs: Blobs,
    stop: asyncio.Event,
    *,
    seed: tuple[ModelConfig, Weights] | None = None,
    clock: Clock | None = None,
    grace_ms: int = GRACE_MS,
    announced: Announced | None = None,
) -> None:
    """Trains until step `run.steps_max` is in the ledger or `stop` is set.

    `seed`: the shipped model if None. `announced`: for rehearsals of a bad release.

    Raises Fenced when another trainer of the run has started, OffsetGone when unread experience has left the
    log, TrainingError (a step can't be computed, or not computed again), BusUnavailable and StoreUnavailable
    when they stay away for longer than `outage_ms_max`.
    """
    with ThreadPoolExecutor(1, "trainer", _prepare_torch, (config.threads,)) as executor:
        trainer = _Trainer(bus, run, config, blobs, stop, executor, clock or SystemClock(), grace_ms)
        trainer.announced = announced
        try:
            await trainer.prepare(seed)
            async with step_runner(config, trainer.compute) as trainer.run_step:
                await trainer.run()
        except Cancelled:
            log.event(_logger, "step_abandoned", step=trainer.state_step + 1)
        except Fenced as error:
            log.event(_logger, "fenced", level=logging.ERROR, run=run.name, reason=error)
            raise


def _prepare_torch(threads: int) -> None:
    torch.set_num_threads(threads)  # counted per thread: has to be said in the one that computes
    invariant.warm_up()


class _Trainer:
    """`held` is what this process has computed and may be in the ledger: the last committed state, and the
    one whose transaction was under way."""

    def __init__(
        self,
        bus: Bus,
        run: RunConfig,
        config: TrainerConfig,
        blobs: Blobs,
        stop: asyncio.Event,
        executor: ThreadPoolExecutor,
        clock: Clock,
        grace_ms: int,
    ) -> None:
        self._bus = bus
        self._run = run
        self._config = config
        self._blobs = blobs
        self._stop = stop
        self._executor = executor
        self._clock = clock
        self._grace_ms = grace_ms
        self._named_within_s = grace_ms / 2000
        self._name = f"trainer-{run.name}"
        # What a run began with is no setting of a step, and a path none of a ledger.
        self._settings = StepSettings(run=run, trainer=msgspec.structs.replace(config, start_from=""))
        self._held: list[State] = []
        self.run_step: RunStep = run_step
        self._log_outage = Outage(config.outage_ms_max)
        self._store_outage = Outage(config.outage_ms_max)
        """Over when a step is stored: one that only answers reads is still away."""
        self._commit_s = 0.0
        self.announced: Announced | None = None
        self._other: int | None = None
        """The last version announced with other weights: no delta leads from those to the next."""

    @property
    def state_step(self) -> int:
        return self._held[-1].step if self._held else 0

    async def prepare(self, seed: tuple[ModelConfig, Weights] | None) -> None:
        """Reads the model, and asks the computing thread what it is."""
        if seed is None:
            model, weights, _ = await self.compute(load_seed)
            seed = model, weights
        self._seed = seed
        self._seed_root = await self.compute(lambda: weights_root(seed[1]))
        self._provenance = await self.compute(provenance.collect)

    async def run(self) -> None:
        """Serves from one outage to the next."""
        while not self._stop.is_set():
            try:
                await self._look_before_fencing()
                async with self._bus.transactor(self._name) as transactor:  # fences, then looks
                    self._log_outage.alive()
                    await self._serve(transactor)
                    return
            except BusUnavailable as error:  # a commit's outcome may be unknown: look
                await self._log_outage.pause(error)
            except StoreUnavailable as error:
                await self._store_outage.pause(error)

    async def _look_before_fencing(self) -> None:
        """Raises what keeps this process from being the run's trainer, so that it does not stop the one that
        is: another seed or store, or the ledger went on while this one was away."""
        ledger = await read_ledger(self._bus, self._run.name)
        await identity.check_start(self._blobs, ledger, run=self._run, seed_root=self._seed_root)
        if self._held and ledger.version > self.state_step:
            raise Fenced(
                f"trainer: expected the ledger to end at step {self.state_step}, found step {ledger.version}:"
                " another trainer of this run went on"
            )

    async def _serve(self, transactor: Transactor) -> None:
        ledger = await read_ledger(self._bus, self._run.name)
        await identity.check_topics(self._bus, ledger, run=self._run, group=self._name)
        state = await self._recover(ledger)
        first = ledger.published.get(0) or await self._publish_seed(transactor, state)
        await sweep.register(self._bus, self._blobs, first)
        self._held = [state]
        log.event(_logger, "trainer_start", run=self._run.name, step=state.step, root=state.root[:12])
        positions = await self._bus.begins(list(SOURCES)) | positions_of(state.positions)
        checkpoints = Checkpoints(
            self._blobs, self._config, self._run.name, ledger.steps, named_within_s=self._named_within_s
        )
        sweeping = sweep.sweeping(
            self._bus, self._blobs, every_ms=self._config.sweep_every_ms, grace_ms=self._grace_ms
        )
        async with AsyncExitStack() as open_:
            readers = {
                topic: await open_.enter_async_context(self._bus.reader(_of_topic(positions, topic)))
                for topic in SOURCES
            }
            await open_.enter_async_context(checkpoints)
            await open_.enter_async_context(sweeping)
            batches = Batches(
                readers, self._blobs, self._run, alarm_ms=self._config.alarm_ms, positions=state.positions
            )
            revocations = Revocations(self._bus, self._run.name)
            while state.step < self._run.steps_max:
                batch = await batches.next(state.seen, state.version, self._stop)
                if batch is None:
                    return
                batch.entries = await revocations.mark(batch.entries)
                state = await self._step(transactor, state, batch, checkpoints)
                self._store_outage.alive()
        log.event(_logger, "trainer_end", step=state.step)

    async def _recover(self, ledger: Ledger) -> State:
        return await recover(
            self._bus,
            self._blobs,
            ledger,
            run_name=self._run.name,
            group=self._name,
            seed=self._seed,
            held=self._held,
            now=self._provenance,
            compute=self.compute,
            cancelled=self._stop.is_set,
            start_from=self._config.start_from,
            run_step=self.run_step,
        )

    async def _publish_seed(self, transactor: Transactor, state: State) -> WeightsPublished:
        """Announces version 0; with the whole state when it came from a file, for the log must be enough."""
        packed = await self.compute(lambda: publishing.pack(state, None, full_every=1))
        now_ms = self._clock.now_ms()
        announced = await publishing.store(self._blobs, packed, run_name=self._run.name, now_ms=now_ms)
        if self._config.start_from:
            blob = await self._blobs.put(await self.compute(lambda: checkpoint.encode(state, self._run.name)))
            start = Checkpoint(uri=blob.uri, sha256=blob.sha256, step=0, bytes=blob.bytes)
            announced = msgspec.structs.replace(announced, checkpoint=start)
        message = self._message(WEIGHTS.name, announced, f"{self._run.name}/weights/0")
        await transactor.commit([message], group=self._name, positions=positions_of(state.positions))
        return announced

    async def _step(
        self, transactor: Transactor, state: State, batch: Batch, checkpoints: Checkpoints
    ) -> State:
        # 1 learn  2 store the blobs  3 one transaction: ledger, announcement, dead letters, offsets. A crash
        # after 2 leaves orphan blobs, no more; an unknown outcome of 3 is looked up by `_recover`.
        started_s, started_ms = time.monotonic(), self._clock.now_ms()
        result = await self.compute(
            lambda: self.run_step(
                state,
                batch.entries,
                batch.positions,
                model=self._seed[0],
                settings=self._settings,
                cancelled=self._stop.is_set,
            )
        )
        failpoints.reach("trainer.learned")
        learned_s, unnamed = time.monotonic(), Age()
        announced = await self._store_version(result.state, state)
        naming = await checkpoints.to_name(result.state, last=result.state.step == self._run.steps_max)
        failpoints.reach("trainer.uploaded")
        stored_s = time.monotonic()
        # Stopped, asleep or slow: a sweep may be taking its blobs.
        if (unnamed_s := unnamed.seconds()) > self._named_within_s:
            raise StoreUnavailable(
                f"step {result.state.step}: expected its blobs to be named within"
                f" {self._named_within_s:.0f} s, {unnamed_s:.0f} s have passed"
            )
        seconds = {
            "seconds.wait": batch.wait_s,
            "seconds.learn": learned_s - started_s,
            "seconds.store": stored_s - learned_s - naming.seconds,
            "seconds.checkpoint": naming.seconds,
            "seconds.commit": self._commit_s,
        }
        record = step_record(
            state,
            result,
            batch,
            settings=self._settings,
            now=self._provenance,
            seconds=seconds,
            beside_s=checkpoints.beside_s(started_s),
            saved=naming.checkpoint,
            pruned=naming.pruned,
            started_ms=started_ms,
            ended_ms=started_ms + round((stored_s - started_s) * 1000),  # the wall clock may be set back
        )
        self._held = [state, result.state]
        await transactor.commit(
            [
                self._message(TRAIN_STEPS.name, record, f"{self._run.name}/step/{record.step}"),
                self._message(WEIGHTS.name, announced, f"{self._run.name}/weights/{record.step}"),
                *batch.dead_letters(result.admission.malformed, self._clock.now_ms()),
            ],
            group=self._name,
            positions=positions_of(batch.positions),
        )
        failpoints.reach("trainer.committed")
        self._commit_s = time.monotonic() - stored_s
        self._held = [result.state]
        log_step(record)
        checkpoints.committed(result.state, naming)
        return result.state

    async def _store_version(self, state: State, previous: State) -> WeightsPublished:
        full_every = self._config.full_every
        base = None if self._other == previous.version else previous
        other = self.announced(state.version, published(state.masters)) if self.announced else None
        if other is not None:
            self._other, base = state.version, None
            state = replace(state, masters=other, root=weights_root(other))
        packed = await self.compute(lambda: publishing.pack(state, base, full_every=full_every))
        return await publishing.store(
            self._blobs, packed, run_name=self._run.name, now_ms=self._clock.now_ms()
        )

    def _message(self, topic: str, record: Record, event_id: str) -> Message:
        now_ms = self._clock.now_ms()
        value, headers = encode(record, source="trainer", now_ms=now_ms, event_id=event_id)
        return Message(topic, self._run.name.encode(), value, headers)

    async def compute(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


def _of_topic(positions: Positions, topic: str) -> dict[TopicPartition, int]:
    return {tp: offset for tp, offset in positions.items() if tp.topic == topic}

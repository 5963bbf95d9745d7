"""The rollout worker: takes prompts, runs their groups, writes `rollout.steps` and `rewards`.

Scales by starting more of them: they share the consumer group of their run and region. A prompt's position is
committed only when all records of its group, and of every group before it in its partition, are durable; so
whatever a killed worker had in hand is run again by another, as a higher attempt. Records have stable ids;
the join keeps one whole attempt.

Not here: what a turn is (`consumers.episode`), closing groups (`streams.experience`). A fault of the sandbox
or of inference is tried again, then told as `GroupFailed`: it is never a reward. A group whose time is up is
closed by the join; the worker only stops working on it.
"""

import asyncio
import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

from headrace import log
from headrace.bus.dead_letters import dead_letter, decode_or_dead_letter
from headrace.bus.outage import Outage
from headrace.bus.protocol import Bus, Delivery, GroupMember, Message, TopicPartition
from headrace.clock import Clock, SystemClock
from headrace.config import RunConfig
from headrace.consumers.arena import Arena
from headrace.consumers.config import RolloutsConfig
from headrace.consumers.durable import produce
from headrace.consumers.episode import Plan, Turn, play, step_record
from headrace.consumers.progress import Progress
from headrace.envs.config import EnvConfig
from headrace.envs.rewards import Score
from headrace.errors import (
    BusError,
    BusUnavailable,
    HeadraceError,
    InferenceUnavailable,
    OffsetGone,
    Overloaded,
    WireError,
)
from headrace.rpc.generation import Generator
from headrace.wire.codec import encode
from headrace.wire.records import GROUP_SIZE_MAX, GroupFailed, Prompt, Reward, RolloutStep
from headrace.wire.topics import PROMPTS, REWARDS, ROLLOUT_STEPS, Topic

_logger = logging.getLogger(__name__)

POLL_MS = 200
"""How soon a stop, a lost partition or a group that ended is seen."""
REPORT_S = 10.0


async def run(
    bus: Bus,
    run: RunConfig,
    config: RolloutsConfig,
    inference: Sequence[str],
    stop: asyncio.Event,
    member_id: str,
    *,
    env: EnvConfig,
    stable: bool = True,
) -> None:
    """Works until `stop` is set, with replicas at the addresses `inference` and an own sandbox.

    `member_id` names this worker. `stable`: it comes back under that name after a restart, and takes its
    partitions back at once; otherwise they go to the others as soon as it leaves. Raises BusError when the
    log stays away for longer than `outage_ms_max`, ConfigError when the tasks are not those of the index.
    """
    from headrace.rpc.client import InferenceClient

    async with AsyncExitStack() as stack:
        arena = await stack.enter_async_context(Arena.open(env, "train"))
        replicas = [await stack.enter_async_context(InferenceClient(address)) for address in inference]
        log.event(_logger, "worker_start", member=member_id, replicas=len(replicas), sandbox=arena.describe())
        await Worker(bus, run, config, replicas, arena, member_id, stable=stable).serve(stop)


def group_of(run: RunConfig) -> str:
    """Name of the consumer group that the workers of a run share in their region."""
    return f"rollouts-{run.name}-{run.region}"


class Worker:
    """One worker between start and stop; use once."""

    def __init__(
        self,
        bus: Bus,
        run: RunConfig,
        config: RolloutsConfig,
        replicas: Sequence[Generator],
        arena: Arena,
        name: str,
        clock: Clock | None = None,
        *,
        stable: bool = True,
    ) -> None:
        self._bus = bus
        self._run = run
        self._config = config
        self._replicas = replicas
        self._arena = arena
        self._name = name
        self._member_id = name if stable else None
        self._clock = clock or SystemClock()
        self._progress = Progress()
        self._running: dict[tuple[TopicPartition, int], asyncio.Task[None]] = {}
        self._outage = Outage(config.outage_ms_max)
        self.counts: Counter[str] = Counter()
        """Groups by what became of them here: finished, failed, expired, foreign, retried, moved,
        abandoned."""

    async def serve(self, stop: asyncio.Event) -> None:
        """Takes and runs prompts until `stop`; then lets groups end within `drain_ms` and leaves the others
        to the next owner."""
        reported_s = asyncio.get_running_loop().time()
        async with self._bus.member(group_of(self._run), [PROMPTS.name], member_id=self._member_id) as member:
            try:
                while not stop.is_set():
                    await self._take(member)
                    await self._settle(member)
                    if asyncio.get_running_loop().time() - reported_s > REPORT_S:
                        reported_s += REPORT_S
                        self._report("worker")
                if self._running:
                    await asyncio.wait(self._running.values(), timeout=self._config.drain_ms / 1000)
                await self._settle(member)
            finally:
                self.counts["abandoned"] += len(self._running)
                await self._cancel(list(self._running))
                self._report("worker_end")

    async def _take(self, member: GroupMember) -> None:
        """Starts new groups while there is room, otherwise waits for one to end."""
        free = self._config.groups_in_flight - len(self._running)
        if free == 0:
            await asyncio.wait(
                self._running.values(), timeout=POLL_MS / 1000, return_when=asyncio.FIRST_COMPLETED
            )
            return
        try:
            deliveries = await self._poll(member, free)
            self._outage.alive()
        except BusUnavailable as error:
            await self._outage.pause(error)
            return
        for delivery in deliveries:
            if self._progress.take(delivery.tp, delivery.offset):
                task = asyncio.create_task(self._handle(delivery), name=delivery.place)
                self._running[delivery.tp, delivery.offset] = task

    async def _poll(self, member: GroupMember, records_max: int) -> list[Delivery]:
        """The next prompts. Where our position has left the log (retention, or a topic made anew), an alarm,
        and on from the oldest prompt that is kept: what is gone unread was past its deadline long before, and
        the join has accounted for it."""
        try:
            return await member.poll(records_max=records_max, wait_ms=POLL_MS)
        except OffsetGone as error:
            log.event(_logger, "alarm", level=logging.WARNING, kind="position_gone", reason=error)
        topics = [PROMPTS.name]
        begins, ends = await self._bus.begins(topics), await self._bus.ends(topics)
        committed = await self._bus.committed(group_of(self._run), topics)
        gone = {
            tp: begins[tp]
            for tp in member.assignment()
            if not begins[tp] <= committed.get(tp, begins[tp]) <= ends[tp]
        }
        await self._cancel([key for key in self._running if key[0] in gone])
        self._progress.lose(gone)
        member.seek(gone)
        return []

    async def _settle(self, member: GroupMember) -> None:
        """Counts out what has ended, lets go what is no longer ours, commits the rest."""
        ended = [key for key, task in self._running.items() if task.done()]
        for key in ended:
            self._running.pop(key).result()  # a fault that is no rollout's own ends the worker
            self._progress.finish(*key)
        lost = self._progress.partitions() - member.assignment()
        if lost:
            moved = [key for key in self._running if key[0] in lost]
            self.counts["moved"] += len(moved)
            await self._cancel(moved)
            self._progress.lose(lost)
            log.event(
                _logger, "partitions_lost", partitions=",".join(map(str, sorted(lost))), groups=len(moved)
            )
        positions = self._progress.uncommitted()
        if positions:
            try:
                await member.commit(positions)
                self._progress.committed(positions)
            except BusUnavailable as error:
                await self._outage.pause(error)

    async def _cancel(self, keys: list[tuple[TopicPartition, int]]) -> None:
        tasks = [self._running.pop(key) for key in keys]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _handle(self, delivery: Delivery) -> None:
        """Everything about one prompt, until it may be committed."""
        now_ms = self._clock.now_ms()
        prompt = decode_or_dead_letter(delivery, by=self._name, now_ms=now_ms)
        if isinstance(prompt, Message):
            await self._send([prompt])
        elif not isinstance(prompt, Prompt) or (prompt.run, prompt.region) != (
            self._run.name,
            self._run.region,
        ):
            self.counts["foreign"] += 1
        elif not 1 <= prompt.group_size <= GROUP_SIZE_MAX:
            error = WireError(f"group_size: expected 1 to {GROUP_SIZE_MAX}, got {prompt.group_size}")
            await self._send([dead_letter(delivery, error, by=self._name, now_ms=now_ms)])
        elif prompt.deadline_ms <= now_ms:
            self.counts["expired"] += 1
        else:
            await self._group(prompt, delivery.header("traceparent"))

    async def _group(self, prompt: Prompt, trace: bytes | None) -> None:
        """Attempts until one is whole, or the group is given up."""
        attempt, tries, wait_ms = 0, 0, self._config.retry_ms
        while True:
            attempt = max(self._clock.now_ms(), attempt + 1)
            try:
                async with asyncio.timeout((prompt.deadline_ms - self._clock.now_ms()) / 1000):
                    await self._attempt(prompt, attempt, tries, trace)
                self.counts["finished"] += 1
                return
            except TimeoutError:
                reason = f"{prompt.group_id}: the deadline passed"
                break
            except BusError:
                raise
            except HeadraceError as error:
                reason = str(error)
                tries += not isinstance(error, Overloaded | InferenceUnavailable)
                out_of_time = self._clock.now_ms() + wait_ms >= prompt.deadline_ms
                if not error.retriable or tries >= self._config.attempts_max or out_of_time:
                    break
            self.counts["retried"] += 1
            log.event(_logger, "group_retried", level=logging.WARNING, group=prompt.group_id, reason=reason)
            await asyncio.sleep(wait_ms / 1000)
            wait_ms = min(2 * wait_ms, self._config.retry_ms_max)
        self.counts["failed"] += 1
        log.event(_logger, "group_failed", level=logging.WARNING, group=prompt.group_id, reason=reason)
        failed = GroupFailed(
            run=prompt.run, group_id=prompt.group_id, attempt=attempt, reason=reason, worker=self._name
        )
        await self._send([self._message(ROLLOUT_STEPS, failed, f"{prompt.group_id}/{attempt}/failed", trace)])

    async def _attempt(self, prompt: Prompt, attempt: int, tries: int, trace: bytes | None) -> None:
        """One try of the whole group: its steps as they happen, its rewards when all members have ended."""
        envs = self._arena.group(prompt.env, prompt.task_id, prompt.seed, prompt.group_size)
        replica = self._replicas[(zlib.crc32(prompt.group_id.encode()) + tries) % len(self._replicas)]
        plan = Plan(
            run=prompt.run,
            group_id=prompt.group_id,
            seed=prompt.seed,
            sampling=prompt.sampling,
            stop_tokens=self._arena.stop_tokens,
            turn_ms_max=self._config.turn_ms_max,
            version_min=prompt.weights_version,
        )
        async for turns in play(envs, replica, plan, self._clock):
            await self._send([self._step(turn, prompt, attempt, trace) for turn in turns])
            self.counts["tokens"] += sum(len(turn.completion.tokens) for turn in turns)
        await self._send(
            [
                self._reward(prompt, attempt, member, score, trace)
                for member, env in enumerate(envs)
                for score in env.rewards()
            ]
        )

    async def _send(self, messages: list[Message]) -> None:
        await produce(self._bus, messages, outage_ms_max=self._config.outage_ms_max)

    def _step(self, turn: Turn, prompt: Prompt, attempt: int, trace: bytes | None) -> Message:
        record = step_record(turn, prompt, attempt, region=self._run.region, worker=self._name)
        return self._message(
            ROLLOUT_STEPS, record, f"{prompt.group_id}/{turn.member}/{attempt}/{turn.index}", trace
        )

    def _reward(
        self, prompt: Prompt, attempt: int, member: int, score: Score, trace: bytes | None
    ) -> Message:
        record = Reward(
            run=prompt.run,
            group_id=prompt.group_id,
            member=member,
            attempt=attempt,
            component=score.component,
            value=score.value,
            range_min=score.range_min,
            range_max=score.range_max,
            evidence=score.evidence,
            grader=score.grader,
        )
        return self._message(
            REWARDS, record, f"{prompt.group_id}/{member}/{attempt}/{score.component}", trace
        )

    def _message(
        self, topic: Topic, record: RolloutStep | Reward | GroupFailed, event_id: str, trace: bytes | None
    ) -> Message:
        source = f"rollouts/{self._run.region}/{self._name}"
        value, headers = encode(
            record, source=source, now_ms=self._clock.now_ms(), event_id=event_id, parent=trace
        )
        return Message(topic.name, record.group_id.encode(), value, headers)

    def _report(self, name: str) -> None:
        log.event(_logger, name, member=self._name, in_flight=len(self._running), **self.counts)

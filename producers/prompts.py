"""The prompt feed: issues the groups of a run, in an order that the run's seed fixes, as fast as the bound on
lag admits.

It keeps no file. What was issued is what stands on the topic `prompts`; a second feed of the same run fences
the first (transactional id), so that no prompt is issued twice and none is skipped, whoever is killed, when.
It reads `train.steps` and `weights` to learn the newest version. Not here: running a group
(`consumers.rollouts`).

The bound: prompts issued <= (lag_versions_max + version + 1) * groups_per_step, because every step consumes
`groups_per_step` closed groups: a group issued under it is consumed `lag_versions_max` versions later at
most.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import Sequence

from headrace import log
from headrace.bus.dead_letters import decode_or_dead_letter
from headrace.bus.outage import Outage
from headrace.bus.protocol import Bus, Delivery, Message, Transactor
from headrace.clock import Clock, SystemClock
from headrace.config import RunConfig
from headrace.envs.config import EnvConfig
from headrace.errors import BusUnavailable, ConfigError
from headrace.producers.config import PromptsConfig
from headrace.wire.codec import encode
from headrace.wire.records import Prompt, TrainStep, WeightsPublished
from headrace.wire.topics import PROMPTS, TRAIN_STEPS, WEIGHTS

_logger = logging.getLogger(__name__)

FOLLOWED = (TRAIN_STEPS.name, WEIGHTS.name)
POLL_MS = 250
"""How soon a stop is seen while nothing happens."""


async def run(
    bus: Bus,
    run: RunConfig,
    config: PromptsConfig,
    stop: asyncio.Event,
    *,
    env: EnvConfig,
    task_ids: Sequence[str] | None = None,
    clock: Clock | None = None,
) -> None:
    """Issues prompts until the last one of the run is out or `stop` is set.

    `task_ids`: what to issue; the training split of the environment if None. Raises Fenced when another feed
    of this run has started, BusUnavailable when the log is away for longer than `outage_ms_max`.
    """
    order = TaskOrder(training_tasks(env) if task_ids is None else task_ids, run.seed)
    outage = Outage(config.outage_ms_max)
    feed = Feed(bus, run, config, env.name, order, clock or SystemClock(), outage)
    while not stop.is_set():
        try:
            async with bus.transactor(f"prompts-{run.name}") as transactor:
                await feed.serve(transactor, stop)
                return
        except BusUnavailable as error:  # the outcome of a commit may be unknown: look at the log again
            await outage.pause(error)


def training_tasks(env: EnvConfig) -> list[str]:
    """Ids of all tasks that may be trained on."""
    from headrace.envs.tasks import TaskSet

    return list(TaskSet.load("train", env.kinds).task_ids)


def group_id_of(run_name: str, counter: int) -> str:
    """`demo-0000042`: the id of the prompt that is number `counter` (from 0) of its run."""
    return f"{run_name}-{counter:07d}"


def counter_of(run_name: str, group_id: str) -> int | None:
    """The inverse of `group_id_of`; None for a group of another run."""
    match = re.fullmatch(re.escape(run_name) + r"-(\d{7,})", group_id)
    return int(match[1]) if match else None


def admitted(run: RunConfig, version: int) -> int:
    """How many prompts may be out once `version` is the newest."""
    return min(run.lag_versions_max + version + 1, run.steps_max) * run.groups_per_step


class TaskOrder:
    """Which task is number `counter`: epoch after epoch over all tasks, each epoch shuffled by the seed.

    The order is a sort by hash: the same on every Python version and for tasks given in any order.
    """

    def __init__(self, task_ids: Sequence[str], seed: int) -> None:
        if not task_ids:
            raise ConfigError("prompts: expected at least one task, got none")
        self._task_ids = sorted(set(task_ids))
        self._seed = seed
        self._epoch = -1
        self._shuffled: list[str] = []

    def __getitem__(self, counter: int) -> str:
        epoch, index = divmod(counter, len(self._task_ids))
        if epoch != self._epoch:
            self._shuffled = sorted(self._task_ids, key=lambda task_id: _digest(self._seed, epoch, task_id))
            self._epoch = epoch
        return self._shuffled[index]


class Feed:
    """The feed between two outages of the log."""

    def __init__(
        self,
        bus: Bus,
        run: RunConfig,
        config: PromptsConfig,
        env: str,
        order: TaskOrder,
        clock: Clock,
        outage: Outage,
    ) -> None:
        self._bus = bus
        self._run = run
        self._config = config
        self._env = env
        self._order = order
        self._clock = clock
        self._outage = outage
        self._version = 0
        self._issued = 0
        self._alarmed = False
        self._issued_s = asyncio.get_running_loop().time()

    async def serve(self, transactor: Transactor, stop: asyncio.Event) -> None:
        """Looks where the run stands, then issues until the end of the run or `stop`."""
        self._issued = await self._on_the_log()
        begins = await self._bus.begins(FOLLOWED)
        ends = await self._bus.ends(FOLLOWED)
        for tp, end in ends.items():
            await self._learn([d async for d in self._bus.read_range(tp, begins[tp], end)], transactor)
        log.event(_logger, "feed_start", issued=self._issued, version=self._version)
        async with self._bus.reader(ends) as reader:
            while not stop.is_set():
                await self._issue(transactor)
                self._watch_idleness()
                if self._issued >= self._run.steps_max * self._run.groups_per_step:
                    log.event(_logger, "feed_end", issued=self._issued)
                    return
                await self._learn(await reader.read(wait_ms=POLL_MS), transactor)

    def _watch_idleness(self) -> None:
        """Nothing can be issued while no version comes: after `alarm_ms` that is told, once each time."""
        idle_ms = (asyncio.get_running_loop().time() - self._issued_s) * 1000
        if idle_ms > self._config.alarm_ms and not self._alarmed:
            self._alarmed = True
            log.event(
                _logger,
                "alarm",
                level=logging.WARNING,
                kind="feed_idle",
                issued=self._issued,
                version=self._version,
                idle_ms=int(idle_ms),
            )

    async def _on_the_log(self) -> int:
        """Number of prompts of this run that stand on the topic: transactions append them in order, so it is
        the highest counter + 1."""
        issued = 0
        begins, ends = await self._bus.begins([PROMPTS.name]), await self._bus.ends([PROMPTS.name])
        for tp, end in ends.items():
            async for delivery in self._bus.read_range(tp, begins[tp], end):
                counter = counter_of(self._run.name, (delivery.key or b"").decode(errors="replace"))
                issued = max(issued, -1 if counter is None else counter + 1)
        return issued

    async def _learn(self, deliveries: list[Delivery], transactor: Transactor) -> None:
        """Takes the newest version from the ledger and the announcements; also how far the run has come, for
        prompts that retention has deleted."""
        self._outage.alive()
        letters = []
        for delivery in deliveries:
            record = decode_or_dead_letter(delivery, by="prompts", now_ms=self._clock.now_ms())
            if isinstance(record, Message):
                letters.append(record)
            elif isinstance(record, TrainStep) and record.run == self._run.name:
                self._version = max(self._version, record.version_to)
                counters = (counter_of(self._run.name, unit.group_id) for unit in record.consumed)
                self._issued = max(self._issued, *(c + 1 for c in counters if c is not None), 0)
            elif isinstance(record, WeightsPublished) and record.run == self._run.name:
                self._version = max(self._version, record.version)
        if letters:
            await transactor.commit(letters)

    async def _issue(self, transactor: Transactor) -> None:
        """One transaction after another, until all that is admitted is out."""
        end = admitted(self._run, self._version)
        while self._issued < end:
            count = min(end - self._issued, self._config.batch_max)
            now_ms = self._clock.now_ms()
            await transactor.commit([self._message(self._issued + i, now_ms) for i in range(count)])
            self._issued += count
            self._alarmed = False
            self._issued_s = asyncio.get_running_loop().time()
            log.event(_logger, "issued", prompts=count, issued=self._issued, version=self._version)

    def _message(self, counter: int, now_ms: int) -> Message:
        prompt = Prompt(
            run=self._run.name,
            group_id=group_id_of(self._run.name, counter),
            env=self._env,
            task_id=self._order[counter],
            seed=int.from_bytes(_digest(self._run.seed, "prompt", counter)[:6]),
            group_size=self._run.group_size,
            sampling=self._config.sampling,
            components=self._config.components,
            weights_version=self._version,
            admitted_ms=now_ms,
            deadline_ms=now_ms + self._config.deadline_ms,
            region=self._run.region,
        )
        value, headers = encode(
            prompt, source=f"prompts/{self._run.region}", now_ms=now_ms, event_id=prompt.group_id
        )
        return Message(PROMPTS.name, prompt.group_id.encode(), value, headers)


def _digest(*parts: object) -> bytes:
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()

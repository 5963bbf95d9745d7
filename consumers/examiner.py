"""One held-out round: tasks of functions never trained on, tried with one model; writes `evaluations`.

Which tasks, and every sample, hang on the evaluation's seed and the task alone, not on the round, the version
or the order of work: two rounds under different weights are paired try by try (`consumers.comparison`). A
round goes on where a killed one ended. Not here: which weights (`consumers.evaluation`).
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from headrace import log
from headrace.bus.protocol import Bus, Message
from headrace.clock import Clock, SystemClock
from headrace.config import RunConfig
from headrace.consumers.arena import Arena
from headrace.consumers.comparison import function_of
from headrace.consumers.config import EvaluationConfig
from headrace.consumers.durable import produce
from headrace.consumers.episode import Plan, Turn, play
from headrace.envs.harness import Env, StopReason
from headrace.errors import HeadraceError, WireError
from headrace.rpc.generation import Generator
from headrace.wire import records
from headrace.wire.codec import decode, encode
from headrace.wire.records import Evaluation
from headrace.wire.topics import EVALUATIONS

_logger = logging.getLogger(__name__)

Mode = Literal["sampled", "greedy"]
Try = tuple[str, str, int]
"""(mode, task id, sample)."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What is tried, and under which name it is written down."""

    name: str
    version: int
    tasks: int
    samples: int
    """Sampled tries a task, beside one greedy try."""


class Examiner:
    """Holds rounds with one model and one arena."""

    def __init__(
        self,
        bus: Bus,
        run: RunConfig,
        config: EvaluationConfig,
        model: Generator,
        arena: Arena,
        env: str,
        clock: Clock | None = None,
    ) -> None:
        self._bus = bus
        self._run = run
        self._config = config
        self._model = model
        self._arena = arena
        self._env = env
        self._clock = clock or SystemClock()

    async def hold(self, round: Round, stop: asyncio.Event) -> None:
        """Tries every task of `round` that is not on the log yet, `tasks_in_flight` at a time; returns early
        when `stop` is set. Raises the error of a task that failed on every attempt."""
        done = await self._on_the_log(round)
        tasks = iter(chosen(self._arena.task_ids, round.tasks, self._config.seed))
        passed: Counter[str] = Counter()
        workers = [
            asyncio.create_task(self._work(round, tasks, done, passed, stop))
            for _ in range(self._config.tasks_in_flight)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        log.event(_logger, "round_end", round=round.name, version=round.version, again=len(done), **passed)

    async def _work(
        self,
        round: Round,
        tasks: Iterator[str],
        done: set[Try],
        passed: Counter[str],
        stop: asyncio.Event,
    ) -> None:
        modes: tuple[tuple[Mode, int], ...] = (("sampled", round.samples), ("greedy", 1))
        for task_id in tasks:
            if stop.is_set():
                return
            for mode, size in modes:
                if all((mode, task_id, sample) in done for sample in range(size)):
                    continue
                tries = await self._try(round, task_id, mode, size)
                passed[mode] += sum(item.passed for item in tries)
                await self._write(tries)

    async def _try(self, round: Round, task_id: str, mode: Mode, size: int) -> list[Evaluation]:
        """One attempt after another until all tries of the group have ended. Raises the last attempt's
        error."""
        attempts = 0
        while True:
            try:
                return await self._play(round, task_id, mode, size)
            except HeadraceError as error:
                attempts += 1
                if not error.retriable or attempts >= self._config.attempts_max:
                    raise
                log.event(_logger, "retried", level=logging.WARNING, task=task_id, reason=error)

    async def _play(self, round: Round, task_id: str, mode: Mode, size: int) -> list[Evaluation]:
        seed = int.from_bytes(_digest(self._config.seed, task_id)[:6])
        envs = self._arena.group(self._env, task_id, seed, size)
        plan = Plan(
            run=self._run.name,
            group_id=f"heldout/{task_id}",
            seed=seed,
            sampling=self._config.sampling,
            stop_tokens=self._arena.stop_tokens,
            turn_ms_max=self._config.turn_ms_max,
            greedy=mode == "greedy",
        )
        turns: list[list[Turn]] = [[] for _ in envs]
        async for same_time in play(envs, self._model, plan, self._clock):
            for turn in same_time:
                turns[turn.member].append(turn)
        return [self._evaluation(round, mode, sample, env, turns[sample]) for sample, env in enumerate(envs)]

    def _evaluation(
        self, round: Round, mode: Mode, sample: int, env: Env, turns: Sequence[Turn]
    ) -> Evaluation:
        passed = env.finish is StopReason.PASSED
        return Evaluation(
            run=self._run.name,
            version=round.version,
            round=round.name,
            mode=mode,
            task_id=env.task.task_id,
            kind=env.task.kind,
            sample=sample,
            passed=passed,
            passed_first=passed and len(turns) == 1,
            reward=next(score.value for score in env.rewards() if score.component == "tests"),
            turns=tuple(
                records.Turn(
                    call=self._arena.codec.decode(list(turn.completion.tokens)),
                    result=turn.result.result_text,
                    finish=turn.finish,
                )
                for turn in turns
            ),
            finish=turns[-1].finish,
        )

    async def _write(self, tries: Sequence[Evaluation]) -> None:
        messages = []
        for item in tries:
            event_id = f"{item.run}/{item.round}/{item.version}/{item.mode}/{item.task_id}/{item.sample}"
            value, headers = encode(item, source="evaluation", now_ms=self._clock.now_ms(), event_id=event_id)
            messages.append(Message(EVALUATIONS.name, item.run.encode(), value, headers))
        await produce(self._bus, messages, outage_ms_max=self._config.outage_ms_max)

    async def _on_the_log(self, round: Round) -> set[Try]:
        """Tries of this very round and version that an earlier process has made."""
        return {
            (item.mode, item.task_id, item.sample)
            for item in await evaluations(self._bus, self._run.name)
            if (item.round, item.version) == (round.name, round.version)
        }


async def evaluations(bus: Bus, run: str) -> list[Evaluation]:
    """All held-out tries of a run that are on the log; what cannot be decoded is left out."""
    found = []
    begins, ends = await bus.begins([EVALUATIONS.name]), await bus.ends([EVALUATIONS.name])
    for tp, end in ends.items():
        async for delivery in bus.read_range(tp, begins[tp], end):
            try:
                record = decode(EVALUATIONS.name, delivery.value or b"", delivery.headers)
            except WireError as error:
                log.event(_logger, "undecodable", level=logging.WARNING, place=delivery.place, reason=error)
                continue
            if isinstance(record, Evaluation) and record.run == run:
                found.append(record)
    return found


def chosen(task_ids: Sequence[str], count: int, seed: int) -> list[str]:
    """At most `count` tasks, spread over the functions: the first of each, then the second, and so on, in an
    order that the seed fixes. A smaller choice is the beginning of a larger one."""
    shuffled = sorted(task_ids, key=lambda task_id: _digest(seed, "choice", task_id))
    seen: Counter[str] = Counter()
    ranks: dict[str, int] = {}
    for task_id in shuffled:
        ranks[task_id] = seen[function_of(task_id)]
        seen[function_of(task_id)] += 1
    return sorted(shuffled, key=ranks.__getitem__)[:count]


def _digest(*parts: object) -> bytes:
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()

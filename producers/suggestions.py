"""What inference answered to editors, on the log: one live step on `rollout.steps` for each suggestion.

The process that answers writes it, so nothing that is trained comes from the editor but the prompt it asked
with. The answer never waits for the log: a suggestion goes into a bounded buffer and from there, some
milliseconds' worth at a time and in order, to the log. What can't be written within its deadline is lost to
training, counted and alarmed. Not here: answering (`inference`), what editors say later (`streams.feedback`).
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple

from headrace import log
from headrace.bus.protocol import Bus, Message
from headrace.clock import Clock, SystemClock
from headrace.config import RunConfig
from headrace.errors import BusUnavailable, WireError
from headrace.policy.dialogue import Call, TokenCodec, parse_suggestion
from headrace.producers.config import SuggestionsConfig
from headrace.producers.prompts import counter_of
from headrace.rpc.feedback import utf16_length
from headrace.rpc.generation import Completion, Generation
from headrace.wire.codec import encode
from headrace.wire.packed import pack_f32, pack_u32
from headrace.wire.records import RolloutStep
from headrace.wire.topics import ROLLOUT_STEPS

SILENT_TOKEN = "<|silent|>"
SILENT = "silent"
"""Finish of a step whose model chose to show nothing."""
RETRY_S = 0.2
REPORT_S = 10.0
_logger = logging.getLogger(__name__)


class Answer(NamedTuple):
    """One finished request of the live lane."""

    request: Generation
    completion: Completion
    arrived_ms: int
    """When the request came: what the user waited counts from here."""


def why_not(answer: Answer, run: str) -> str:
    """Why a live answer is no suggestion that may be trained; empty when it is one."""
    request, completion = answer.request, answer.completion
    if request.run != run:
        return "other_run"
    if counter_of(run, request.group_id) is not None:
        return "id_of_a_prompt"  # else an editor could speak for a simulated group
    if completion.finish == "cancelled" or not completion.tokens:
        return "cancelled"
    if request.version is not None or request.greedy or request.temperature == 0:
        return "not_sampled"  # a measurement, or not drawn from the policy: no ratio to train with
    alone = len(request.sequences) == 1 and completion.member == 0 and not request.sequences[0].own_tokens
    return "" if alone else "not_alone"


def step_of(
    answer: Answer, codec: TokenCodec, *, run: RunConfig, worker: str, pseudonym: Callable[[str], str]
) -> RolloutStep:
    """The live step of a suggestion: a group of one, whole. `text_length` is 0 for an answer that is no call:
    there is nothing to show."""
    request, completion, arrived_ms = answer
    silent = completion.tokens[0] == codec.special[SILENT_TOKEN]
    told = parse_suggestion(codec, list(completion.tokens))
    return RolloutStep(
        run=run.name,
        group_id=request.group_id,
        member=0,
        attempt=0,
        step=0,
        last=True,
        source="live",
        base_length=0,
        prefix_length=len(request.prefix_tokens),
        tokens_in=pack_u32(request.prefix_tokens),
        tokens_out=pack_u32(completion.tokens),
        logp=pack_f32(completion.logp),
        loss_mask=b"\x01" * len(completion.tokens),
        spans=completion.spans,
        weights_version=completion.weights_version,
        routes=completion.routes,
        routes_shape=completion.routes_shape if completion.routes else (),
        finish=SILENT if silent else completion.finish,
        temperature=request.temperature,
        started_ms=arrived_ms,
        ended_ms=completion.ended_ms,
        region=run.region,
        worker=worker,
        user=pseudonym(request.user) if request.user else "",
        cohort=completion.cohort,
        text_length=utf16_length(told.fill) if isinstance(told, Call) else 0,
    )


class SuggestionLog:
    """`offer` from the loop that answers; `run` beside it."""

    def __init__(
        self,
        config: SuggestionsConfig,
        run: str,
        make: Callable[[Answer], RolloutStep],
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._make = make
        self._clock = clock or SystemClock()
        self._waiting: deque[tuple[float, Answer]] = deque()
        """With the loop time until which it may wait."""
        self._came = asyncio.Event()
        self.counts: Counter[str] = Counter()
        """`written`; `lost.<why>`; `passed.<why>` for live answers that are no suggestions."""

    def offer(self, request: Generation, completion: Completion, arrived_ms: int) -> None:
        """Takes the answer and returns at once. Above `waiting_max` the newest is lost, so that order
        stays."""
        answer = Answer(request, completion, arrived_ms)
        reason = why_not(answer, self._run)
        if reason:
            self.counts[f"passed.{reason}"] += 1
        elif len(self._waiting) >= self._config.waiting_max:
            self._lose("full", [answer])
        else:
            until_s = asyncio.get_running_loop().time() + self._config.write_ms_max / 1000
            self._waiting.append((until_s, answer))
            self._came.set()

    async def run(self, opened: Callable[[], AbstractAsyncContextManager[Bus]], stop: asyncio.Event) -> None:
        """Writes until `stop`, and then what waits, for `drain_ms` at most. `opened` opens the log, which may
        be away: answers go on meanwhile."""
        while True:
            try:
                async with opened() as bus:
                    await self._serve(bus, stop)
                break
            except BusUnavailable as error:
                if stop.is_set():
                    break
                log.event(_logger, "bus_unavailable", level=logging.WARNING, reason=error)
                self._drop_late(asyncio.get_running_loop().time())
                await asyncio.sleep(RETRY_S)
        self._lose("stopped", [answer for _, answer in self._waiting])

    async def _serve(self, bus: Bus, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        stopping = asyncio.ensure_future(stop.wait())
        reporting = asyncio.ensure_future(self._report())
        try:
            while not stopping.done():
                came = asyncio.ensure_future(self._came.wait())
                await asyncio.wait({came, stopping}, return_when=asyncio.FIRST_COMPLETED)
                came.cancel()
                await asyncio.sleep(self._config.gather_ms / 1000)
                await self._write_all(bus, None, stopping)
            await self._write_all(bus, loop.time() + self._config.drain_ms / 1000, None)
        finally:
            stopping.cancel()
            reporting.cancel()
            log.event(_logger, "suggestions", waiting=len(self._waiting), **self.counts)

    async def _write_all(
        self, bus: Bus, until_s: float | None, stopping: "asyncio.Future[Literal[True]] | None"
    ) -> None:
        """Batch after batch. Returns early at `until_s`, or once `stopping` is done while the log is away."""
        self._came.clear()
        while self._waiting:
            now_s = asyncio.get_running_loop().time()
            self._drop_late(now_s)
            if until_s is not None and now_s > until_s:
                return
            batch = [self._waiting[index] for index in range(min(len(self._waiting), self._config.batch_max))]
            messages = self._messages([answer for _, answer in batch])
            try:
                if messages:
                    await bus.produce(messages)
            except BusUnavailable as error:
                # What came of it may be unknown: sent again under the same ids, the joins take it once.
                log.event(_logger, "bus_unavailable", level=logging.WARNING, reason=error)
                if stopping is not None and stopping.done():
                    return
                await asyncio.sleep(RETRY_S)
                continue
            for _ in batch:
                self._waiting.popleft()
            self.counts["written"] += len(messages)

    def _drop_late(self, now_s: float) -> None:
        late = []
        while self._waiting and self._waiting[0][0] < now_s:
            late.append(self._waiting.popleft()[1])
        self._lose("late", late)

    def _messages(self, answers: Sequence[Answer]) -> list[Message]:
        messages = []
        for answer in answers:
            step = self._make(answer)
            try:
                value, headers = encode(
                    step,
                    source=f"inference/{step.region}/{step.worker}",
                    now_ms=self._clock.now_ms(),
                    event_id=f"{step.group_id}/0/0/0",
                )
            except WireError as error:
                self._lose("unfit", [answer], error)
                continue
            messages.append(Message(ROLLOUT_STEPS.name, step.group_id.encode(), value, headers))
        return messages

    def _lose(self, why: str, answers: Sequence[Answer], error: object = "") -> None:
        if not answers:
            return
        first = self.counts[f"lost.{why}"] == 0
        self.counts[f"lost.{why}"] += len(answers)
        if first or len(answers) > 1:
            log.event(
                _logger,
                "alarm",
                level=logging.ERROR,
                kind="suggestions_lost",
                why=why,
                suggestions=self.counts[f"lost.{why}"],
                first=answers[0].request.group_id,
                reason=error,
            )

    async def _report(self) -> None:
        told: Counter[str] = Counter()
        while True:
            await asyncio.sleep(REPORT_S)
            if self.counts != told:
                told = self.counts.copy()
                log.event(_logger, "suggestions", waiting=len(self._waiting), **self.counts)

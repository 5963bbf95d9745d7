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
from dataclasses import dataclass
from typing import NamedTuple

from headrace import log
from headrace.bus.protocol import Bus, Message
from headrace.clock import Clock, SystemClock
from headrace.config import RunConfig
from headrace.errors import BusUnavailable, WireError
from headrace.policy.dialogue import Call, TokenCodec, parse_suggestion
from headrace.producers.config import SuggestionsConfig
from headrace.producers.prompts import counter_of
from headrace.rpc.feedback import USER_CHARS_MAX, is_id, utf16_length
from headrace.rpc.generation import Completion, Generation
from headrace.wire.codec import encode
from headrace.wire.packed import pack_f32, pack_u32
from headrace.wire.records import SILENT, RolloutStep
from headrace.wire.topics import ROLLOUT_STEPS

SILENT_TOKEN = "<|silent|>"
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
    if not is_id(request.group_id) or len(request.user) > USER_CHARS_MAX:
        return "no_id"  # no event could name it, and the log might not take it
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


@dataclass(slots=True, eq=False)
class _Waiting:
    """`until_s`: loop time until which it may wait. `message`: once it was tried to write."""

    until_s: float
    answer: Answer
    message: Message | None = None


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
        self._waiting: deque[_Waiting] = deque()
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
            self._waiting.append(_Waiting(until_s, answer))
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
        self._lose("stopped", [waiting.answer for waiting in self._waiting])

    async def _serve(self, bus: Bus, stop: asyncio.Event) -> None:
        stopping = asyncio.ensure_future(stop.wait())
        reporting = asyncio.ensure_future(self._report())
        writing = asyncio.ensure_future(self._write(bus, stop))
        try:
            await asyncio.wait({writing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self._came.set()
            await asyncio.wait_for(writing, self._config.drain_ms / 1000)
        except TimeoutError:
            return
        finally:
            for task in (stopping, reporting, writing):
                task.cancel()
            log.event(_logger, "suggestions", waiting=len(self._waiting), **self.counts)

    async def _write(self, bus: Bus, stop: asyncio.Event) -> None:
        """Batch after batch until `stop`, and then until nothing waits."""
        while self._waiting or not stop.is_set():
            if not self._waiting:
                self._came.clear()
                await self._came.wait()
                await asyncio.sleep(self._config.gather_ms / 1000)
                continue
            self._drop_late(asyncio.get_running_loop().time())
            messages = self._oldest()
            try:
                if messages:
                    await bus.produce(messages)
            except BusUnavailable as error:
                # What came of it may be unknown: sent again under the same ids, the joins take it once.
                log.event(_logger, "bus_unavailable", level=logging.WARNING, reason=error)
                await asyncio.sleep(RETRY_S)
                continue
            for _ in messages:
                self._waiting.popleft()
            self.counts["written"] += len(messages)

    def _drop_late(self, now_s: float) -> None:
        late = []
        while self._waiting and self._waiting[0].until_s < now_s:
            late.append(self._waiting.popleft().answer)
        self._lose("late", late)

    def _oldest(self) -> list[Message]:
        """Of the answers that have waited longest, which go on waiting; what can't be a record is lost."""
        messages: list[Message] = []
        for _ in range(min(len(self._waiting), self._config.batch_max)):
            waiting = self._waiting[len(messages)]
            try:
                waiting.message = waiting.message or self._message(waiting.answer)
            except WireError as error:
                del self._waiting[len(messages)]
                self._lose("unfit", [waiting.answer], error)
            else:
                messages.append(waiting.message)
        return messages

    def _message(self, answer: Answer) -> Message:
        step = self._make(answer)
        value, headers = encode(
            step,
            source=f"inference/{step.region}/{step.worker}",
            now_ms=self._clock.now_ms(),
            event_id=f"{step.group_id}/0/0/0",
        )
        return Message(ROLLOUT_STEPS.name, step.group_id.encode(), value, headers)

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

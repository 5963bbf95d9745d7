"""The engine: many requests decoded together, step by step, on one thread.

A step changes weights if new ones wait, admits sequences to free slots, computes their prompts, feeds one
token of every running sequence (or a chunk of an earlier turn), samples, and reports. It knows neither broker
nor gRPC nor asyncio. `submit`, `cancel`, `status` and what changes the weights may be called by any thread;
`step` and `wait` by one. While a release is in force a step is one pass of each version
(`inference.hosting`).

R rows  V vocabulary
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from headrace.clock import Clock, SystemClock
from headrace.errors import InferenceError, InferenceUnavailable
from headrace.inference.config import InferenceConfig
from headrace.inference.hosting import Hosting
from headrace.inference.prefixes import PrefixCache
from headrace.inference.request import Bounds, check
from headrace.inference.sampler import sample
from headrace.inference.scheduler import Scheduler
from headrace.inference.sequence import Running, Sink, Ticket
from headrace.inference.weights import ServedWeights
from headrace.policy.decode import Decoder, Prefix, Row
from headrace.policy.model import ModelConfig
from headrace.rpc.generation import Finish, Generation, Progress, ReplicaStatus


class Engine:
    """One model, `config.slots` sequences at once. Serves nothing before the first `install`."""

    def __init__(self, model: ModelConfig, config: InferenceConfig, clock: Clock | None = None) -> None:
        self.model = model
        self._config = config
        self._clock = clock or SystemClock()
        self.bounds = Bounds(model.vocabulary, model.context_max, config.own_tokens_max, config.queue_max)
        self._decoder = Decoder(model, config.slots, config.own_tokens_max)
        self._scheduler: Scheduler[Running] = Scheduler(
            slots=config.slots,
            live_slots=config.live_slots,
            beside_live=config.beside_live_rows,
            queue_max=config.queue_max,
        )
        self._prefixes: PrefixCache[Prefix] = PrefixCache(config.prefix_cache_tokens)
        self._hosting = Hosting()
        self._changes: deque[tuple[Callable[[Hosting], Hosting | str], Future[float]]] = deque()
        self._cancels: deque[Ticket] = deque()
        self._running: list[Running] = []
        self._tokens_generated = 0
        self._tokens_prefilled = 0
        self._busy_s = 0.0
        self._up_since = time.monotonic()

    def submit(self, request: Generation, sink: Sink) -> Ticket:
        """Queues the request. Raises InferenceError (it can never run), Overloaded (not now) or
        InferenceUnavailable (no weights yet)."""
        budgets = check(request, self.bounds)
        choice = self._hosting.choose(request)
        if choice is None:
            wanted = "weights" if request.version is None else f"weights {request.version}"
            has = [item.version for item in self._hosting.sets]
            raise InferenceUnavailable(
                f"{self._config.replica}: expected {wanted} to serve, got {has or 'none yet'}"
            )
        ticket = Ticket.of(request, budgets, sink, None if request.version is None else choice.weights)
        begun = any(item.own_tokens for item in request.sequences)
        place = f"request {request.group_id}"
        self._scheduler.offer(request.lane, list(ticket.sequences), place, begun=begun)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends what is left of a request as `cancelled` and frees its slots, before the next step. Calling
        twice, or after its end, does nothing."""
        self._cancels.append(ticket)
        self._scheduler.wake()

    def install(self, weights: ServedWeights) -> "Future[float]":
        """The weights are the newest from the next step on; resolves to the milliseconds that decoding stood
        still. Requests in flight that had the newest go on with them."""
        return self._change(lambda hosting: hosting.with_newest(weights))

    def hold(self, weights: ServedWeights) -> "Future[float]":
        """The weights are in memory, for a `release` to come. Fails with InferenceError when there would be
        more than `versions_max` sets."""
        sets_max = self._config.versions_max

        def held(hosting: Hosting) -> Hosting | str:
            return hosting.with_held(weights, sets_max) or f"expected at most {sets_max} versions at once"

        return self._change(held)

    def release(self, run: str, *, stable: int | None, canary: int | None, share: float) -> "Future[float]":
        """From the next step on new live requests have their side of the release, and what had another goes
        on with the stable version; None ends it. Fails with InferenceError when a version isn't hosted."""
        return self._change(lambda hosting: hosting.with_release(run, stable, canary, share))

    def _change(self, change: Callable[[Hosting], Hosting | str]) -> "Future[float]":
        done: Future[float] = Future()
        self._changes.append((change, done))
        self._scheduler.wake()
        return done

    def status(self) -> ReplicaStatus:
        hosting = self._hosting
        weights, release = hosting.newest, hosting.release
        return ReplicaStatus(
            replica=self._config.replica,
            version=weights.version if weights else 0,
            root=weights.root if weights else "",
            slots=self._config.slots,
            slots_used=self._scheduler.slots_used,
            queued_live=self._scheduler.queued("live"),
            queued_rollout=self._scheduler.queued("rollout"),
            tokens_generated=self._tokens_generated,
            tokens_prefilled=self._tokens_prefilled,
            busy_s=self._busy_s,
            up_s=time.monotonic() - self._up_since,
            hosted=tuple((item.version, item.root) for item in hosting.sets),
            stable=release.stable.version if release else None,
            canary=release.canary.version if release and release.canary else None,
            share=release.share if release else 0.0,
        )

    def wait(self, timeout_s: float) -> None:
        """Sleeps until something wants a step, or `timeout_s` is over."""
        self._scheduler.wait(timeout_s)

    def wake(self) -> None:
        """Ends a `wait`."""
        self._scheduler.wake()

    def step(self) -> bool:
        """One round for every running sequence. False when there was nothing to compute."""
        self._swap()
        self._drop_cancelled()
        self._scheduler.begin_round()
        began = time.perf_counter()
        fresh, room = self._admit()
        if not fresh and not self._running:
            return False
        logits_RV, ready = self._forward(fresh, room)
        if ready:
            self._advance(logits_RV, ready)
        self._busy_s += time.perf_counter() - began
        return True

    def _swap(self) -> None:
        while self._changes:
            began = time.perf_counter()
            change, done = self._changes.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            after = change(self._hosting)
            if isinstance(after, str):
                done.set_exception(InferenceError(f"{self._config.replica}: {after}"))
                continue
            self._hosting = after
            self._prefixes.forget_others({item.root for item in after.sets})
            done.set_result((time.perf_counter() - began) * 1000)

    def _drop_cancelled(self) -> None:
        while self._cancels:
            ticket = self._cancels.popleft()
            self._scheduler.remove(ticket.sequences)
            left = [item for item in ticket.sequences if not item.ended]
            if left:
                ticket.sink([self._end(item, "cancelled") for item in left])
                self._running = [item for item in self._running if not item.ended]

    def _admit(self) -> tuple[list[Running], int]:
        """Gives free slots to those who wait, while this step has room for their prompts; and the room
        left."""
        fresh: list[Running] = []
        missing: dict[str, dict[tuple[int, ...], list[Running]]] = {}
        used = 0
        while (head := self._scheduler.peek()) is not None:
            lane, item = head
            tokens = item.ticket.request.prefix_tokens
            weights = item.begin(self._hosting)
            prefix = self._prefixes.find(weights.root, tokens)
            if prefix is None and tokens not in missing.get(weights.root, ()):
                room = self._config.step_tokens if lane == "live" else self._step_tokens
                if missing and used + len(tokens) > room:
                    break
                used += len(tokens)
                missing.setdefault(weights.root, {})[tokens] = []
            item.slot = self._scheduler.take(lane)
            item.prefix = prefix
            item.feed = list(item.own_tokens)
            item.started_ms = self._clock.now_ms()
            if prefix is None:
                missing[weights.root][tokens].append(item)
            fresh.append(item)
        for prompts in missing.values():
            self._prefill(prompts)
        return fresh, self._step_tokens - used

    @property
    def _step_tokens(self) -> int:
        """Tokens that rollouts may have computed in this step, beside the decoding and a first prompt."""
        return 0 if self._scheduler.live_near else self._config.step_tokens

    def _prefill(self, missing: dict[tuple[int, ...], list[Running]]) -> None:
        """Of prompts that all begin with the same weights."""
        weights = next(iter(missing.values()))[0].weights
        computed = self._decoder.prefill(weights.tensors, [list(tokens) for tokens in missing])
        for (tokens, items), prefix in zip(missing.items(), computed, strict=True):
            self._tokens_prefilled += len(tokens)
            self._prefixes.keep(weights.root, tokens, prefix)
            for item in items:
                item.prefix = prefix

    def _forward(self, fresh: list[Running], room: int) -> tuple[Tensor, list[Running]]:
        """Feeds the running sequences what they have to be fed, one pass a version; the scores `[R, V]` of
        those that may sample now."""
        ready = [item for item in fresh if not item.feed]
        parts = [_prefix_of(item).logits_V.unsqueeze(0) for item in ready]
        self._running += fresh
        by_root: dict[str, list[tuple[Running, Row]]] = {}
        for item, row in self._rows(room):
            by_root.setdefault(item.go_on(self._hosting).root, []).append((item, row))
        for rows in by_root.values():
            extension = self._decoder.extend(rows[0][0].weights.tensors, [row for _, row in rows])
            for (item, _), routes_TLK in zip(rows, extension.routes, strict=True):
                item.routes.append(routes_TLK)
            whole = [index for index, (item, _) in enumerate(rows) if not item.feed]
            ready += [rows[index][0] for index in whole]
            parts.append(extension.logits_RV if len(whole) == len(rows) else extension.logits_RV[whole])
        return (parts[0] if len(parts) == 1 else torch.cat(parts)), ready

    def _rows(self, room: int) -> list[tuple[Running, Row]]:
        """What is fed in this step: the last token of all that decode, and of earlier turns, live ones first,
        as much as there is room for, at least one chunk. Beside live ones only the oldest rollouts go on."""
        chunk = self._config.chunk_tokens
        room = max(room, chunk)
        rollouts_left = self._scheduler.rollouts_max
        rows = []
        for item in sorted(self._running, key=_is_rollout):
            take = 1 if item.tokens else min(len(item.feed), chunk, room)
            if _is_rollout(item) and not rollouts_left:
                break
            if item.feed and take:
                rollouts_left -= _is_rollout(item)
                room -= 0 if item.tokens else take
                fed, item.feed = item.feed[:take], item.feed[take:]
                rows.append((item, Row(slot=item.slot, prefix=_prefix_of(item), tokens=fed)))
        return rows

    def _advance(self, logits_RV: Tensor, ready: list[Running]) -> None:
        """Samples one token for each of `ready`, ends those that are done and reports."""
        tokens, logp = sample(logits_RV, [item.draw() for item in ready])
        self._tokens_generated += len(ready)
        reports: dict[Ticket, list[Progress]] = {}
        for item, token, value in zip(ready, tokens, logp, strict=True):
            finish = item.take(token, value, item.weights.version)
            if finish:
                reports.setdefault(item.ticket, []).append(self._end(item, finish))
            elif item.ticket.request.stream_tokens:
                reports.setdefault(item.ticket, []).append(item.progress())
        self._running = [item for item in self._running if not item.ended]
        for ticket, progress in reports.items():
            ticket.sink(progress)

    def _end(self, item: Running, finish: Finish) -> Progress:
        """Frees the slot; the last progress of a sequence."""
        item.ended = True
        if item.slot >= 0:
            self._decoder.release(item.slot)
            self._scheduler.give_back(item.slot)
        layers, active = self.model.layers, self.model.experts_active
        now_ms = self._clock.now_ms()
        return item.progress(item.completion(finish, layers=layers, active=active, now_ms=now_ms))


def _is_rollout(item: Running) -> bool:
    return item.ticket.request.lane == "rollout"


def _prefix_of(item: Running) -> Prefix:
    assert item.prefix is not None, f"{item.member}: runs without a prefix"
    return item.prefix

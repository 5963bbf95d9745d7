"""One replica seen from asyncio: the engine in a thread of its own, so that computing never blocks the loop.

It answers requests (`rpc.generation.Generator`), loads weights and says how it is. It knows no gRPC: the
server puts one on the network, evaluation uses one in its own process.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from headrace.errors import InferenceError, InferenceUnavailable, Overloaded, PolicyError, WeightsUnfit
from headrace.inference.config import InferenceConfig
from headrace.inference.engine import Engine
from headrace.inference.weights import ServedWeights, read
from headrace.policy.model import ModelConfig
from headrace.rpc.generation import Completion, Generation, Loaded, Progress, ReplicaStatus

IDLE_WAIT_S: Final = 1.0  # a wake ends it at once; the bound only limits what a lost one could cost

STOP_S: Final = 30.0  # far more than a step takes; the thread is a daemon, so the process ends all the same


class Replica:
    """Use as `async with Replica(model, config) as replica`: the thread runs inside the block."""

    def __init__(self, model: ModelConfig, config: InferenceConfig) -> None:
        self._engine = Engine(model, config)
        self._name = config.replica
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"engine-{config.replica}", daemon=True)
        self._loading = asyncio.Lock()
        self._installed = asyncio.Event()
        """Set, and replaced, when other weights are served."""
        self._early = 0
        """Sequences that wait for newer weights."""
        self._early_max = config.queue_max
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failed: asyncio.Future[None] | None = None
        """Holds the exception of the engine's thread, once it died of one."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.failed = self._loop.create_future()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends after the step in progress; requests still in flight stay unanswered."""
        self._stopping.set()
        self._engine.wake()
        await asyncio.to_thread(self._thread.join, STOP_S)
        assert self.failed is not None
        if not self.failed.cancel():
            self.failed.exception()  # seen: nobody may have been waiting for it

    async def generate(self, request: Generation, *, timeout_s: float) -> list[Completion]:
        """See `rpc.generation.Generator`."""
        done: dict[int, Completion] = {}
        async with aclosing(self.stream(request, timeout_s=timeout_s)) as stream:
            async for progress in stream:
                if progress.completion is not None:
                    done[progress.member] = progress.completion
        return [done[item.member] for item in request.sequences]

    async def stream(self, request: Generation, *, timeout_s: float) -> AsyncGenerator[Progress]:
        """Progress as it comes, merged per member when the reader is slower than the engine. Leaving early
        cancels the request and frees its slots. Raises as `Engine.submit`, and InferenceUnavailable when
        `timeout_s` is over or the engine died."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await self._serves(request, deadline)
        # Bounded by the request itself: no more entries than tokens it may generate.
        arrived: asyncio.Queue[list[Progress]] = asyncio.Queue()
        ticket = self._engine.submit(request, lambda progress: _post(loop, arrived, progress))
        left = len(request.sequences)
        try:
            while left:
                for progress in await self._next(arrived, deadline, request):
                    yield progress
                    left -= progress.completion is not None
        finally:
            if left:
                self._engine.cancel(ticket)

    async def load(self, *, version: int, path: Path, root: str, hold: bool = False) -> Loaded:
        """Serves the staged file at `path` as the newest, or only holds it for `release`, if its tensors have
        `root`; else says why not and serves on. A load once begun is finished even when the caller has gone.
        Calling twice is safe."""
        return await asyncio.shield(asyncio.ensure_future(self._load(version, path, root, hold)))

    async def install(self, weights: ServedWeights) -> float:
        """Serves weights of this process; the milliseconds that decoding stood still."""
        pause_ms = await asyncio.wrap_future(self._engine.install(weights))
        self._installed.set()
        self._installed = asyncio.Event()
        return pause_ms

    async def release(self, run: str, *, stable: int | None, canary: int | None, share: float) -> None:
        """See `Engine.release`."""
        await asyncio.wrap_future(self._engine.release(run, stable=stable, canary=canary, share=share))

    def status(self) -> ReplicaStatus:
        return self._engine.status()

    async def _load(self, version: int, path: Path, root: str, hold: bool) -> Loaded:
        async with self._loading:
            now = self._engine.status()
            hosted = now.hosted if hold else ((now.version, now.root),)
            if root and (version, root) in hosted:
                return Loaded(serving=True, version=version, root=root, pause_ms=0.0, detail="")
            try:
                weights = await asyncio.to_thread(
                    read, path, version=version, root=root, config=self._engine.model
                )
                if hold:
                    pause_ms = await asyncio.wrap_future(self._engine.hold(weights))
                else:
                    pause_ms = await self.install(weights)
            except (PolicyError, InferenceError) as error:
                return Loaded(
                    serving=False,
                    version=now.version,
                    root=now.root,
                    pause_ms=0.0,
                    detail=str(error),
                    unfit=isinstance(error, WeightsUnfit),
                )
            return Loaded(serving=True, version=version, root=root, pause_ms=pause_ms, detail="")

    async def _serves(self, request: Generation, deadline: float) -> None:
        """Waits for weights new enough for `request`; it takes no slot and no place in a lane meanwhile."""
        place = f"{self._name}: request {request.group_id}"
        if self._engine.status().version >= request.version_min:
            return
        if self._early + len(request.sequences) > self._early_max:
            raise Overloaded(
                f"{place}: expected room for {len(request.sequences)} that wait for newer weights, got "
                f"{self._early} of {self._early_max} waiting"
            )
        self._early += len(request.sequences)
        try:
            while (version := self._engine.status().version) < request.version_min:
                installed = asyncio.ensure_future(self._installed.wait())
                expected = f"weights {request.version_min} or newer, got {version}"
                await self._first(installed, deadline, f"{place}: expected {expected}")
        finally:
            self._early -= len(request.sequences)

    async def _next(
        self, arrived: asyncio.Queue[list[Progress]], deadline: float, request: Generation
    ) -> list[Progress]:
        """All that has come, at least one entry."""
        getting = asyncio.ensure_future(arrived.get())
        await self._first(getting, deadline, f"{self._name}: request {request.group_id}: expected tokens")
        pieces = getting.result()
        while not arrived.empty():
            pieces += arrived.get_nowait()
        return _merged(pieces)

    async def _first(self, wanted: asyncio.Future[Any], deadline: float, place: str) -> None:
        """Returns once `wanted` is done. Raises InferenceUnavailable with `place` and why, when the engine
        dies or the deadline passes before."""
        assert self.failed is not None, "expected a started replica"
        either: set[asyncio.Future[Any]] = {wanted, self.failed}
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            came = wanted.done() or not wanted.cancel()
        if not came:
            cause = self.failed.exception() if self.failed.done() else None
            reason = f"the engine died: {cause}" if cause else "the deadline passed"
            raise InferenceUnavailable(f"{place}, {reason}") from cause

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._engine.step():
                    self._engine.wait(IDLE_WAIT_S)
        except BaseException as error:
            assert self._loop is not None and self.failed is not None
            self._loop.call_soon_threadsafe(self.failed.set_exception, error)


def _post(
    loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[list[Progress]], progress: list[Progress]
) -> None:
    loop.call_soon_threadsafe(arrived.put_nowait, progress)


def _merged(pieces: list[Progress]) -> list[Progress]:
    """One progress a member, in the order of their first piece."""
    merged: dict[int, Progress] = {}
    for piece in pieces:
        before = merged.get(piece.member)
        merged[piece.member] = (
            piece
            if before is None
            else Progress(
                member=piece.member,
                tokens=before.tokens + piece.tokens,
                logp=before.logp + piece.logp,
                completion=piece.completion,
            )
        )
    return list(merged.values())

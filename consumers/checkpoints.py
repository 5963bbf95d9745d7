"""Checkpoints written beside the steps, one at a time.

A state is never changed (each step makes new tensors), so a reference to it is a snapshot: encoding and
storing run in another thread while the next steps are computed. The order of effects:

    1 the state of step N is committed   2 its blob is durable   3 the next step's transaction names it, and
    names those that are given up for it   4 their blobs are deleted

A crash after 2 or after 3 leaves blobs that nobody names, which `consumers.sweep` takes. A checkpoint that is
due while another is being written waits for its turn and is then one of the newest state. Not here: its bytes
(`trainer.checkpoint`), which are kept (`consumers.kept`), who reads it (`consumers.replay`).
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from headrace import failpoints, log
from headrace.clock import Age
from headrace.consumers import kept
from headrace.errors import StoreError
from headrace.store.blobs import Blobs
from headrace.trainer import checkpoint
from headrace.trainer.config import TrainerConfig
from headrace.trainer.state import State
from headrace.wire.records import Checkpoint, TrainStep

_logger = logging.getLogger(__name__)

DELETE_S: Final = 5.0
"""How long the end of a run waits for the store to forget what the last record gave up."""


@dataclass(frozen=True, slots=True)
class Naming:
    """What one ledger record says of checkpoints. `seconds`: how long its step waited for that."""

    checkpoint: Checkpoint | None
    pruned: tuple[int, ...]
    seconds: float


class Checkpoints:
    """Of one trainer, from what the ledger says now. An async context manager: at its end a writing under way
    is given up, for nobody was told of it."""

    def __init__(
        self,
        blobs: Blobs,
        config: TrainerConfig,
        run_name: str,
        steps: Iterable[TrainStep],
        *,
        named_within_s: float,
    ) -> None:
        """`named_within_s`: a blob that no record names so long after it was stored, because no experience
        comes, is not named any more but written anew. Well below the grace period of a sweep."""
        self._blobs = blobs
        self._config = config
        self._run_name = run_name
        self._named_within_s = named_within_s
        self._live = kept.live(steps)
        self._due = False
        self._writing: asyncio.Task[None] | None = None
        self._only_deletes = False
        self._stored: Checkpoint | None = None
        """Durable, and named by no record yet."""
        self._unneeded: list[str] = []
        """Durable, and overtaken by the last step's before a record named it."""
        self._stored_age = Age()
        self._spans: list[tuple[float, float]] = []
        self._began_s = 0.0

    async def to_name(self, state: State, *, last: bool) -> Naming:
        """What the record of the step that makes `state` says; the `last` step of a run waits for a
        checkpoint of its own."""
        began_s = time.monotonic()
        self._look()
        if last:
            await self._wait()
            unneeded, self._stored = self._stored, None
            await self._write(state)
            if self._stored is None:
                self._stored = unneeded
            elif unneeded is not None:
                self._unneeded = [unneeded.uri]
        elif self._stored is not None and self._stored_age.seconds() > self._named_within_s:
            self._stored, self._due = None, True
        pruned: tuple[int, ...] = ()
        if self._stored is not None and self._stored.step is not None:
            pruned = kept.given_up(
                {*self._live, self._stored.step},
                newest=self._config.checkpoints_kept,
                forever_every=self._config.checkpoints_forever_every,
            )
        return Naming(self._stored, pruned, time.monotonic() - began_s)

    def committed(self, state: State, naming: Naming) -> None:
        """The record of `naming`, of the step that made `state`, is in the ledger: begins to delete what it
        gave up, and to write what is due."""
        self._look()
        self._due |= state.step % self._config.checkpoint_every == 0
        gone, self._unneeded = self._unneeded, []
        if naming.checkpoint is not None:
            assert naming.checkpoint.step is not None
            self._live[naming.checkpoint.step] = naming.checkpoint
            gone += [self._live.pop(step).uri for step in naming.pruned]
            self._stored = None
        if self._writing is not None or self._stored is not None or not (gone or self._due):
            return
        due, self._due = self._due and state.step not in self._live, False
        self._began_s = time.monotonic()
        self._only_deletes = not due
        self._writing = asyncio.create_task(self._beside(gone, state if due else None))

    def beside_s(self, since_s: float) -> float:
        """Seconds since `since_s` (monotonic) in which a checkpoint was being written."""
        now_s = time.monotonic()
        under_way = self._writing is not None and not self._writing.done()
        spans = [*self._spans, *([(self._began_s, now_s)] if under_way else [])]
        self._spans = []
        return sum(max(0.0, end - max(begin, since_s)) for begin, end in spans)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writing is not None:
            if self._only_deletes:
                await asyncio.wait({self._writing}, timeout=DELETE_S)
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None

    async def _beside(self, gone: list[str], state: State | None) -> None:
        try:
            for uri in gone:
                await self._delete(uri)
            if state is not None:
                await self._write(state)
        finally:
            self._spans.append((self._began_s, time.monotonic()))

    async def _delete(self, uri: str) -> None:
        try:
            await self._blobs.delete(uri)
        except StoreError as error:  # nobody names it any more: a sweep's business
            log.event(_logger, "checkpoint_left", level=logging.WARNING, uri=uri, reason=error)

    async def _write(self, state: State) -> None:
        """Makes `state` the one to be named next. When the store refuses, an alarm: the steps go on, and the
        checkpoints that there are stay."""
        began_s = time.monotonic()
        data = await asyncio.to_thread(checkpoint.encode, state, self._run_name)
        try:
            blob = await self._blobs.put(data, halfway=_halfway)
        except StoreError as error:
            log.event(
                _logger,
                "alarm",
                level=logging.WARNING,
                kind="checkpoint_failed",
                step=state.step,
                reason=error,
            )
            return
        failpoints.reach("checkpoint.uploaded")
        self._stored_age = Age()
        self._stored = Checkpoint(uri=blob.uri, sha256=blob.sha256, step=state.step, bytes=blob.bytes)
        log.event(
            _logger,
            "checkpoint_stored",
            step=state.step,
            bytes=blob.bytes,
            seconds=round(time.monotonic() - began_s, 3),
        )

    def _look(self) -> None:
        """Ends the bookkeeping of a writing that is done. Raises what it raised: only a bug does."""
        if self._writing is not None and self._writing.done():
            done, self._writing = self._writing, None
            done.result()

    async def _wait(self) -> None:
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._look()


def _halfway() -> None:
    failpoints.reach("checkpoint.written_half")

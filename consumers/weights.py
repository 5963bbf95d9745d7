"""The weights relay of a region: from an announcement to replicas that really serve it.

Announcements are hints: the relay takes the newest, builds it from the store, verifies its root, stages a
file per replica, has it loaded and says on `weights.acks` what is served. A replica that restarted, or missed
a version, is seen by its status and brought to the newest one. While anything fails, the old version serves
on. With a release in force (`wire.release`) the replica hosts both sides of it too. Not here: building a
version (`consumers.versions`), the swap itself (`inference`), deciding (`streams.canary`).
"""

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, NamedTuple

from headrace import log
from headrace.bus.protocol import Bus
from headrace.clock import Clock, SystemClock
from headrace.config import RunConfig
from headrace.consumers.config import RelayConfig
from headrace.consumers.region import Region, Role
from headrace.consumers.versions import Held
from headrace.errors import (
    InferenceError,
    InferenceUnavailable,
    StoreError,
)
from headrace.policy import checkpoint
from headrace.rpc.client import InferenceClient
from headrace.rpc.generation import Loaded, ReplicaStatus
from headrace.store.blobs import BlobReader
from headrace.wire.release import ReleaseConfig, Serving

_logger = logging.getLogger(__name__)

LOADING_FACTOR: Final = 4
"""Times `load_ms_max` that a replica counts as loading after its answer stayed out."""
RESTART_S: Final = 1.0
"""A replica whose start seems later than before by more than this is another incarnation."""
REPLICA_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


async def run(
    bus: Bus,
    run: RunConfig,
    config: RelayConfig,
    blobs: BlobReader,
    replicas: Sequence[str],
    stop: asyncio.Event,
    *,
    release: ReleaseConfig = ReleaseConfig(),  # noqa: B008 - frozen
    clock: Clock | None = None,
) -> None:
    """Keeps the replicas at these addresses on the newest announced version, and their live users on those of
    the release, until `stop` is set.

    Raises BusUnavailable when the log stays away for longer than `outage_ms_max`. Faults of a replica or of
    the store are logged and tried again.
    """
    relay = Region(bus, run, config, blobs, clock or SystemClock(), release.mode)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(InferenceClient(address)) for address in replicas]
        tasks = [asyncio.create_task(relay.follow(stop))]
        tasks += [asyncio.create_task(_Replica(relay, client).keep(stop)) for client in clients]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Load(NamedTuple):
    """A load whose answer did not come: it may be going on in the replica."""

    version: int
    root: str
    replica_started_s: float
    deadline_s: float


class _Replica:
    """Brings one replica to the newest version, again and again."""

    def __init__(self, relay: Region, client: InferenceClient) -> None:
        self._relay = relay
        self._client = client
        self._acked: dict[Role, tuple[int, str]] = {}
        self._pending: _Load | None = None
        self._asked_s = 0.0
        self._reachable = True
        self._refused: dict[Role, tuple[int, str]] = {}

    async def keep(self, stop: asyncio.Event) -> None:
        config = self._relay.config
        while not stop.is_set():
            wait_ms = config.poll_ms
            self._asked_s = time.monotonic()
            try:
                status = await self._client.status()
                self._see(True)
                refused = await self._bring_release(status)
                # Without the stable version no user may get the newest; without the canary they may.
                if refused == "stable" or not await self._bring_to_newest(status) or refused:
                    wait_ms = config.retry_ms
            except InferenceUnavailable as error:
                self._see(False, error)
            except (StoreError, InferenceError, OSError) as error:
                log.event(
                    _logger,
                    "alarm",
                    level=logging.WARNING,
                    kind="weights_not_loaded",
                    replica=self._client.address,
                    reason=error,
                )
                wait_ms = config.retry_ms
            await self._relay.wait(stop, wait_ms)

    async def _bring_to_newest(self, status: ReplicaStatus) -> bool:
        """False when the replica refused what it should serve."""
        target = self._relay.versions.newest
        if target is None or self._loading(status):
            return True
        if (status.version, status.root) == (target.version, target.root):
            await self._acknowledge(status.replica, status.version, status.root)
            return True
        held = await self._relay.versions.obtain()
        if (held.version, held.root) == (status.version, status.root):
            return True
        loaded = await self._load(status, held)
        if loaded is None:
            return True
        if loaded.serving:
            self._refused.pop("", None)
            await self._acknowledge(status.replica, loaded.version, loaded.root, pause_ms=loaded.pause_ms)
            return True
        await self._refuse(status.replica, held, loaded)
        return False

    async def _bring_release(self, status: ReplicaStatus) -> Role:
        """Gives live users what the release says: first what needs no load, so that a revoked canary stops at
        once, then what has to be loaded. The side that the replica refused; empty when it refused none."""
        wanted, now = self._relay.serving, Serving(status.stable, status.canary, status.share)
        if self._loading(status):
            return ""
        if wanted.stable is None:
            if now.stable is not None and status.root:
                await self._set(Serving())
            return ""
        roots = {v: self._relay.versions.root_of(v) for v in wanted[:2] if v is not None}
        lacking = [version for version, root in roots.items() if (version, root) not in status.hosted]
        if not lacking:
            if now != wanted:
                await self._set(wanted)
            for version, root in roots.items():
                await self._acknowledge(status.replica, version, root or "", role=_side(wanted, version))
            return ""
        stable = now.stable if wanted.stable in lacking else wanted.stable
        if now != Serving(stable):
            await self._set(Serving(stable))
        for version in lacking:
            role = _side(wanted, version)
            held = await self._relay.versions.obtain(version)
            loaded = await self._load(status, held, hold=True)
            if loaded is None:
                return ""
            if not loaded.serving:
                await self._refuse(status.replica, held, loaded, role)
                return role
            self._refused.pop(role, None)
        await self._set(wanted)
        return ""

    async def _set(self, serving: Serving) -> None:
        reason = await self._client.set_release(
            run=self._relay.run.name, stable=serving.stable, canary=serving.canary, share=serving.share
        )
        if reason:
            raise InferenceError(f"{self._client.address}: release {serving}: {reason}")
        log.event(_logger, "release", replica=self._client.address, **serving._asdict())

    async def _refuse(self, replica: str, held: Held, loaded: Loaded, role: Role = "") -> None:
        """Says that a replica refused a version: once, if the log takes it."""
        if self._refused.get(role) == (held.version, held.root):
            return
        log.event(
            _logger,
            "alarm",
            level=logging.WARNING,
            kind="weights_refused",
            replica=replica,
            version=held.version,
            reason=loaded.detail,
        )
        said = await self._relay.acknowledge(
            replica,
            held.version,
            held.root,
            role=role,
            refused=loaded.detail or "refused",
            unfit=loaded.unfit,
        )
        if said:
            self._refused[role] = (held.version, held.root)

    async def _load(self, status: ReplicaStatus, held: Held, *, hold: bool = False) -> Loaded | None:
        """Stages the weights and has them loaded. None when the answer stays out: `_loading` then watches it,
        instead of sending it again."""
        path = await asyncio.to_thread(self._stage, status.replica, held)
        load_s_max = self._relay.config.load_ms_max / 1000
        now_s = time.monotonic()
        self._acked.pop("", None)
        self._pending = _Load(
            held.version, held.root, now_s - status.up_s, now_s + LOADING_FACTOR * load_s_max
        )
        try:
            loaded = await self._client.load_weights(
                version=held.version, path=str(path), root=held.root, timeout_s=load_s_max, hold=hold
            )
        except InferenceUnavailable as error:
            log.event(
                _logger,
                "load_unanswered",
                level=logging.WARNING,
                replica=status.replica,
                version=held.version,
                reason=error,
            )
            return None
        self._pending = None
        log.event(
            _logger,
            "loaded" if loaded.serving else "refused",
            replica=status.replica,
            version=held.version,
            pause_ms=loaded.pause_ms,
        )
        return loaded

    def _loading(self, status: ReplicaStatus) -> bool:
        """Whether a load that we sent may still be going on in this very incarnation of the replica."""
        pending = self._pending
        if pending is None:
            return False
        # from before the question: an answer that we came to late is no restart
        restarted = self._asked_s - status.up_s > pending.replica_started_s + RESTART_S
        served = ((status.version, status.root), *status.hosted)
        ended = (pending.version, pending.root) in served
        if ended or restarted or time.monotonic() > pending.deadline_s:
            self._pending = None
        return self._pending is not None

    def _stage(self, replica: str, held: Held) -> Path:
        """The weights as a file that the replica can read; only the newest `staged_max` stay."""
        if not REPLICA_NAME.fullmatch(replica):
            raise InferenceError(
                f"{self._client.address}: expected a replica name fit for a folder, got {replica!r}"
            )
        folder = Path(self._relay.config.stage_dir).resolve() / replica
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"v{held.version:08d}-{held.root[:12]}.safetensors"
        checkpoint.save(path, held.weights)
        others = [other for other in sorted(folder.glob("v*.safetensors")) if other != path]
        for other in others[: max(0, len(others) + 1 - self._relay.config.staged_max)]:
            other.unlink(missing_ok=True)
        for unfinished in folder.glob("v*.part"):  # of a relay that was killed
            unfinished.unlink(missing_ok=True)
        return path

    async def _acknowledge(
        self, replica: str, version: int, root: str, *, role: Role = "", pause_ms: float = 0.0
    ) -> None:
        if self._acked.get(role) != (version, root) and await self._relay.acknowledge(
            replica, version, root, role=role, pause_ms=pause_ms
        ):
            self._acked[role] = (version, root)

    def _see(self, reachable: bool, error: InferenceUnavailable | None = None) -> None:
        """Logs when a replica goes away or comes back; the next version it serves is acknowledged anew."""
        if reachable != self._reachable:
            name = "replica_back" if reachable else "replica_away"
            log.event(
                _logger, name, level=logging.WARNING, replica=self._client.address, reason=error or "answers"
            )
            self._reachable = reachable
            self._acked.clear()


def _side(serving: Serving, version: int) -> Role:
    return "stable" if version == serving.stable else "canary"

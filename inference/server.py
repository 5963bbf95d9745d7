"""One replica on the network: the gRPC `Inference` service, with health and reflection.

Not here: computing (`inference.engine`), its thread (`inference.replica`), fetching weights
(`consumers.weights` asks over `LoadWeights`).
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace import log
from headrace.clock import Clock, SystemClock
from headrace.errors import HeadraceError, InferenceError, InferenceUnavailable, Overloaded
from headrace.inference.config import InferenceConfig
from headrace.inference.replica import Replica
from headrace.inference.weights import ServedWeights
from headrace.kernels import invariant
from headrace.policy import checkpoint
from headrace.rpc import inference_pb2 as pb
from headrace.rpc.generation import Completion, Generation
from headrace.rpc.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from headrace.rpc.messages import MESSAGE_BYTES_MAX, event_message, request_of, status_message

SERVICE: Final = "headrace.inference.v1.Inference"
REQUEST_S_MAX: Final = 600.0  # whatever deadline the caller sets, or none
OPTIONS: Final = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # two replicas on one port must fail, not share it
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_log = logging.getLogger(__name__)


Recorder = Callable[[Generation, Completion, int], None]
"""Told of each completion of the live lane, and when its request came (ms): returns at once, and
never raises."""


async def run(
    config: InferenceConfig,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    *,
    record: Recorder | None = None,
    clock: Clock | None = None,
) -> None:
    """Serves until `stop` is set; then lets requests in flight end for `config.stop_ms_max`. `ready` gets the
    address once the port is open. Raises InferenceError when it can't listen, PolicyError for a damaged seed,
    and whatever the engine died of."""
    torch.set_num_threads(config.threads)
    invariant.warm_up()
    model, seed, _ = checkpoint.load_seed()
    async with Replica(model, config) as replica:
        serving = health.aio.HealthServicer()
        service = _Service(replica, serving, record, clock or SystemClock())
        server = grpc.aio.server(options=OPTIONS)
        add_InferenceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(serving, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await service.tell_health()
        if config.serve_seed:
            root = checkpoint.weights_root(seed)
            await replica.install(ServedWeights(version=0, root=root, tensors=seed))
            await service.tell_health()
        address = _listen(server, config.address)
        await server.start()
        log.event(_log, "serving", address=address, replica=config.replica, slots=config.slots)
        ready(address)
        try:
            await _until(stop, replica)
        finally:
            await serving.enter_graceful_shutdown()
            await server.stop(config.stop_ms_max / 1000)
            log.event(_log, "stopped", replica=config.replica)


def _listen(server: grpc.aio.Server, address: str) -> str:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise InferenceError(
            f"inference.address: expected an address to listen on, got {address!r}"
        ) from error
    return f"{address.rpartition(':')[0]}:{port}"


async def _until(stop: asyncio.Event, replica: Replica) -> None:
    """Returns when `stop` is set; raises what the engine died of."""
    assert replica.failed is not None
    stopping = asyncio.ensure_future(stop.wait())
    either: set[asyncio.Future[Any]] = {stopping, replica.failed}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    if replica.failed.done():
        replica.failed.result()


class _Service(InferenceServicer):
    """The service's calls, as thin as they can be: a message in, the replica's answer out."""

    def __init__(
        self, replica: Replica, serving: health.aio.HealthServicer, record: Recorder | None, clock: Clock
    ) -> None:
        self._replica = replica
        self._serving = serving
        self._record = record
        self._clock = clock

    async def tell_health(self) -> None:
        """SERVING as soon as there are weights to serve."""
        has_weights = bool(self._replica.status().hosted)
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if has_weights
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", SERVICE):
            await self._serving.set(name, status)

    async def Generate(  # named by the .proto, as the others
        self,
        request: pb.GenerateRequest,
        context: "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateEvent]",
    ) -> None:
        left_s = context.time_remaining()
        arrived_ms = self._clock.now_ms()
        try:
            asked = request_of(request)
            record = self._record if asked.lane == "live" else None
            stream = self._replica.stream(
                asked, timeout_s=REQUEST_S_MAX if left_s is None else min(left_s, REQUEST_S_MAX)
            )
            # A cancelled call, or one past its deadline, is cancelled here: closing the stream frees its
            # slots.
            async with aclosing(stream):
                async for progress in stream:
                    if record is not None and progress.completion is not None:
                        record(asked, progress.completion, arrived_ms)
                    await context.write(event_message(progress))
        except HeadraceError as error:
            await context.abort(_code_of(error), str(error))

    async def LoadWeights(
        self,
        request: pb.LoadWeightsRequest,
        context: "grpc.aio.ServicerContext[pb.LoadWeightsRequest, pb.LoadWeightsReply]",
    ) -> pb.LoadWeightsReply:
        loaded = await self._replica.load(
            version=request.version, path=Path(request.path), root=request.root, hold=request.hold
        )
        await self.tell_health()
        log.event(
            _log,
            "weights",
            version=request.version,
            serving=loaded.serving,
            root=request.root[:12],
            pause_ms=loaded.pause_ms,
            detail=loaded.detail,
        )
        return pb.LoadWeightsReply(
            serving=loaded.serving,
            version=loaded.version,
            root=loaded.root,
            pause_ms=loaded.pause_ms,
            detail=loaded.detail,
            unfit=loaded.unfit,
        )

    async def SetRelease(
        self,
        request: pb.SetReleaseRequest,
        context: "grpc.aio.ServicerContext[pb.SetReleaseRequest, pb.SetReleaseReply]",
    ) -> pb.SetReleaseReply:
        stable = request.stable if request.HasField("stable") else None
        canary = request.canary if request.HasField("canary") else None
        try:
            await self._replica.release(request.run, stable=stable, canary=canary, share=request.share)
        except InferenceError as error:
            return pb.SetReleaseReply(set=False, detail=str(error))
        log.event(_log, "release", stable=stable, canary=canary, share=request.share)
        return pb.SetReleaseReply(set=True)

    async def Status(
        self, request: pb.StatusRequest, context: "grpc.aio.ServicerContext[pb.StatusRequest, pb.StatusReply]"
    ) -> pb.StatusReply:
        return status_message(self._replica.status())


def _code_of(error: HeadraceError) -> grpc.StatusCode:
    if isinstance(error, Overloaded):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, InferenceUnavailable):
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode.INVALID_ARGUMENT if isinstance(error, InferenceError) else grpc.StatusCode.INTERNAL

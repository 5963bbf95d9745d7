"""One replica over gRPC: streaming, health, weights, deadlines, cancel, overload, stop, restart."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tiny_model import CONFIG, TINY, complete, generation, numbers, tiny_engine, tiny_weights

from headrace.errors import InferenceError, InferenceUnavailable, Overloaded
from headrace.inference import engine, server
from headrace.inference.config import InferenceConfig
from headrace.policy import checkpoint
from headrace.rpc.client import InferenceClient
from headrace.rpc.generation import Completion, Generation, Progress

WAIT_S = 60.0


def staged(folder: Path, version: int, seed: int) -> dict[str, Any]:
    """A staged file, as arguments of `load_weights`."""
    path = folder / f"{version}-{seed}.safetensors"
    root = checkpoint.save(path, tiny_weights(seed))
    return {"version": version, "path": str(path), "root": root, "timeout_s": WAIT_S}


def truncated(path: Path) -> Path:
    cut = path.with_name("cut.safetensors")
    cut.write_bytes(path.read_bytes()[:-10])
    return cut


def sparse(folder: Path, size: int) -> Path:
    path = folder / "sparse.safetensors"
    with path.open("wb") as file:
        file.truncate(size)
    return path


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch,
    *,
    serve_seed: bool = True,
    address: str = "127.0.0.1:0",
    **changes: object,
) -> AsyncIterator[tuple[InferenceClient, asyncio.Event, "asyncio.Task[None]"]]:
    """A server of the tiny model in this process, and a client of it."""
    monkeypatch.setattr(checkpoint, "load_seed", lambda: (TINY, tiny_weights(1), None))
    config: InferenceConfig = msgspec.structs.replace(
        CONFIG, address=address, serve_seed=serve_seed, **changes
    )
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(server.run(config, stop, ready.set_result))
    either: set[asyncio.Future[Any]] = {task, ready}
    await asyncio.wait(either, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        async with InferenceClient(ready.result()) as client:
            yield client, stop, task
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=WAIT_S)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for the condition, asking it again and again, for at most `WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # no event tells of a state on the other side of the wire


async def idle(client: InferenceClient) -> bool:
    status = await client.status(timeout_s=WAIT_S)
    return (status.slots_used, status.queued_rollout, status.queued_live) == (0, 0, 0)


async def busy(client: InferenceClient) -> bool:
    return not await idle(client)


async def once(client: InferenceClient, request: Generation) -> Completion:
    """Asks for one completion without a second try: `generate` goes on after a refusal."""
    async with aclosing(client.stream(request, timeout_s=WAIT_S)) as stream:
        [done] = [progress.completion async for progress in stream if progress.completion is not None]
    return done


async def health_of(client: InferenceClient) -> str:
    async with grpc.aio.insecure_channel(client.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=server.SERVICE)
        )
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def slow_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Holds the engine before each step until the returned function is called."""
    gate = threading.Event()
    step = engine.Engine.step

    def held(self: engine.Engine) -> bool:
        if self.status().slots_used or self.status().queued_rollout:
            gate.wait(WAIT_S)
        return step(self)

    monkeypatch.setattr(engine.Engine, "step", held)
    return gate.set


def test_the_wire_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve requests at once over gRPC give what the engine gives alone: tokens, log-probs, routes,
    spans."""
    requests = [generation(f"g{i}", members=3, temperature=0.7, prefix=40 + i) for i in range(12)]
    expected = [complete(tiny_engine(), request)[0] for request in requests]

    async def scenario() -> None:
        async with running(monkeypatch) as (client, _, _):
            found = await asyncio.gather(*(client.generate(r, timeout_s=WAIT_S) for r in requests))
            for completions, by_member in zip(found, expected, strict=True):
                assert [numbers(c) for c in completions] == [numbers(by_member[m]) for m in range(3)]
                assert completions[0].spans[0].weights_version == 0

    asyncio.run(scenario())


def test_health_follows_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not serving, and an honest error, until weights are there; then serving."""

    async def scenario() -> None:
        async with running(monkeypatch, serve_seed=False) as (client, _, _):
            assert await health_of(client) == "NOT_SERVING"
            with pytest.raises(InferenceUnavailable, match="expected weights to serve, got none yet"):
                await anext(client.stream(generation(), timeout_s=WAIT_S))
            waiting = asyncio.ensure_future(client.generate(generation(), timeout_s=WAIT_S))
            loaded = await client.load_weights(**staged(tmp_path, version=4, seed=2))
            assert (loaded.serving, loaded.version) == (True, 4)
            assert await health_of(client) == "SERVING"
            assert (await waiting)[0].weights_version == 4

    asyncio.run(scenario())


def test_wrong_weights_are_refused_and_the_old_serve_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another root, a cut file, no file, no regular or too large a file, another model: each refused by name,
    version 0 serves on, same tokens."""

    async def scenario() -> None:
        async with running(monkeypatch) as (client, _, _):
            before = (await client.generate(generation(), timeout_s=WAIT_S))[0]
            good = staged(tmp_path, version=1, seed=2)
            cut = truncated(Path(good["path"]))
            other = tmp_path / "other.safetensors"
            other_root = checkpoint.save(other, {"embed": tiny_weights(1)["embed"]})
            for change, message in (
                ({"root": "0" * 64}, "expected root 0000"),
                ({"path": str(cut)}, "expected safetensors"),
                ({"path": str(tmp_path / "absent")}, "expected weights"),
                ({"path": "/dev/null"}, "expected a regular file"),
                ({"path": str(sparse(tmp_path, 64 << 20))}, "expected a regular file of at most"),
                ({"path": "a\0b"}, "expected weights"),
                ({"path": str(other), "root": other_root}, "expected shape"),
            ):
                refused = await client.load_weights(**(good | change))
                assert not refused.serving and refused.version == 0, refused
                assert message in refused.detail
            assert numbers((await client.generate(generation(), timeout_s=WAIT_S))[0]) == numbers(before)

    asyncio.run(scenario())


def test_reload_under_the_same_version_serves_the_new_root(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Version 1 loaded twice with different tensors: the second root is served, and its numbers."""
    expected = complete(tiny_engine(seed=3), generation())[0][0]

    async def scenario() -> None:
        async with running(monkeypatch) as (client, _, _):
            await client.load_weights(**staged(tmp_path, version=1, seed=2))
            await client.generate(generation(), timeout_s=WAIT_S)
            second = staged(tmp_path, version=1, seed=3)
            assert (await client.load_weights(**second)).root == second["root"]
            assert (await client.load_weights(**second)).pause_ms == 0.0
            assert (await client.status()).root == second["root"]
            found = (await client.generate(generation(), timeout_s=WAIT_S))[0]
            assert numbers(found) == numbers(expected)

    asyncio.run(scenario())


def test_swap_under_load_over_the_wire(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A load in mid-generation: the stream goes on, and its spans name both versions without a gap."""

    async def scenario() -> None:
        async with running(monkeypatch) as (client, _, _):
            request = generation(tokens_max=90, stream_tokens=True, prefix=20)
            staged_load = staged(tmp_path, version=1, seed=2)
            load: asyncio.Future[Any] | None = None
            pieces: list[Progress] = []
            async for progress in client.stream(request, timeout_s=WAIT_S):
                pieces.append(progress)
                load = load or asyncio.ensure_future(client.load_weights(**staged_load))
            assert load is not None and (await load).serving
            done = pieces[-1].completion
            assert done is not None
            assert [s.weights_version for s in done.spans] in ([0, 1], [0])
            assert [s.start for s in done.spans[1:]] == [s.end for s in done.spans[:-1]]
            assert done.spans[-1].end == 90
            assert sum((piece.tokens for piece in pieces), ()) == done.tokens

    asyncio.run(scenario())


def test_a_request_waits_for_the_version_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is generated under older weights than asked for, no slot is held meanwhile, and the deadline
    says what is missing."""

    async def scenario() -> None:
        async with running(monkeypatch, queue_max=1) as (client, _, _):
            request = generation(tokens_max=8, version_min=1)
            # whichever comes first waits in the only place, and so the other is refused
            both = [asyncio.create_task(once(client, request)) for _ in range(2)]
            [refused], [waiting] = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(Overloaded, match="1 of 1 waiting"):
                refused.result()
            await client.generate(generation(tokens_max=8), timeout_s=WAIT_S)
            assert not waiting.done() and await idle(client)
            assert (await client.load_weights(**staged(tmp_path, version=1, seed=2))).serving
            assert [span.weights_version for span in (await waiting).spans] == [1]
            assert (await client.generate(request, timeout_s=WAIT_S))[0].weights_version == 1
            later = msgspec.structs.replace(request, version_min=2)
            # the client and the replica share the deadline: either may be the one to say that it is over
            over = "expected weights 2 or newer, got 1|expected an answer within the deadline, got none"
            with pytest.raises(InferenceUnavailable, match=over):
                await client.generate(later, timeout_s=0.2)

    asyncio.run(scenario())


def test_deadline_and_cancel_free_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call past its deadline, one cancelled and one whose reader left: nothing runs or waits after them."""
    release = slow_steps(monkeypatch)

    async def scenario() -> None:
        async with running(monkeypatch) as (client, _, _):
            request = generation(members=20, tokens_max=80)
            with pytest.raises(InferenceUnavailable, match="deadline"):
                await client.generate(request, timeout_s=0.1)
            gone = asyncio.ensure_future(client.generate(request, timeout_s=WAIT_S))
            await until(lambda: busy(client))
            gone.cancel()
            release()
            await until(lambda: idle(client))
            streamed = msgspec.structs.replace(request, stream_tokens=True)
            async with aclosing(client.stream(streamed, timeout_s=WAIT_S)) as stream:
                assert (await anext(stream)).tokens
            await until(lambda: idle(client))
            assert (await client.status()).tokens_generated < 20 * 80

    asyncio.run(scenario())


def test_overload_is_said_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue answers RESOURCE_EXHAUSTED; the client waits and is served once there is room."""
    release = slow_steps(monkeypatch)

    async def scenario() -> None:
        async with running(monkeypatch, queue_max=16) as (client, _, _):
            first = asyncio.ensure_future(client.generate(generation(members=16), timeout_s=WAIT_S))
            await until(lambda: busy(client))
            with pytest.raises(Overloaded, match="rollout queue, got 16 of 16 waiting"):
                await anext(client.stream(generation("h", members=4), timeout_s=WAIT_S))
            patient = asyncio.ensure_future(client.generate(generation("h", members=4), timeout_s=WAIT_S))
            release()
            assert len(await patient) == 4
            assert len(await first) == 16

    asyncio.run(scenario())


def test_bad_requests_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request out of range is an InferenceError at once, never retried, with the field."""

    async def scenario() -> None:
        async with running(monkeypatch) as (client, _, _):
            for request, message in (
                (generation(tokens_max=0), "tokens_max: expected 1 or more, got 0"),
                (generation(prefix=500), "expected room for a token"),
                (generation(prefix_tokens=(64,)), r"prefix_tokens\[0\]"),
                (generation(prefix_tokens=(-1,)), "expected unsigned numbers"),
                (generation(sequences=()), "at least one sequence"),
            ):
                with pytest.raises(InferenceError, match=message) as caught:
                    await client.generate(request, timeout_s=WAIT_S)
                assert not caught.value.retriable
            async with grpc.aio.insecure_channel(client.address) as channel:
                method: Any = channel.unary_stream(f"/{server.SERVICE}/Generate")
                call = method(b"\x22\x03abc")
                with pytest.raises(grpc.aio.AioRpcError, match="expected u32 numbers, got 3 bytes"):
                    await call.read()

    asyncio.run(scenario())


def test_reflection_lists_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generic client finds the service by asking."""

    async def scenario() -> None:
        async with (
            running(monkeypatch) as (client, _, _),
            grpc.aio.insecure_channel(client.address) as channel,
        ):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            async for reply in stub.ServerReflectionInfo(iter([asked])):
                names = [service.name for service in reply.list_services_response.service]
                assert server.SERVICE in names
                break

    asyncio.run(scenario())


def test_stop_lets_requests_end_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the order to stop, what is in flight ends, what is new is refused, and the server is gone."""
    release = slow_steps(monkeypatch)

    async def scenario() -> None:
        async with running(monkeypatch, stop_ms_max=60_000) as (client, stop, task):
            flying = asyncio.ensure_future(client.generate(generation(), timeout_s=WAIT_S))
            await until(lambda: busy(client))
            stop.set()
            release()
            assert (await flying)[0].finish == "length"
            await asyncio.wait_for(task, WAIT_S)
            with pytest.raises(InferenceUnavailable):
                await client.status()

    asyncio.run(scenario())


def test_a_request_that_outlives_the_bound_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engine held, a stop of 50 ms ends the call as unavailable, and the server stops."""
    release = slow_steps(monkeypatch)

    async def scenario() -> None:
        async with running(monkeypatch, stop_ms_max=50) as (client, stop, task):
            flying = asyncio.ensure_future(client.generate(generation(), timeout_s=2.0))
            await until(lambda: busy(client))
            stop.set()
            with pytest.raises(InferenceUnavailable):
                await flying
            release()
            await asyncio.wait_for(task, WAIT_S)

    asyncio.run(scenario())


def test_a_dead_engine_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken invariant in the engine's thread fails the request honestly and comes out of `run`."""

    def broken(self: engine.Engine, *rest: object) -> None:
        raise AssertionError("slot 3 is free twice")

    async def scenario() -> None:
        async with running(monkeypatch) as (client, _, task):
            monkeypatch.setattr(engine.Engine, "_forward", broken)
            with pytest.raises(InferenceUnavailable, match="the engine died: slot 3 is free twice"):
                await anext(client.stream(generation(), timeout_s=WAIT_S))
            with pytest.raises(AssertionError, match="slot 3 is free twice"):
                await asyncio.wait_for(task, WAIT_S)

    asyncio.run(scenario())


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas on one port: the second says so instead of sharing it."""

    async def scenario() -> None:
        async with running(monkeypatch) as (client, _, _):
            with pytest.raises(
                InferenceError, match=f"expected an address to listen on, got '{client.address}'"
            ):
                async with running(monkeypatch, address=client.address):
                    pass

    asyncio.run(scenario())


PROCESS = """
import asyncio, sys
from headrace.inference import server
from headrace.inference.config import InferenceConfig
config = InferenceConfig(address=sys.argv[1], serve_seed=True)
asyncio.run(server.run(config, asyncio.Event(), lambda address: print(address, flush=True)))
"""


def test_killed_and_restarted(tmp_path: Path) -> None:
    """SIGKILL while a group of the shipped model is generated; a new process on the same port finishes the
    same request, and says what the first would have said."""
    request = generation(
        prefix_tokens=tuple(range(5, 120)), members=8, tokens_max=150, temperature=1.0, seed=3
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(address: str) -> tuple["subprocess.Popen[str]", str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, address], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    async def scenario() -> None:
        process, address = await asyncio.to_thread(start, "127.0.0.1:0")
        try:
            async with InferenceClient(address) as client:
                expected = await client.generate(request, timeout_s=WAIT_S)
                again = asyncio.ensure_future(client.generate(request, timeout_s=2 * WAIT_S))
                await until(lambda: busy(client))
                process.send_signal(signal.SIGKILL)
                _close(process)
                process, same = await asyncio.to_thread(start, address)
                assert same == address
                assert [numbers(c) for c in await again] == [numbers(c) for c in expected]
        finally:
            process.kill()
            _close(process)

    asyncio.run(scenario())


def _close(process: "subprocess.Popen[str]") -> None:
    process.wait(WAIT_S)
    if process.stdout is not None:
        process.stdout.close()

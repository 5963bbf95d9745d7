"""Events per second of the experience join: the processor alone, the bus host on both buses, and the Faust
host against a bare Faust agent with a table on the same broker.

The events are those of the demo's size: groups of 8, two turns, two reward components, steps of 200 + 16 and
30 + 16 tokens with routes. Each host starts in its own process on a log that already holds the events; its
clock runs from the first commit that is seen to the last, so that starting is not measured. Without Java or
`HEADRACE_KAFKA` the Kafka rows are left out.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.bare_faust import ID as BARE_ID
from benchmarks.page import header, table
from headrace.bus import local_kafka, open_bus
from headrace.bus.protocol import Bus, Message
from headrace.store.blobs import Blobs
from headrace.streams.experience import ExperienceJoin
from headrace.streams.fold import Fold
from headrace.streams.processor import Event
from headrace.streams.run import StreamConfig, run
from headrace.wire.codec import encode
from headrace.wire.packed import pack_f32, pack_u32
from headrace.wire.records import Prompt, Record, Reward, RolloutStep, Sampling, Span
from headrace.wire.topics import PROMPTS, REWARDS, ROLLOUT_STEPS, TOPICS

MEMBERS, TURNS, COMPONENTS = 8, 2, ("tests", "format")
EVENTS_A_GROUP = 1 + MEMBERS * (TURNS + len(COMPONENTS))
INPUTS = [PROMPTS.name, ROLLOUT_STEPS.name, REWARDS.name]
BATCH = 500
WAIT_S = 120.0


class Rate(msgspec.Struct, frozen=True):
    """Events, and the seconds they took on the wall and of the process's CPU."""

    events: int
    wall_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.events / self.wall_s

    @property
    def per_core_s(self) -> float:
        return self.events / self.cpu_s


_PROMPT = Prompt(
    run="benchmark",
    group_id="",
    env="holes",
    task_id="a task",
    seed=0,
    group_size=MEMBERS,
    sampling=Sampling(),
    components=dict.fromkeys(COMPONENTS, 1.0),
    weights_version=0,
    admitted_ms=0,
    deadline_ms=1 << 50,
)
_REWARD = Reward(
    run="benchmark",
    group_id="",
    member=0,
    attempt=1,
    component="",
    evidence="3 of 4 examples",
    grader="doctest/1",
)


def _step(turn: int) -> RolloutStep:
    rng = random.Random(turn)
    tokens_in, tokens_out = (30 if turn else 200), 16
    shape = (tokens_in + tokens_out - (turn == 0), 4, 2)
    return RolloutStep(
        run="benchmark",
        group_id="",
        member=0,
        attempt=1,
        step=turn,
        last=turn == TURNS - 1,
        source="sim",
        base_length=216 * turn,
        prefix_length=200,
        tokens_in=pack_u32(rng.randrange(2048) for _ in range(tokens_in)),
        tokens_out=pack_u32(rng.randrange(2048) for _ in range(tokens_out)),
        logp=pack_f32(-rng.random() for _ in range(tokens_out)),
        loss_mask=b"\1" * tokens_out,
        spans=(Span(start=0, end=tokens_out, weights_version=0),),
        weights_version=0,
        routes=bytes(rng.randrange(8) for _ in range(prod(shape))),
        routes_shape=shape,
        tool_result="3 of 4 examples pass",
        finish="stop",
        temperature=1.0,
        started_ms=0,
        ended_ms=1,
        worker="w1",
    )


STEPS = [_step(turn) for turn in range(TURNS)]


def group(name: str) -> list[Record]:
    """The records of one group, in the order they would come."""
    records: list[Record] = [replace(_PROMPT, group_id=name)]
    for step in STEPS:
        records += [replace(step, group_id=name, member=member) for member in range(MEMBERS)]
    for component in COMPONENTS:
        records += [
            replace(_REWARD, group_id=name, member=member, component=component, value=float(member % 2))
            for member in range(MEMBERS)
        ]
    return records


def processor_alone(groups: int) -> Rate:
    """The fold with decoded records, drained as in a host: states encoded, nothing read or sent."""
    records = [record for index in range(groups) for record in group(f"g{index}")]
    events = [Event("t", 0, offset, offset, record) for offset, record in enumerate(records)]
    fold, closed = Fold(ExperienceJoin()), 0
    wall, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(events), BATCH):
        for event in events[start : start + BATCH]:
            fold.apply(event)
        closed += len(fold.drain().outputs)
    rate = Rate(len(events), time.perf_counter() - wall, time.process_time() - cpu)
    assert closed == groups, closed
    return rate


async def filled(bus: Bus, groups: int) -> None:
    """Puts the events on `bus`, groups interleaved by sixteen as workers would."""
    await bus.create_topics(list(TOPICS.values()))
    for start in range(0, groups, 16):
        whole = [group(f"g{index}") for index in range(start, min(start + 16, groups))]
        await bus.produce([_message(record) for same in zip(*whole, strict=True) for record in same])


def _message(record: Record) -> Message:
    topic = {Prompt: PROMPTS, Reward: REWARDS}.get(type(record), ROLLOUT_STEPS)
    value, headers = encode(record, source="benchmark", now_ms=0)
    return Message(topic.name, record.group_id.encode(), value, headers)  # type: ignore[attr-defined]


async def host(
    bus: Bus,
    command: Sequence[str],
    environment: dict[str, str],
    consumer_group: str,
    inputs: Sequence[str] = INPUTS,
) -> Rate:
    """Runs a host's process until it has committed all `inputs`. The time is that between its first commit
    seen and its last."""
    total = sum((await bus.ends(list(inputs))).values())
    environment = {**os.environ, **environment}
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdout=silent, stderr=silent) as process:  # noqa: ASYNC220 - a moment
        try:
            first, done = None, 0
            deadline_s = time.monotonic() + WAIT_S
            while done < total:
                assert process.poll() is None, f"{command}: ended with {process.returncode}"
                assert time.monotonic() < deadline_s, f"{command}: {done} of {total} events in {WAIT_S} s"
                await asyncio.sleep(0.1)
                done = sum((await bus.committed(consumer_group, list(inputs))).values())
                last = (done, time.perf_counter(), _cpu_s(process.pid))
                first = last if first is None and done else first
        finally:
            process.kill()
    assert first is not None and done > first[0], "too few events to measure"
    return Rate(done - first[0], last[1] - first[1], last[2] - first[2])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def embedded(groups: int, directory: Path) -> Rate:
    address = f"sqlite:{directory}/log.db"
    async with open_bus(address) as bus:
        await filled(bus, groups)
        return await host(bus, _join(address, directory), {}, "streams.experience")


async def on_kafka(groups: int, directory: Path, brokers: str) -> dict[str, Rate]:
    """All three read the same events from the same broker, one after the other."""
    address = f"kafka:{brokers}"
    environment = {
        "HEADRACE_BUS__ADDRESS": address,
        "HEADRACE_STORE__URI": f"file://{directory}/blobs",
        "HEADRACE_FAUST__DIRECTORY": f"{directory}/faust",
        "F_DATADIR": f"{directory}/bare",
    }
    faust = [sys.executable, "-m", "faust", "-A"]
    async with open_bus(address) as bus:
        await filled(bus, groups)
        return {
            "bus host on Kafka": await host(bus, _join(address, directory), {}, "streams.experience"),
            "bare Faust agent with a table": await host(
                bus,
                [*faust, "benchmarks.bare_faust", "worker", "-l", "warn", "--without-web"],
                environment,
                BARE_ID,
            ),
            "Faust host": await host(
                bus,
                [*faust, "headrace.streams.app", "worker", "-l", "warn"],
                environment,
                "headrace-streams-experience",
            ),
        }


def _join(address: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.streams", "--join", address, f"file://{directory}/blobs"]


async def join(address: str, blobs: str) -> None:
    async with open_bus(address) as bus:
        await run(bus, StreamConfig(), asyncio.Event(), blobs=Blobs.open(blobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1500)
    parser.add_argument(
        "--join", nargs=2, metavar=("ADDRESS", "BLOBS"), help="be the bus host (used by itself)"
    )
    arguments = parser.parse_args()
    if arguments.join:
        asyncio.run(join(*arguments.join))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        rates = {
            "processor alone": processor_alone(arguments.groups),
            "bus host on the embedded log": asyncio.run(embedded(arguments.groups, directory)),
        }
        given = os.environ.get("HEADRACE_KAFKA")
        lack = "" if given else local_kafka.missing()
        if not lack:
            brokers = given or local_kafka.up(directory / "kafka")
            try:
                rates |= asyncio.run(on_kafka(arguments.groups, directory, brokers))
            finally:
                if not given:
                    local_kafka.down(directory / "kafka")
    print(header("Experience join", "msgspec", "aiokafka", "faust-streaming"))
    print(
        table(
            ("host", "events", "events/s", "events/s of CPU"),
            [(name, rate.events, round(rate.per_s), round(rate.per_core_s)) for name, rate in rates.items()],
        )
    )
    if lack:
        print(f"Kafka rows left out: {lack}")
    else:
        ours, bare = rates["Faust host"], rates["bare Faust agent with a table"]
        wall, cpu = ours.per_s / bare.per_s, ours.per_core_s / bare.per_core_s
        print(f"Faust host / bare Faust agent: {wall:.2f}x, of CPU {cpu:.2f}x")


if __name__ == "__main__":
    main()

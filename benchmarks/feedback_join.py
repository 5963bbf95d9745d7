"""Records a second of the feedback join, memory of an open suggestion, and what a fleet of editors needs.

Of each suggestion come three records: its step (200 + 16 tokens with routes), shown, and accepted, rejected
or ignored. Each host starts in its own process on a log that already holds them, and its clock runs from the
first commit that is seen to the last. On the bus host the limit of a user's weight runs in the same process;
under Faust it would be a worker of its own, and is left out. Memory is that of the resident set, with the
states as they lie between batches. Not here: the gateway (`benchmarks.feedback_gateway`).
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from msgspec.structs import replace

from benchmarks import streams
from benchmarks.page import table
from benchmarks.streams import Rate, host
from headrace.bus import local_kafka, open_bus
from headrace.bus.protocol import Bus, Message
from headrace.store.blobs import Blobs
from headrace.streams.feedback import FeedbackConfig, FeedbackJoin
from headrace.streams.fold import Fold
from headrace.streams.processor import Event
from headrace.streams.run import FeedbackStreamConfig, run_feedback
from headrace.wire.codec import encode
from headrace.wire.records import Feedback, Record
from headrace.wire.topics import FEEDBACK, PARTITIONS, ROLLOUT_STEPS, TOPICS

INPUTS = [ROLLOUT_STEPS.name, FEEDBACK.name]
ENDS = ("accepted", "rejected", "ignored")
BATCH = 500
OPEN = 312_500
"""An eighth of what one of four partitions holds of ten million: dictionaries are as full as there."""
OPEN_ALL = 10_000_000
REQUESTS_A_DAY = 400_000_000
PEAK = 3.0
"""Of the busiest second over the mean: an assumption."""
_SETTLED = FeedbackConfig(settle_ms=0)
_USER = "3f9a1c2e5b7d8f6041526374859607ab"


def suggestion(number: int) -> list[Record]:
    """The records of one suggestion, in the order they would come."""
    name = f"demo-live-{number:022x}"
    user = f"{number % 5000:08x}{_USER[8:]}"
    step = replace(
        streams.STEPS[0],
        group_id=name,
        attempt=0,
        last=True,
        source="live",
        finish="stop",
        user=user,
        cohort="stable",
        text_length=60,
        region="eu-west",
    )
    shown = Feedback(
        event_id=f"{number:031x}s",
        suggestion_id=name,
        kind="shown",
        editor_ms=1_790_000_000_000 + number,
        view_id="v1",
        user=user,
        client="editor/1.2",
        region="eu-west",
    )
    end = replace(shown, event_id=f"{number:031x}e", kind=ENDS[number % 3])
    return [step, shown, end]


def processor_alone(count: int) -> Rate:
    """The fold with decoded records, drained as in a host: states encoded, nothing read or sent."""
    records = [record for number in range(count) for record in suggestion(number)]
    events = [Event("t", 0, offset, offset, record) for offset, record in enumerate(records)]
    fold, closed = Fold(FeedbackJoin(_SETTLED)), 0
    wall, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(events), BATCH):
        for event in events[start : start + BATCH]:
            fold.apply(event)
        while fold.advance(start):
            pass
        closed += len(fold.drain().outputs)
    rate = Rate(len(events), time.perf_counter() - wall, time.process_time() - cpu)
    assert closed > 0.9 * count, closed
    return rate


def open_bytes(count: int) -> float:
    """Resident bytes of one open suggestion that was shown, of `count`."""
    fold, rate = Fold(FeedbackJoin()), count / 720_000
    before = _resident_bytes()
    for number in range(count):
        at_ms = int(number / rate)
        for record in suggestion(number)[:2]:
            fold.apply(Event("t", 0, number, at_ms, record))
        if number % BATCH == 0:
            fold.drain()
    fold.drain()
    assert fold.open == count
    return (_resident_bytes() - before) / count


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def filled(bus: Bus, count: int) -> None:
    """Puts the records on `bus`, suggestions interleaved by 64 as they would be."""
    await bus.create_topics(list(TOPICS.values()))
    for start in range(0, count, 64):
        whole = [suggestion(number) for number in range(start, min(start + 64, count))]
        await bus.produce([_message(record) for same in zip(*whole, strict=True) for record in same])


def _message(record: Record) -> Message:
    heard = isinstance(record, Feedback)
    key: str = record.suggestion_id if isinstance(record, Feedback) else record.group_id  # type: ignore[attr-defined]
    value, headers = encode(record, source="benchmark", now_ms=0)
    return Message((FEEDBACK if heard else ROLLOUT_STEPS).name, key.encode(), value, headers)


async def embedded(count: int, directory: Path) -> Rate:
    address = f"sqlite:{directory}/join.db"
    async with open_bus(address) as bus:
        await filled(bus, count)
        return await host(bus, _join(address, directory), {}, "streams.feedback", INPUTS)


async def on_kafka(count: int, directory: Path, brokers: str) -> dict[str, Rate]:
    """Both hosts read the same records from the same broker, one after the other."""
    address = f"kafka:{brokers}"
    environment = {
        "HEADRACE_BUS__ADDRESS": address,
        "HEADRACE_STORE__URI": f"file://{directory}/blobs",
        "HEADRACE_FAUST__DIRECTORY": f"{directory}/faust-feedback",
        "HEADRACE_FEEDBACK_JOIN__JOIN__SETTLE_MS": "0",
    }
    faust = [sys.executable, "-m", "faust", "-A", "headrace.streams.app:feedback", "worker", "-l", "warn"]
    async with open_bus(address) as bus:
        await filled(bus, count)
        return {
            "bus host on Kafka": await host(bus, _join(address, directory), {}, "streams.feedback", INPUTS),
            "Faust host": await host(bus, faust, environment, "headrace-streams-feedback", INPUTS),
        }


def _join(address: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.feedback_join", "--join", address, f"file://{directory}/blobs"]


async def join(address: str, blobs: str) -> None:
    async with open_bus(address) as bus:
        await run_feedback(bus, FeedbackStreamConfig(join=_SETTLED), asyncio.Event(), blobs=Blobs.open(blobs))


def run(directory: Path, *, suggestions: int = 20_000) -> str:
    """The join's section of the page, as Markdown."""
    rates = {
        "processor alone": processor_alone(suggestions),
        "bus host on the embedded log": asyncio.run(embedded(suggestions, directory)),
    }
    given = os.environ.get("HEADRACE_KAFKA")
    lack = "" if given else local_kafka.missing()
    if not lack:
        brokers = given or local_kafka.up(directory / "kafka-join")
        try:
            rates |= asyncio.run(on_kafka(suggestions, directory, brokers))
        finally:
            if not given:
                local_kafka.down(directory / "kafka-join")
    words = [sys.executable, "-m", "benchmarks.feedback_join", "--open", str(OPEN)]
    each = float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    columns = ("host", "records", "records/s", "records/s of CPU")
    rows = [(name, r.events, round(r.per_s), round(r.per_core_s)) for name, r in rates.items()]
    parts = [
        "## Join\n",
        f"Load of the machine at the end: {load}.\n",
        table(columns, rows),
        f"An open suggestion holds {each:.0f} bytes ({OPEN:,} of them, resident); {OPEN_ALL:,} hold "
        f"{each * OPEN_ALL / 1e9:.2f} GB (bound: 4 GB).\n",
        on_paper(rates.get("bus host on Kafka", rates["bus host on the embedded log"]), each),
    ]
    return "\n".join([*parts, *([f"Kafka rows left out: {lack}\n"] if lack else [])])


def on_paper(rate: Rate, each: float) -> str:
    """What `REQUESTS_A_DAY` need of the join."""
    mean = REQUESTS_A_DAY / 86_400
    window_s = FeedbackConfig().window_ms / 1000
    rows = [
        ("suggestions/s", round(mean), round(PEAK * mean)),
        ("records into the join/s", round(3 * mean), round(3 * PEAK * mean)),
        (
            "cores of the join (bus host, by CPU)",
            3 * mean / rate.per_core_s,
            3 * PEAK * mean / rate.per_core_s,
        ),
        ("open suggestions (window of 12 minutes)", round(mean * window_s), round(PEAK * mean * window_s)),
        ("their memory, GB", mean * window_s * each / 1e9, PEAK * mean * window_s * each / 1e9),
    ]
    head = f"### On paper: {REQUESTS_A_DAY / 1e6:.0f} million suggestions a day\n"
    wall = f"One process takes {rate.per_s:,.0f} records/s here: the peak needs "
    processes = -(-3 * PEAK * mean // rate.per_s)
    note = (
        f"{wall}{processes:.0f} of them, and as many partitions at least (there are {PARTITIONS}; the number "
        "is set when topics are made). Peak: three times the mean, an assumption.\n"
    )
    return "\n".join([head, table(("", "mean", "peak"), rows), note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--join", nargs=2, metavar=("ADDRESS", "BLOBS"), help="be the bus host")
    parser.add_argument("--open", type=int, metavar="COUNT", help="measure the memory of so many")
    arguments = parser.parse_args()
    if arguments.join:
        asyncio.run(join(*arguments.join))
    elif arguments.open:
        print(open_bytes(arguments.open))


if __name__ == "__main__":
    main()

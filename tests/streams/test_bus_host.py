"""The bus host on the embedded log: scenarios, and faults of every kind; each group still goes out exactly
once."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stream_faults import ended, join_command, killed_in_mid_work, log, process, zombie_wakes_up
from stream_play import closed, everything, far_ms, messages, play, probe, state_partition, until
from stream_process import Delegate
from stream_records import prompt, reward, rollout, step

from headrace.bus import open_bus
from headrace.bus.protocol import Bus, Delivery, Message, TopicPartition, partition_of
from headrace.errors import BusUnavailable, ConfigError, OffsetGone, TopicMismatch
from headrace.store.blobs import Blobs
from headrace.store.claims import check_out
from headrace.streams.experience import ExperienceJoin
from headrace.streams.hosts.bus import HostConfig
from headrace.streams.run import StreamConfig, owned, run
from headrace.wire.codec import decode
from headrace.wire.records import DeadLetter
from headrace.wire.topics import DEAD_LETTERS, EXPERIENCE_STATE, PARTITIONS, PROMPTS, ROLLOUT_STEPS

pytestmark = pytest.mark.timeout(400)


@asynccontextmanager
async def joining(bus: Any, tmp_path: Path, **host: Any) -> AsyncIterator[asyncio.Task[None]]:
    """A join in this process; its fault, if it has one, is raised at the end."""
    stop = asyncio.Event()
    config = StreamConfig(host=HostConfig(clock_skew_ms=0, **host))
    task = asyncio.create_task(run(bus, config, stop, blobs=Blobs.open(f"file://{tmp_path}/blobs")))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(60):
            await task


def test_scenarios_on_sqlite(tmp_path: Path) -> None:
    """Every scenario closes on the embedded log as it does in the processor alone."""

    async def main() -> None:
        async with log(f"sqlite:{tmp_path}/log.db") as bus, joining(bus, tmp_path):
            await play(bus, "sqlite")

    asyncio.run(main())


def test_states_survive_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A host that stops in mid-work is followed by one that finishes the groups, and reads nothing twice."""

    async def main() -> None:
        async with log("sqlite::memory:") as bus:
            groups = [f"g{index}" for index in range(20)]
            async with joining(bus, tmp_path):
                for group in groups:
                    await bus.produce(
                        messages([prompt(group, deadline_ms=far_ms()), *rollout(group, 0), step(group, 1, 0)])
                    )
                await probe(bus, "probe")
            caplog.set_level(logging.INFO)
            async with joining(bus, tmp_path):
                for group in groups:
                    await bus.produce(messages(rollout(group, 1)))
                found = await closed(bus, groups)
            assert (
                f" in={20 * 4}" in [r.message for r in caplog.records if r.message.startswith("counts")][-1]
            )
            assert all([e.closed for e in found[group]] == ["complete"] for group in groups)

    asyncio.run(main())


def test_a_host_that_lingers_reads_nothing_meanwhile(tmp_path: Path) -> None:
    """After its transaction it waits for a minute: what comes then stays unread, a stop ends the wait, and
    the next host goes on with all of it."""

    async def main() -> None:
        async with log("sqlite::memory:") as bus:
            async with joining(bus, tmp_path, linger_ms=60_000):
                await bus.produce(messages([prompt("g", size=1, deadline_ms=far_ms())]))
                read: dict[TopicPartition, int] = {}
                for _ in range(2_000):
                    if read := await bus.committed("streams.experience", [PROMPTS.name]):
                        break
                    await asyncio.sleep(0.01)
                await bus.produce(messages(rollout("g", 0)))
                await asyncio.sleep(0.1)
            assert sum(read.values()) == 1
            assert sum((await bus.committed("streams.experience", [ROLLOUT_STEPS.name])).values()) == 0
            async with joining(bus, tmp_path):
                assert [e.closed for e in (await closed(bus, ["g"]))["g"]] == ["complete"]

    asyncio.run(main())


def test_bad_records_are_dead_lettered(tmp_path: Path) -> None:
    """Undecodable bytes, an unknown type, a bomb, a wrong key and nonsense go to dead.letters with their
    place; the group around them closes."""

    async def main() -> None:
        async with log("sqlite::memory:") as bus, joining(bus, tmp_path):
            good = messages([prompt("g", size=1, deadline_ms=far_ms()), *rollout("g", 0)])
            step_message = good[1]
            bad = [
                replace(uncompressed(step_message), value=b"\xc1 not msgpack"),
                replace(step_message, headers=(("ce_type", b"headrace.Nothing.v9"),)),
                replace(uncompressed(step_message), value=b"\x91" * 100_000),
                replace(step_message, value=None),
                replace(step_message, key=b"another"),
                *messages([reward("g", 0, "tests", 7.0)]),
            ]
            offsets = await bus.produce([*good[:2], *bad])
            await bus.produce(good[2:])
            found = await closed(bus, ["g"])
            assert [e.closed for e in found["g"]] == ["complete"]
            letters = [
                decode(d.topic, d.value or b"", d.headers) for d in await everything(bus, DEAD_LETTERS.name)
            ]
            places = {(m.topic, o) for m, o in zip(bad, offsets[2:], strict=True)}
            assert {(w.topic, w.offset) for w in letters if isinstance(w, DeadLetter)} == places
            assert len(letters) == len(bad)

    asyncio.run(main())


def uncompressed(message: Message) -> Message:
    headers = tuple(header for header in message.headers if header[0] != "content-encoding")
    return replace(message, headers=headers)


def test_large_experience_goes_by_claim(tmp_path: Path) -> None:
    """A group over 900 kB travels as a claim check and comes back whole, also when it arrives over a
    restart."""

    async def main() -> None:
        steps = []
        for index in range(4):
            noise = random.Random(index).randbytes(400_000)
            base = step("big", 0, index, last=index == 3, tokens=100_000)
            steps.append(msgspec.structs.replace(base, logp=noise))
        async with log("sqlite::memory:") as bus:
            async with joining(bus, tmp_path):
                await bus.produce(messages([prompt("big", size=1, deadline_ms=far_ms()), *steps[:3]]))
                await probe(bus, "probe")
            async with joining(bus, tmp_path):
                await bus.produce(messages([steps[3], *rollout("big", 0)[2:]]))
                (found,) = (await closed(bus, ["big"]))["big"]
        assert found.rollouts == () and found.claim is not None and found.claim.bytes > 1_000_000
        whole = await check_out(found, Blobs.open(f"file://{tmp_path}/blobs"))
        assert whole.rollouts[0].steps == tuple(steps) and whole.rollouts[0].reward == 1.5

    asyncio.run(main())


class LosesAnswers(Delegate):
    """Every third commit is made, and then reported as unknown."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.calls = 0

    @asynccontextmanager
    async def transactor(self, transactional_id: str) -> AsyncIterator[Any]:
        async with self._bus.transactor(transactional_id) as inner:
            outer = self

            class Transactor:
                async def commit(self, sent: Any, **kwargs: Any) -> list[int]:
                    offsets = await inner.commit(sent, **kwargs)
                    outer.calls += 1
                    if outer.calls % 3 == 0:
                        raise BusUnavailable("test: the answer is lost")
                    return offsets

            yield Transactor()


def test_unknown_outcome_of_a_commit(tmp_path: Path) -> None:
    """When the answer of a commit is lost, the host looks at the log again and doubles nothing."""

    async def main() -> None:
        async with log("sqlite::memory:") as bus:
            flaky = LosesAnswers(bus)
            async with joining(flaky, tmp_path, records_max=5):
                groups = [f"g{index}" for index in range(30)]
                for group in groups:
                    await bus.produce(
                        messages([prompt(group, size=1, deadline_ms=far_ms()), *rollout(group, 0)])
                    )
                found = await closed(bus, groups)
            assert flaky.calls > 10
            assert [len(found[group]) for group in groups] == [1] * 30

    asyncio.run(main())


def test_bug_in_the_processor_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody foresaw, on the fifth of seven groups, ends the host with nothing committed
    past it; started again without the bug, the fifth comes again and the others are not lost."""
    handle, groups = ExperienceJoin.handle, [f"g{index}" for index in range(7)]

    def buggy(self: ExperienceJoin, key: str, *rest: Any) -> Any:
        if key == groups[4]:
            raise ZeroDivisionError
        return handle(self, key, *rest)

    async def main() -> None:
        async with log("sqlite::memory:") as bus:
            sent = [
                replace(message, partition=0)
                for group in groups
                for message in messages([prompt(group, size=1, deadline_ms=far_ms()), *rollout(group, 0)])
            ]
            await bus.produce(sent)
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(ExperienceJoin, "handle", buggy)
                async with joining(bus, tmp_path, records_max=1) as task:
                    await asyncio.wait([task], timeout=60)
            async with joining(bus, tmp_path):
                found = await closed(bus, groups)
            assert [len(found[group]) for group in groups] == [1] * 7

    asyncio.run(main())


def test_bus_gone_for_too_long(tmp_path: Path) -> None:
    """Without a bus the host tries again until `unavailable_ms`, then ends with what it last met."""

    class Gone(Delegate):
        async def committed(self, *args: Any) -> Any:
            raise BusUnavailable("test: nobody there")

    async def main() -> None:
        async with log("sqlite::memory:") as bus:
            with pytest.raises(BusUnavailable, match="nobody there"):
                async with joining(Gone(bus), tmp_path, unavailable_ms=300) as task:
                    await asyncio.wait([task], timeout=60)
                    assert task.done()

    asyncio.run(main())


def test_kill_9_in_mid_work(tmp_path: Path) -> None:
    """Killed again and again while records come, the joins together send every group exactly once."""
    address = f"sqlite:{tmp_path}/log.db"

    async def main() -> None:
        async with log(address) as bus:
            await killed_in_mid_work(
                bus, join_command(address, tmp_path), tmp_path, "kill", groups=60, kills=3
            )

    asyncio.run(main())


def test_zombie_is_fenced(tmp_path: Path) -> None:
    """A join that hangs between its read and its commit, while another takes over, is fenced when it wakes
    up, says so, and has doubled nothing."""
    address = f"sqlite:{tmp_path}/log.db"

    async def main() -> None:
        async with log(address) as bus:
            await zombie_wakes_up(bus, address, tmp_path, "zombie")

    asyncio.run(main())


class Trimmed(Delegate):
    """The state topic has lost its oldest `gone` records; once, this is found out while they are read."""

    def __init__(self, bus: Bus, gone: int, *, surprise: bool) -> None:
        super().__init__(bus)
        self.gone = gone
        self.surprise = surprise

    async def begins(self, topics: list[str]) -> dict[TopicPartition, int]:
        begins = await self._bus.begins(topics)
        cut = 0 if self.surprise else self.gone
        return {tp: begin + (cut if tp.topic == EXPERIENCE_STATE.name else 0) for tp, begin in begins.items()}

    async def read_range(self, tp: TopicPartition, start: int, end: int) -> AsyncIterator[Delivery]:
        if self.surprise:
            self.surprise = False
            raise OffsetGone(f"{tp}: expected {start}, oldest is {start + self.gone}")
        async for delivery in self._bus.read_range(tp, start, end):
            yield delivery


@pytest.mark.parametrize("surprise", [False, True], ids=["before", "while it is read"])
def test_state_trimmed(tmp_path: Path, surprise: bool) -> None:
    """A state topic without its oldest records is read from where it begins, also when that moves under the
    reader."""

    async def main() -> None:
        async with log("sqlite::memory:") as bus:
            async with joining(bus, tmp_path):
                await bus.produce(messages([prompt("old", size=1, deadline_ms=far_ms()), *rollout("old", 0)]))
                await closed(bus, ["old"])
                await bus.produce(messages([prompt("g", size=1, deadline_ms=far_ms()), step("g", 0, 0)]))
                await probe(bus, "probe")
            states = await everything(bus, EXPERIENCE_STATE.name)
            last = max(d.offset for d in states if d.key == b"g")
            begin = (await bus.begins([EXPERIENCE_STATE.name]))[state_partition("g")]
            trimmed = Trimmed(bus, last - begin, surprise=surprise)
            async with joining(trimmed, tmp_path):
                await bus.produce(messages(rollout("g", 0)))
                found = await closed(bus, ["g"])
            assert [e.closed for e in found["g"]] == ["complete"]

    asyncio.run(main())


def test_state_that_never_ends_to_be_read(tmp_path: Path) -> None:
    """When the states can't be read back in time, the host says how far it came, and doesn't wait for
    ever."""

    class Slow(Delegate):
        async def read_range(self, tp: TopicPartition, start: int, end: int) -> AsyncIterator[Delivery]:
            await asyncio.Event().wait()
            yield Delivery("", 0, 0, 0, None, None, ())

    async def main() -> None:
        async with log("sqlite::memory:") as bus:
            with pytest.raises(
                BusUnavailable, match=r"streams.experience.state\[\d\]: expected the states up to"
            ):
                async with joining(Slow(bus), tmp_path, recovery_ms=50, unavailable_ms=0) as task:
                    await asyncio.wait([task], timeout=60)

    asyncio.run(main())


@pytest.mark.parametrize("on_gone", ["stop", "resume"])
def test_committed_position_is_gone(tmp_path: Path, on_gone: str) -> None:
    """A committed position outside the log ends the host by default; with `resume` it goes on at the oldest
    record."""

    async def main() -> None:
        async with log("sqlite::memory:") as bus:
            await bus.produce(messages([prompt("g", size=1, deadline_ms=far_ms()), *rollout("g", 0)]))
            partition = partition_of(b"g", PARTITIONS)
            async with bus.transactor("test") as transactor:
                gone = {TopicPartition(ROLLOUT_STEPS.name, partition): 10_000}
                await transactor.commit([], group="streams.experience", positions=gone)
            if on_gone == "stop":
                with pytest.raises(OffsetGone):
                    async with joining(bus, tmp_path) as task:
                        await asyncio.wait([task], timeout=60)
            else:
                async with joining(bus, tmp_path, on_gone="resume"):
                    await closed(bus, ["g"])

    asyncio.run(main())


def test_deadline_waits_for_records_on_the_log(tmp_path: Path) -> None:
    """After a long stop, a group whose records came in time is complete, although its deadline has passed
    meanwhile."""

    async def main() -> None:
        async with log("sqlite::memory:") as bus:
            deadline_ms = time.time_ns() // 1_000_000 + 3_000
            judged = [reward("g", 0, f"judge.{index}", 1.0) for index in range(6)]
            await bus.produce(
                messages([prompt("g", size=1, deadline_ms=deadline_ms), *judged, *rollout("g", 0)])
            )
            await until(past(deadline_ms), "the deadline")
            # On g's partition, steps after the deadline are read long before g's last rewards.
            other = next(
                name for name in map(str, range(99)) if state_partition(name) == state_partition("g")
            )
            await bus.produce(messages([step(other, 0, index) for index in range(3)]))
            async with joining(bus, tmp_path, records_max=1):
                (found,) = (await closed(bus, ["g"]))["g"]
            assert found.closed == "complete"

    asyncio.run(main())


def past(deadline_ms: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return time.time_ns() // 1_000_000 > deadline_ms

    return condition


def test_shares() -> None:
    """The shares of n processes are disjoint and cover all partitions; a bad share is refused."""
    assert [list(owned(f"{i}/3", 4)) for i in (1, 2, 3)] == [[0, 3], [1], [2]]
    for share in ("0/1", "2/1", "1/5", "x", "1"):
        with pytest.raises(ConfigError, match="share: expected i/n"):
            owned(share, 4)


def test_topics_must_exist(tmp_path: Path) -> None:
    """A missing topic, or inputs of unequal partitions, are refused by name."""

    async def main() -> None:
        async with open_bus("sqlite::memory:") as bus:
            await bus.create_topics([PROMPTS])
            with pytest.raises(TopicMismatch, match=r"expected rollout\.steps, rewards"):
                async with joining(bus, tmp_path):
                    pass

    asyncio.run(main())


def test_sigterm_stops_at_once(tmp_path: Path) -> None:
    """A join that waits for records ends with 0 when SIGTERM comes, with its last batch committed."""
    address = f"sqlite:{tmp_path}/log.db"

    async def main() -> None:
        async with log(address) as bus:
            with process(join_command(address, tmp_path), tmp_path) as join:
                await probe(bus, "probe")
                assert await ended(join) == 0
            committed = await bus.committed("streams.experience", [PROMPTS.name])
            assert committed == await bus.ends([PROMPTS.name])

    asyncio.run(main())

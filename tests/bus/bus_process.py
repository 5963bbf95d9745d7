"""What the bus tests run in other processes. One mode a run; answers are lines of JSON on stdout.

consume ADDRESS SESSION_MS GROUP TOPIC MEMBER|-     polls, prints what came and who owns what, commits
transact ADDRESS SESSION_MS ID TOPIC GROUP          starts the id, waits for a line on stdin, commits
write ADDRESS SESSION_MS TOPIC NAME                 appends batches of ten for ever, prints those acknowledged
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Coroutine

from headrace.bus import open_bus
from headrace.bus.protocol import Message, TopicPartition
from headrace.errors import HeadraceError


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def consume(address: str, session_ms: int, group: str, topic: str, member_id: str) -> None:
    stable = None if member_id == "-" else member_id
    async with (
        open_bus(address, session_ms=session_ms) as bus,
        bus.member(group, [topic], member_id=stable) as member,
    ):
        owned: frozenset[TopicPartition] = frozenset()
        while True:
            deliveries = await member.poll(wait_ms=200)
            if member.assignment() != owned:
                owned = member.assignment()
                say(owned=sorted(tp.partition for tp in owned))
            if deliveries:
                await member.commit({d.tp: d.offset + 1 for d in deliveries})
                say(keys=[(d.key or b"").decode() for d in deliveries])


async def transact(address: str, session_ms: int, transactional_id: str, topic: str, group: str) -> None:
    async with (
        open_bus(address, session_ms=session_ms) as bus,
        bus.transactor(transactional_id) as transactor,
    ):
        say(started=True)
        await asyncio.to_thread(sys.stdin.readline)
        try:
            await transactor.commit(
                [Message(topic, b"child", b"late")], group=group, positions={TopicPartition(topic, 0): 7}
            )
        except HeadraceError as error:
            say(outcome=type(error).__name__)
        else:
            say(outcome="committed")


async def write(address: str, session_ms: int, topic: str, name: str) -> None:
    async with open_bus(address, session_ms=session_ms) as bus:
        first = 0
        while True:
            batch = range(first, first + 10)
            await bus.produce([Message(topic, name.encode(), f"{name}-{i}".encode()) for i in batch])
            say(acknowledged=[f"{name}-{i}" for i in batch])
            first += 10


if __name__ == "__main__":
    modes: dict[str, Callable[..., Coroutine[None, None, None]]]
    modes = {"consume": consume, "transact": transact, "write": write}
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(modes[sys.argv[1]](sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))

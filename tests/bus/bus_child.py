"""A process of `bus_process.py` as a test sees it: started, spoken to, killed, never left behind."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 40.0


class Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []

    async def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next line that is `wanted`; all lines before it are kept in `said`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := await self.process.stdout.readline():
                fields: dict[str, Any] = json.loads(line)
                self.said.append(fields)
                if wanted(fields):
                    return fields
        raise AssertionError(f"the process ended, having said {self.said}")

    async def drain(self) -> None:
        """Reads on until the process ends."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := await self.process.stdout.readline():
                with contextlib.suppress(json.JSONDecodeError):  # a killed process may leave half a line
                    self.said.append(json.loads(line))

    def of(self, field: str) -> list[Any]:
        """Everything said under `field`, flattened."""
        return [item for fields in self.said for item in fields.get(field, [])]

    async def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        await self.process.stdin.drain()

    async def kill(self) -> None:
        """SIGKILL, and what it had said until then."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.drain()
        await self.process.wait()


@contextlib.asynccontextmanager
async def child(mode: str, address: str, session_ms: int, *arguments: str) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("bus_process.py")),
        *(mode, address, str(session_ms), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    started = Child(process)
    try:
        yield started
    finally:
        await started.kill()

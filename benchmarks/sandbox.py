"""Checked programs per second: fills of real tasks on their own examples, behind each kind of walls.

Half of the programs are the original, half a wrong fill that terminates. A row is one way of handing them in:
one program a job, a group of 8 a job, 64 a job; the last compares with a bare interpreter a program.
"""

import asyncio
import os
import random
import subprocess
import sys
import time

from benchmarks.page import header, table
from headrace.envs import tasks
from headrace.envs.config import SandboxConfig
from headrace.envs.sandbox import Job, Sandbox

TASKS = 60
PROGRAMS_A_JOB = (1, 8, 64)


def jobs(programs_a_job: int) -> list[Job]:
    train = tasks.TaskSet.load("train")
    chosen = random.Random(0).sample(train.task_ids, TASKS)
    made = []
    for task in map(train.task, chosen):
        programs = [task.program(task.fill), task.program("None")] * programs_a_job
        made.append(Job(task.module, task.function, tuple(programs[:programs_a_job]), task.checks))
    return made


async def rate(isolation: str, servers: int, programs_a_job: int) -> list[object]:
    config = SandboxConfig(isolation=isolation, servers=servers)  # type: ignore[arg-type]
    work = jobs(programs_a_job)
    started = time.perf_counter()
    async with await Sandbox.start(config, tasks.distributions()) as sandbox:
        up_ms = (time.perf_counter() - started) * 1000
        for _ in range(2):  # the first round imports the packages
            started = time.perf_counter()
            outcomes = await asyncio.gather(*(sandbox.run(job) for job in work))
            seconds = time.perf_counter() - started
    passed = sum(outcome.status == "passed" for of_job in outcomes for outcome in of_job)
    checked = TASKS * programs_a_job
    return [
        isolation,
        servers,
        programs_a_job,
        round(checked / seconds, 1),
        round(passed / checked, 2),
        round(up_ms),
    ]


def bare() -> list[object]:
    started = time.perf_counter()
    for _ in range(30):
        subprocess.run([sys.executable, "-I", "-S", "-c", "print(1)"], check=True, capture_output=True)
    return ["none: a bare interpreter each", 1, 1, round(30 / (time.perf_counter() - started), 1), 1.0, 0]


def main() -> None:
    load = os.getloadavg()[0]
    rows = [bare()]
    for isolation in ("namespaces", "landlock"):
        for programs_a_job in PROGRAMS_A_JOB:
            rows.append(asyncio.run(rate(isolation, 1, programs_a_job)))
        rows.append(asyncio.run(rate(isolation, 2, 8)))
    print(header("Sandbox: checked programs per second"))
    print(f"{TASKS} tasks; load of the machine when it began: {load:.1f}.\n")
    print(table(["walls", "servers", "programs a job", "programs / s", "passed", "start, ms"], rows))


if __name__ == "__main__":
    main()

"""A recorded run of the tiny model in a run directory, what replay says of it, and hands that reach into its
log afterwards. Not tests."""

import asyncio
import io
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from packed_place import CONFIG, Place, messages, seed

from headrace.bus.protocol import TopicPartition
from headrace.bus.sqlite import log
from headrace.cli import main
from headrace.cli.settings import Settings, save
from headrace.wire.codec import decode, encode
from headrace.wire.records import Experience, TrainStep

STEPS = 6


def record_run(place: Place) -> list[TrainStep]:
    """Six steps of two groups, in one partition and so in one order; a checkpoint every other step."""
    config = msgspec.structs.replace(CONFIG, checkpoints_kept=9)
    run = place.until(STEPS)
    on_file = Settings(run=run, trainer=config)
    if not place.bus.startswith("sqlite:"):
        bus = msgspec.structs.replace(on_file.bus, address=place.bus)
        on_file = msgspec.structs.replace(on_file, bus=bus)
    save(on_file, place.directory)

    async def scenario() -> list[TrainStep]:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(2 * STEPS), partition=0))
            return await place.train(bus, run, config)

    return asyncio.run(scenario())


@dataclass(frozen=True, slots=True)
class Said:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def outcomes(self) -> list[str]:
        return [step["outcome"] for step in self.json["steps"]]


def replay(directory: Path, *words: str) -> Said:
    """`headrace replay WORDS` on the run in `directory`."""
    out, err = io.StringIO(), io.StringIO()
    model, weights = seed()
    with (
        mock.patch("headrace.policy.checkpoint.load_seed", lambda: (model, weights, None)),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            code = main(["replay", *words, "--run-dir", str(directory)])
        except SystemExit as ended:
            code = int(str(ended.code))
    return Said(code, out.getvalue(), err.getvalue())


@dataclass(frozen=True, slots=True)
class Altered:
    """A copy of a run whose log is edited behind everybody's back."""

    directory: Path

    @classmethod
    def copy(cls, directory: Path, to: Path) -> "Altered":
        shutil.copytree(directory, to)
        return cls(to)

    def experience(self, group_id: str, change: Callable[[Experience], Experience]) -> str:
        """The record of a group is another; its place."""
        return self._edit("experience", lambda r: r.group_id == group_id, change)

    def step(self, step: int, **fields: Any) -> str:
        """Fields of a ledger record are others; its place."""
        return self._edit(
            "train.steps", lambda r: r.step == step, lambda r: msgspec.structs.replace(r, **fields)
        )

    def forget(self, *group_ids: str) -> list[str]:
        """Records of `experience` are gone; their places."""
        return [self._edit("experience", partial(_is_of, name), lambda r: None) for name in group_ids]

    def _edit(self, topic: str, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> str:
        with sqlite3.connect(self.directory / "bus.sqlite") as db:
            for tail in log.tails(db, topic):
                for delivery in list(log.scan(db, tail, tail.begin, tail.next)):
                    record = decode(topic, delivery.value or b"", delivery.headers)
                    if not wanted(record):
                        continue
                    changed, row = change(record), tail.row(delivery.offset)
                    if changed is None:
                        db.execute("DELETE FROM records WHERE place = ?", (row,))
                    else:
                        value, headers = encode(changed, source="hand", now_ms=0)
                        packed = log._pack_headers(headers)
                        db.execute(
                            "UPDATE records SET value = ?, headers = ? WHERE place = ?", (value, packed, row)
                        )
                    return f"{TopicPartition(topic, tail.tp.partition)}@{delivery.offset}"
        raise AssertionError(f"{topic}: no record to edit")


def contents(directory: Path) -> tuple[int, int, list[str]]:
    """Records, committed positions and blobs of a run: what a look must leave as it was."""
    with sqlite3.connect(directory / "bus.sqlite") as db:
        [(records,)] = db.execute("SELECT count(*) FROM records").fetchall()
        [(positions,)] = db.execute("SELECT total(position) FROM positions").fetchall()
    blobs = sorted(str(path) for path in (directory / "store").rglob("*") if path.is_file())
    return records, int(positions), blobs


if __name__ == "__main__":
    done = replay(Path(sys.argv[1]), *sys.argv[2:])
    print(done.out or done.err)
    sys.exit(done.code)


def _is_of(group_id: str, record: Any) -> bool:
    return bool(record.group_id == group_id)

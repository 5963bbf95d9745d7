"""`headrace trace` on a log written by hand: the way of a group, in the order of broker time."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_log import RUN, START_MS, group, prompt, reward, step, train_step, write

from headrace.bus import open_bus
from headrace.bus.dead_letters import dead_letter
from headrace.bus.protocol import Delivery, Message, partition_of
from headrace.cli import main
from headrace.cli.story import find
from headrace.errors import WireError
from headrace.wire import records as r
from headrace.wire.codec import encode

ESCAPE = "\x1b]0;title\x07"
EVENT = "0af7651916cd43dd8448eb211c80319c"


def experience(number: int) -> tuple[str, str, r.Record]:
    return (
        "experience",
        group(number),
        r.Experience(
            run=RUN,
            group_id=group(number),
            source="sim",
            env="doctest",
            task_id="task",
            group_size=2,
            rollouts=(),
            missing=(1,),
            closed="timeout",
            admitted_version=0,
            opened_ms=START_MS,
            closed_ms=START_MS,
        ),
    )


def announced(version: int) -> tuple[str, str, r.Record]:
    return (
        "weights",
        RUN,
        r.WeightsPublished(
            run=RUN,
            version=version,
            root=f"{version}abcdef",
            step=version,
            manifest_uri="",
            manifest_sha256="",
            encodings=(r.Encoding(kind="delta", uri="", sha256="", bytes=755_200),),
            published_ms=START_MS,
        ),
    )


def ack(replica: str, version: int, outcome: str = "serving") -> tuple[str, str, r.Record]:
    return (
        "weights.acks",
        f"eu/{replica}",
        r.WeightsAck(
            run=RUN,
            region="eu",
            replica=replica,
            version=version,
            root="",
            outcome=outcome,  # type: ignore[arg-type]
            pause_ms=2.5,
            acked_ms=START_MS,
        ),
    )


def feedback(number: int) -> tuple[str, str, r.Record]:
    signal = r.Feedback(
        run=RUN, event_id="e1", suggestion_id=group(number), kind="accepted", editor_ms=0, client=ESCAPE
    )
    return "feedback", group(number), signal


def odd_worker(number: int) -> tuple[str, str, r.Record]:
    topic, key, record = step(number, 1)
    assert isinstance(record, r.RolloutStep)
    return topic, key, msgspec.structs.replace(record, worker=ESCAPE)


RECORDS = [
    prompt(0),
    step(0, 0, attempt=1, tokens=(9,)),
    step(0, 0, attempt=2),
    odd_worker(0),
    reward(0, 0, 0.5, attempt=2),
    feedback(0),
    experience(0),
    prompt(1),
    train_step(1, [0], [0], [r.Drop(group_id=group(0), reason="stale", member=1, tokens=4)]),
    announced(1),
    ack("r0", 0),
    ack("r0", 1),
    ack("r1", 1, "refused"),
    ack("r1", 3),
    ack("r0", 2),
    train_step(2, [0, 2], [2], [r.Drop(group_id=group(0), reason="duplicate")]),
]


async def _log(path: Path) -> str:
    address = await write(path, RECORDS)
    async with open_bus(address) as bus:
        key = group(0).encode()
        at = partition_of(key, 4)
        # The stable id of a suggestion's step begins with no group of the log's.
        value, headers = encode(
            step(3, 0)[2], source="t", now_ms=0, event_id="0af7651916cd43dd8448eb211c80319c"
        )
        await bus.produce([Message("rollout.steps", group(3).encode(), value, headers)])
        bad = Delivery("rewards", at, 77, 0, key, b"\xc1", ())
        await bus.produce([dead_letter(bad, WireError("no reward"), by="join", now_ms=0)])
    return address


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return asyncio.run(_log(tmp_path_factory.mktemp("log") / "log"))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["trace", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_whole_way_in_the_order_of_the_broker(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each station once, at its place; each replica's first weights with the unit in them."""
    found = told(capsys, group(0), "--bus", address)
    stations = found["stations"]
    assert [s["station"] for s in stations] == [
        "written",
        "rolled out",
        "rolled out",
        "rolled out",
        "rewarded",
        "signal",
        "joined",
        "trained",
        "announced",
        "served",
        "refused",
        "served",
        "dropped",
        "dead letter",
    ]
    times = [s["at_ms"] for s in stations]
    assert times == sorted(times)
    text = {s["station"]: s["what"] for s in stations}
    assert text["trained"] == "step 1: v0 to v1; withheld: stale 1"
    assert text["dropped"] == "step 2: duplicate"
    served = [s["what"] for s in stations if s["station"] == "served"]
    assert [what.partition(",")[0] for what in served] == ["v1 at eu/r0", "v3 at eu/r1"]
    assert found["fate"] == "trained in step 1 (weights v1)"
    # One second between two records: prompt at 0, steps at 1 to 3, reward 4, joined 6, trained 8, served 11.
    assert found["durations_ms"] == {
        "wait": 1000,
        "roll out": 2000,
        "judge": 1000,
        "join": 2000,
        "queue and train": 2000,
        "announce": 1000,
        "serve": 2000,
    }


def test_one_member(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a rollout: its own steps and rewards, and the group's stations; its own fate."""
    found = told(capsys, f"{group(0)}/1", "--bus", address)
    assert found["fate"] == "read in step 1; tokens withheld: stale"
    stations = [s["station"] for s in found["stations"]]
    assert (stations.count("rolled out"), stations.count("rewarded"), stations.count("withheld")) == (1, 0, 1)
    assert main(["trace", f"{group(0)}/7", "--bus", address]) == 2
    assert "expected a member of [0, 1], got 7" in capsys.readouterr().err


def test_an_event_leads_to_its_group(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Found in the whole log by its header, and marked on the screen."""
    found = told(capsys, EVENT, "--bus", address)
    assert (found["group_id"], found["event"], found["fate"]) == (group(3), EVENT, "in flight")
    assert main(["trace", EVENT, "--bus", address]) == 0
    assert "* rolled out" in capsys.readouterr().out


def test_an_unknown_id(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names the nearest group; an event of the ledger leads to where it lies."""
    assert main(["trace", "sample-000000l", "--bus", address]) == 2
    assert "did you mean 'sample-0000001'?" in capsys.readouterr().err
    assert main(["trace", "zzz", "--bus", address]) == 2
    assert f"groups here are {group(0)!r} to {group(1)!r}" in capsys.readouterr().err


def test_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the editor said, in words, what came too late, and what the canary was told."""
    topic, key, asked = step(7, 0)
    assert isinstance(asked, r.RolloutStep)
    signals = [
        r.Feedback(run=RUN, event_id=kind, suggestion_id=key, kind=kind, editor_ms=0, **told)  # type: ignore[arg-type]
        for kind, told in (
            ("shown", {"continues": "old"}),
            ("partially_accepted", {"accepted_length": 9}),
            ("persisted", {"persisted_s": 30, "difference": 0.125}),
        )
    ]
    shown = r.Exposure(
        run=RUN,
        group_id=key,
        version=3,
        cohort="canary",
        user="",
        region="eu",
        silent=False,
        shown=True,
        accepted=0.6875,
        reward=0.5,
        latency_ms=9,
        opened_ms=START_MS,
        closed_ms=START_MS,
    )
    log = [
        (topic, key, msgspec.structs.replace(asked, source="live", worker="inference-0")),
        ("feedback", key, signals[0]),
        ("feedback", key, signals[1]),
        reward(7, 0, 0.5),
        ("exposures", key, shown),
        ("feedback", key, signals[2]),
    ]
    address = asyncio.run(write(tmp_path / "log", log))
    assert [(s["station"], s["what"]) for s in told(capsys, key, "--bus", address)["stations"]] == [
        ("rolled out", "member 0 turn 0: 2 tokens (v0), passed, by inference-0"),
        ("signal", "shown, continues old"),
        ("signal", "partially_accepted, 9 characters"),
        ("rewarded", "member 0 tests = 0.5"),
        ("compared", "v3 as canary: shown, 68.8 % accepted"),
        ("signal", "persisted, after 30 s, 12.5 % changed, late"),
    ]
    assert main(["trace", key, "--bus", address]) == 0
    assert capsys.readouterr().out.startswith(f"suggestion {key}\n")
    assert main(["trace", f"{key}1", "--bus", address]) == 2
    assert f"did you mean {key!r}?" in capsys.readouterr().err
    assert main(["trace", "zzz", "--bus", address]) == 2
    assert f"a suggestion here is {key!r} (headrace tail exposures)" in capsys.readouterr().err
    assert main(["trace", "", "--bus", address]) == 2
    assert "ID: expected a group, GROUP/MEMBER, suggestion, or event id, got ''" in capsys.readouterr().err


def test_the_screen_is_inert(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 columns; what a worker calls itself is shown, not obeyed."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["trace", group(0), "--bus", address]) == 0
    screen = capsys.readouterr().out
    assert "\x1b" not in screen and "\x07" not in screen
    assert max(map(len, screen.splitlines())) <= 80
    assert "dead letter" in screen


def test_a_flood_under_one_key_is_cut(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more records are held than the bound, and the story says so."""
    monkeypatch.setattr("headrace.cli.story.RECORDS_MAX", 4)

    async def read() -> tuple[int, bool]:
        async with open_bus(address) as bus:
            story = await find(bus, group(0))
            return len(story.told), story.cut

    assert asyncio.run(read()) == (4, True)

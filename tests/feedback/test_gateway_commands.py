"""`headrace gateway`, `headrace feedback` and the examples, as a person runs them."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_place import ROOT, GatewayProcess, records

from headrace.bus import open_bus
from headrace.wire.records import Feedback
from headrace.wire.topics import FEEDBACK

TOKEN = "t" * 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway on a log of its own that asks for a token and keeps code."""
    home = tmp_path_factory.mktemp("place")
    (home / "tokens").write_text(f"team {TOKEN}\n")
    run_dir = home / "run"
    run_dir.mkdir()
    (run_dir / "run.toml").write_text(
        f'[gateway]\ntokens_file = "{home / "tokens"}"\nstore_text = true\n[run]\nname = "shown"\n'
    )
    bus = f"sqlite:{run_dir / 'bus.sqlite'}"
    made(bus)
    process = GatewayProcess(run_dir, bus)
    process.start()
    yield process
    assert process.end() == 0


def made(bus: str) -> None:
    async def run() -> None:
        async with open_bus(bus) as log:
            await log.create_topics([FEEDBACK])

    asyncio.run(run())


def on_topic(place: GatewayProcess) -> dict[str, Feedback]:
    async def run() -> list[Feedback]:
        async with open_bus(f"sqlite:{place.home / 'bus.sqlite'}") as log:
            return await records(log)

    return {record.event_id: record for record in asyncio.run(run())}


def headrace(place: GatewayProcess, tmp_path: Path, *words: str, token: str = TOKEN) -> Any:
    return ran(tmp_path, sys.executable, "-m", "headrace", *words, "--run-dir", str(place.home), token=token)


def ran(tmp_path: Path, *words: str, token: str = TOKEN) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environment |= {
        "HEADRACE_FEEDBACK_TOKEN": token,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
    }
    return subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_send(place: GatewayProcess, tmp_path: Path) -> None:
    """One event from a shell; a wrong one is refused with the reason and a code."""
    words = ("--user", "ada", "--client", "sh/1", "--length", "31", "--event-id", "shell-1")
    done = headrace(place, tmp_path, "feedback", "send", "s-1", "accepted", *words)
    assert (done.returncode, done.stdout) == (0, "1 acknowledged, 0 refused, 0 still waiting\n"), done.stderr
    record = on_topic(place)["shell-1"]
    assert (record.suggestion_id, record.kind, record.accepted_length) == ("s-1", "accepted", 31)
    assert (record.run, record.client) == ("shown", "sh/1")
    done = headrace(place, tmp_path, "feedback", "send", "s-1", "loved")
    assert done.returncode == 12
    assert "kind: expected one of" in done.stderr


def test_replay_log(place: GatewayProcess, tmp_path: Path) -> None:
    """A recorded log of an editor, twice: bad lines are told with their number, the rest is there once."""
    log = tmp_path / "editor.jsonl"
    lines: list[object] = [
        {"call": "handleDidShowCompletionItem", "id": "v-1", "updatedInsertText": "x = '🎉'"},
        {"call": "handleEndOfLifetime", "id": "v-1", "reason": {"kind": 2, "supersededBy": {"id": "v-2"}}},
        {"call": "handleEndOfLifetime", "id": "v-1", "reason": {"kind": 9}},
    ]
    log.write_bytes("\n".join(json.dumps(line) for line in lines).encode() + b"\nnot json\n\xff\n[1]\n")
    words = ("feedback", "replay-log", str(log), "--format", "vscode", "--user", "ada")
    for _ in range(2):
        done = headrace(place, tmp_path, *words, "--json")
        told = json.loads(done.stdout)
        assert (done.returncode, told["sent"], told["refused"], told["waiting"]) == (12, 2, 4, 0), done.stderr
        assert [reason.split(": ")[0] for reason in told["reasons"]] == [
            f"{log}:{number}" for number in (3, 4, 5, 6)
        ]
    mine = {r.kind: r for r in on_topic(place).values() if r.suggestion_id == "v-1"}
    assert sorted(mine) == ["ignored", "shown"]
    assert mine["ignored"].superseded_by == "v-2"
    assert mine["shown"].text == b""


def test_own_log_with_code_and_forget(place: GatewayProcess, tmp_path: Path) -> None:
    """Our own format over gRPC with code; then its user is forgotten, once; under a new secret it is told
    that there are keys under the old."""
    log = tmp_path / "own.jsonl"
    log.write_text(
        '{"event_id": "own-1", "suggestion_id": "o", "kind": "shown", "text": "x = 1", "user": "zoe"}\n'
    )
    words = ("feedback", "replay-log", str(log), "--with-text", "--gateway", f"grpc://{place.grpc}")
    done = headrace(place, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert on_topic(place)["own-1"].text[:1] == b"\x01"
    (tmp_path / "new").write_text(f"r2 {'n' * 40}")
    new = ("--gateway.secret_file", str(tmp_path / "new"))
    done = headrace(place, tmp_path, "gateway", "forget", "zoe", *new)
    assert (done.returncode, "keys under other secrets (r1)" in done.stderr) == (1, True)
    done = headrace(place, tmp_path, "gateway", "forget", "zoe")
    assert (done.returncode, "key destroyed" in done.stdout, "zoe" in done.stdout) == (0, True, False)
    done = headrace(place, tmp_path, "gateway", "forget", "zoe", "--json")
    assert (done.returncode, json.loads(done.stdout)["destroyed"]) == (1, False)
    assert headrace(place, tmp_path, "gateway", "forget").returncode == 2


def test_what_is_not_acknowledged_waits(place: GatewayProcess, tmp_path: Path) -> None:
    """With nobody at the address the command says so and keeps the event; the next command sends it."""
    buffer = ("--buffer", str(tmp_path / "b.db"), "--event-id")
    code = (
        "import headrace.cli, headrace.cli.feedback as f, sys\n"
        "f.FLUSH_S = 0.2\n"
        "sys.exit(headrace.cli.main(sys.argv[1:]))"
    )
    words = ("feedback", "send", "s-2", "shown", *buffer)
    done = ran(tmp_path, sys.executable, "-c", code, *words, "late-1", "--gateway", "http://127.0.0.1:9")
    assert done.returncode == 12
    assert "1 still waiting" in done.stdout
    assert "waiting: " in done.stderr
    assert str(tmp_path / "b.db") in done.stderr
    done = headrace(place, tmp_path, *words, "late-2")
    assert (done.returncode, done.stdout) == (0, "2 acknowledged, 0 refused, 0 still waiting\n"), done.stderr
    assert {"late-1", "late-2"} <= set(on_topic(place))


def test_what_waits_for_one_gateway_goes_to_no_other(place: GatewayProcess, tmp_path: Path) -> None:
    """Each gateway has a buffer of its own unless told otherwise; what stands in the way is told early."""
    code = (
        "import headrace.cli, headrace.cli.feedback as f, sys\n"
        "f.FLUSH_S, f.TELL_S = 2.0, 0.2\n"
        "sys.exit(headrace.cli.main(sys.argv[1:]))"
    )
    words = (
        "feedback",
        "send",
        "s-3",
        "persisted",
        "--persisted-s",
        "30",
        "--difference",
        "0.5",
        "--event-id",
    )
    done = ran(tmp_path, sys.executable, "-c", code, *words, "elsewhere", "--gateway", "http://127.0.0.1:9")
    assert done.returncode == 12
    assert "not acknowledged yet, trying for 2 s: 127.0.0.1:9" in done.stderr
    done = headrace(place, tmp_path, *words, "here")
    assert (done.returncode, done.stdout) == (0, "1 acknowledged, 0 refused, 0 still waiting\n"), done.stderr
    found = on_topic(place)
    assert "elsewhere" not in found
    assert (found["here"].persisted_s, found["here"].difference) == (30, 0.5)


def test_examples(tmp_path: Path) -> None:
    """The plug-in's script has at most 15 lines; it and the curl line publish an accept."""
    script, shell = ROOT / "examples" / "publish_accept.py", ROOT / "examples" / "publish_accept.sh"
    assert len(script.read_text().splitlines()) <= 15
    bus = f"sqlite:{tmp_path / 'run' / 'bus.sqlite'}"
    (tmp_path / "run").mkdir()
    made(bus)
    process = GatewayProcess(tmp_path / "run", bus)
    process.start()
    try:
        done = ran(tmp_path, sys.executable, str(script), process.http)
        assert done.returncode == 0, done.stderr
        if shutil.which("curl"):
            done = ran(tmp_path, "sh", str(shell), process.http)
            assert json.loads(done.stdout) == {"accepted": 1, "duplicates": 0, "refused": []}, done.stderr
        found = on_topic(process)
        assert [r.kind for r in found.values()].count("accepted") == (2 if shutil.which("curl") else 1)
        assert {r.suggestion_id for r in found.values()} == {"demo-live-7"}
        assert len({r.user for r in found.values()}) == 1
    finally:
        assert process.end() == 0

"""`headrace weights`: what it lists, what it writes, what it refuses."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bus import open_bus
from headrace.bus.protocol import Message
from headrace.cli.entry import main
from headrace.streams.release import Canary, CanaryConfig, State
from headrace.wire.codec import encode
from headrace.wire.records import Record, WeightsAck, WeightsPromoted, WeightsPublished
from headrace.wire.topics import CANARY_STATE, TOPICS, WEIGHTS, WEIGHTS_ACKS


def published(version: int) -> WeightsPublished:
    return WeightsPublished(
        run="demo",
        version=version,
        root=f"{version:02x}" * 32,
        step=version,
        manifest_uri="",
        manifest_sha256="",
        encodings=(),
        published_ms=0,
    )


def ack(version: int, role: str = "", **changes: Any) -> WeightsAck:
    fields: dict[str, Any] = {"outcome": "serving", "role": role, "acked_ms": 0} | changes
    return WeightsAck(run="demo", region="local", replica="r0", version=version, root="", **fields)


async def write(address: str, *records: Record) -> None:
    async with open_bus(address) as bus:
        await bus.create_topics(list(TOPICS.values()))
        for record in records:
            value, headers = encode(record, source="test", now_ms=0)
            topic = WEIGHTS_ACKS if isinstance(record, WeightsAck) else WEIGHTS
            await bus.produce([Message(topic.name, b"demo", value, headers)])


class Run:
    """Versions 1 to 4; 2 is stable, 3 the canary of a tenth."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str], mode: str = "gradual") -> None:
        (directory / "run.toml").write_text(f'[release]\nmode = "{mode}"\n')
        self._directory = directory
        self._capsys = capsys
        asyncio.run(write(f"sqlite:{directory / 'bus.sqlite'}", *map(published, range(1, 5))))

    def write(self, *records: Record) -> None:
        asyncio.run(write(f"sqlite:{self._directory / 'bus.sqlite'}", *records))

    def __call__(self, *words: str) -> str:
        """Standard output of a command that succeeds."""
        assert main(["weights", *words, "--run-dir", str(self._directory)]) == 0
        return self._capsys.readouterr().out

    def refused(self, *words: str) -> str:
        """What a command that fails says."""
        assert main(["weights", *words, "--run-dir", str(self._directory)]) == 2
        return self._capsys.readouterr().err

    def states(self) -> dict[int, str]:
        return {item["version"]: item["state"] for item in json.loads(self("list", "--json"))["versions"]}


def test_a_release_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Promote to all, promote to a tenth, revoke, pin, unpin: the list says each time who has what."""
    run = Run(tmp_path, capsys)
    assert run("promote", "2") == "version 2: stable: all users\n"
    assert run("promote", "3", "--share", "10%", "--why", "looks good") == "version 3: canary: 10% of users\n"
    assert run.states() == {
        4: "newest: rollouts",
        3: "canary: 10% of users",
        2: "stable: all other users",
        1: "published",
    }
    run.write(ack(4), ack(2, "stable"), ack(3, "canary"))
    listed = " ".join(run("list").split())  # the last column is broken over lines
    assert "local/r0 canary" in listed
    assert "hand: promote: looks good" in listed
    assert json.loads(run("revoke", "3", "--json")) == {
        "version": 3,
        "act": "revoke",
        "state": "revoked",
        "users_have": 2,
    }
    assert run("pin", "1") == "version 1: pinned: all users\n"
    assert run.states()[2] == "was stable"
    assert run("unpin", "1") == "version 1: stable: all users\n"


def test_the_canary_s_evidence_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its reason in the table, all of it as JSON."""
    run = Run(tmp_path, capsys)
    evidence = json.dumps({"reason": "no sign of harm", "exposures": [100, 900]})
    run.write(WeightsPromoted(run="demo", version=2, share=1.0, evidence=evidence))
    assert "canary: no sign of harm" in " ".join(run("list").split())
    [second] = [v for v in json.loads(run("list", "--json"))["versions"] if v["version"] == 2]
    assert (second["by"], second["evidence"]["exposures"]) == ("canary", [100, 900])


def test_what_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A version that isn't there, with the nearest; unfit weights; a second revocation; another unpin."""
    run = Run(tmp_path, capsys)
    assert "expected a version from 1 to 4, got 9: the nearest is 4" in run.refused("promote", "9")
    run.write(ack(4, outcome="refused", unfit=True))
    assert "expected weights that can be served, got 4" in run.refused("promote", "4")
    run("revoke", "3")
    assert "expected a version that is not revoked yet, got 3" in run.refused("revoke", "3")
    run("pin", "2")
    assert "expected the version that is pinned (2), got 1" in run.refused("unpin", "1")
    with pytest.raises(SystemExit):
        run.refused("promote", "2", "--share", "0")
    assert "expected a share above 0" in capsys.readouterr().err


def test_without_gradual_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest serves all; a promotion would not hold and says what would; pin does."""
    run = Run(tmp_path, capsys, mode="immediate")
    assert run.states()[4] == "newest: all users"
    assert "headrace weights pin 2 holds it" in run.refused("promote", "2")
    assert run("pin", "2") == "version 2: pinned: all users\n"
    assert run("unpin", "2") == "version 2: was stable; users have 4\n"
    run("revoke", "4")
    assert run.states()[3] == "stable: all users"


def test_a_stuck_release_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `weights list` and by `status`, with the users that would be enough; nothing of one under way."""
    run = Run(tmp_path, capsys)
    config = CanaryConfig()
    for count, tells in ((10, False), (config.exposures_min, True)):
        canary = Canary("demo", config)
        for record in (*map(published, range(1, 5)), WeightsPromoted(run="demo", version=2, share=1.0)):
            canary.learn(record, 0)
        canary.learn(WeightsPromoted(run="demo", version=3, share=0.01), 0)
        trial = canary.state.trial
        assert trial is not None
        for number in range(count):
            trial.stable_side["reward"].add(number % 9, 0.25)
        asyncio.run(stored(f"sqlite:{tmp_path / 'bus.sqlite'}", canary.state))
        listed = run("list")
        assert main(["status", "--run-dir", str(tmp_path)]) == 0
        for text in (listed, capsys.readouterr().out):
            assert ("WARNING: version 3 is stuck at 1 % of users: 0 exposures" in text) == tells
            assert ("4,000 users are enough for this share" in text) == tells
        found = json.loads(run("list", "--json"))["stuck"]
        assert (found and (found["version"], found["users_min"])) == ((3, 4000) if tells else None)
        assert main(["status", "--json", "--run-dir", str(tmp_path)]) == 0
        assert json.loads(capsys.readouterr().out)["release_stuck"] == found


async def stored(address: str, state: State) -> None:
    """As the canary's transactions leave it."""
    async with open_bus(address) as bus:
        await bus.produce([Message(CANARY_STATE.name, b"demo", msgspec.msgpack.encode(state))])

"""`topics`, `tail`, `trajectory` and `status` on a log written by hand."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from sample_log import evaluation, group, prompt, reward, step, train_step, write

from headrace.bus import open_bus
from headrace.bus.protocol import Message, TopicPartition
from headrace.cli import main, shown, status
from headrace.cli.run_view import REWARD, TOKENS, WAIT_S, Follower, RunView
from headrace.cli.screen import panel, plain_line, sparkline
from headrace.errors import ConfigError
from headrace.wire import records as r

RECORDS = [
    *(prompt(n) for n in range(6)),
    step(0, 0, attempt=1, tokens=(9,)),
    step(0, 0, attempt=2),
    step(0, 1, attempt=2),
    reward(0, 0, 0.5, attempt=2),
    reward(0, 1, 0.0, attempt=2),
    train_step(
        1, [0, 1], [0], [r.Drop(group_id=group(1), reason="zero_advantage", tokens=8)], **{REWARD: 0.25}
    ),
    train_step(
        2,
        [2, 3, 2],
        [2, 3],
        [
            r.Drop(group_id=group(2), reason="duplicate"),
            r.Drop(group_id=group(3), reason="stale", member=1, tokens=4),
        ],
        **{REWARD: 0.75, WAIT_S: 0.5, "tokens.trained": 96.0, "withheld.stale.tokens": 4.0},
    ),
    evaluation("before", 0, 1, False),
    evaluation("before", 0, 2, True),
    evaluation("before", 0, 2, True),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    bad = [
        Message("prompts", b"bad", b"\xc1", ()),
        Message("streams.experience.state", b"s", b"\x81\xa1a\x01"),
    ]
    return asyncio.run(write(tmp_path_factory.mktemp("log") / "log", RECORDS, bad))


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(list(words)) == 0
    return capsys.readouterr().out.splitlines()


def documents(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(capsys, *words, "--json")]


def test_topics_counts_and_lag(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records are counted per topic, and a group's lag is what lies behind its positions."""

    async def lagging() -> str:
        other = await write(tmp_path / "log", RECORDS)
        async with open_bus(other) as bus:
            ends = await bus.ends(["prompts"])
            tp = max(ends, key=lambda tp: ends[tp])
            async with bus.transactor("t") as transactor:
                await transactor.commit([], group="readers", positions={tp: ends[tp] - 1})
        return other

    table = {row["topic"]: row for row in documents(capsys, "topics", "--bus", asyncio.run(lagging()))}
    assert table["prompts"]["records"] == 6
    assert table["rollout.steps"]["records"] == 3
    behind = table["prompts"]["lag"]["readers"]
    assert behind >= 1
    assert "readers" not in table["rewards"]["lag"]
    assert any("evaluations" in line and " 3 " in line for line in lines(capsys, "topics", "--bus", address))


def test_topics_row_is_one_line_on_a_narrow_terminal(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 40 columns each topic still has one line with whole names and numbers."""
    monkeypatch.setenv("COLUMNS", "40")
    table = lines(capsys, "topics", "--bus", address)
    assert len(table) == 1 + len(documents(capsys, "topics", "--bus", address))
    assert not any("…" in line or line.endswith(" ") for line in table)


def test_tail_filters(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By key, key prefix, type, count, offset and time; the newest come last."""
    at = ("--bus", address)
    assert [d["key"] for d in documents(capsys, "tail", "prompts", *at, "--key", group(3))] == [group(3)]
    assert len(documents(capsys, "tail", "prompts", *at, "--key", "sample-*")) == 6
    newest = documents(capsys, "tail", "prompts", *at, "-n", "2", "--type", "prompt")
    assert [d["key"] for d in newest] == [group(4), group(5)]
    from_time = documents(capsys, "tail", "prompts", *at, "--from", shown.clock(1_796_000_003_500))
    assert [d["key"] for d in from_time] == [group(4), group(5), "bad"]
    assert len(documents(capsys, "tail", "train.steps", *at, "--from", "begin", "--until", "0@1")) == 1
    assert [d["offset"] for d in documents(capsys, "tail", "train.steps", *at, "--from", "1")] == [1]


def test_tail_decodes(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Packed arrays are numbers again, a record without a schema is shown too, a bad one says why."""
    at = ("--bus", address)
    first = documents(capsys, "tail", "rollout.steps", *at, "-n", "1")[0]["value"]
    assert (first["tokens_out"], first["logp"], first["loss_mask"]) == ([4, 5], [-0.5, -0.5], [1, 1])
    assert documents(capsys, "tail", "streams.experience.state", *at)[0]["value"] == {"a": 1}
    bad = documents(capsys, "tail", "prompts", *at, "--key", "bad")[0]
    assert "value" not in bad
    assert bad["error"].startswith("prompts[") and "ce_type" in bad["error"]
    assert "UNDECODABLE" in lines(capsys, "tail", "prompts", *at, "--key", "bad")[0]


def test_trajectory_tells_the_latest_attempt_and_the_fate(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each member shows the steps and rewards of its newest attempt; a group's fate comes from the ledger."""
    at = ("--bus", address)
    told = documents(capsys, "trajectory", group(0), *at)[0]
    assert told["fate"] == "trained in step 1 (weights v1)"
    assert [step["attempt"] for step in told["members"][0]["steps"]] == [2]
    assert [m["rewards"][0]["value"] for m in told["members"]] == [0.5, 0.0]
    fates = {n: documents(capsys, "trajectory", group(n), *at)[0] for n in (1, 3, 5)}
    assert fates[1]["fate"] == "dropped in step 1: zero_advantage"
    assert fates[5]["fate"] == "in flight"
    assert [m["fate"] for m in fates[3]["members"]] == [
        "trained in step 2 (weights v2)",
        "read in step 2; tokens withheld: stale",
    ]
    assert main(["trajectory", "sample-0000099", *at]) == 2
    assert main(["trajectory", f"{group(0)}/9", *at]) == 2
    assert "expected a member of [0, 1], got 9" in capsys.readouterr().err


def test_view_adds_up(address: str) -> None:
    """Every prompt is trained, dropped or in flight; a duplicate and a repeated try count once."""

    async def read() -> RunView:
        async with open_bus(address) as bus:
            follower = Follower(bus, "sample")
            await asyncio.gather(follower.refresh(), follower.refresh())
            return await follower.refresh()

    view = asyncio.run(read())
    assert (view.prompts, view.consumed, view.trained, view.in_flight) == (6, 4, 3, 2)
    assert view.drops == {"zero_advantage": 1, "duplicate": 1}
    assert view.withheld == {"stale": 1}
    assert view.held_out("sampled") == [(0, 0.5, 2)]
    assert view.undecodable == 1
    assert view.recent(REWARD) == 0.5
    # 96 trained and 4 withheld tokens in a step of 1.5 s after a wait of 0.5 s
    assert view.per_second(TOKENS, steps=1) == 100 / 2
    other = RunView("other")
    assert other.per_second(TOKENS) is None


def test_view_follows_only_what_is_new(tmp_path: Path) -> None:
    """A second refresh folds in the records since the first, no record twice."""

    async def act() -> list[tuple[int, int]]:
        address = await write(tmp_path / "log", RECORDS[:4])
        async with open_bus(address) as bus:
            follower = Follower(bus, "sample")
            seen = [(await follower.refresh()).prompts]
            await write(tmp_path / "log", RECORDS[4:])
            view = await follower.refresh()
            return [(seen[0], 0), (view.prompts, view.step)]

    assert asyncio.run(act()) == [(4, 0), (6, 2)]


def test_status_is_the_same_numbers(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`headrace status` prints the view, as text and as JSON."""
    at = ("--bus", address, "--run.name", "sample")
    document = documents(capsys, "status", *at)[0]
    assert (document["step"], document["in_flight"], document["trained"]) == (2, 2, 3)
    assert "6 issued, 2 in flight, 3 trained" in "\n".join(lines(capsys, "status", *at))


def test_screen_fits_any_width(address: str) -> None:
    """The panel draws on 20 and on 200 columns within the terminal; the plain form is one line."""
    from rich.console import Console

    async def read() -> RunView:
        async with open_bus(address) as bus:
            return await Follower(bus, "sample").refresh()

    view = asyncio.run(read())
    for width in (20, 40, 80, 200):
        console = Console(width=width, force_terminal=True, color_system=None)
        with console.capture() as captured:
            console.print(panel(view, "training: 5 steps", ["trainer", "prompts"], "note", width))
        drawn = captured.get().splitlines()
        assert max(map(len, drawn)) <= width
        assert any("0.500" in line for line in drawn)
    plain = plain_line(view, "late")
    assert "\n" not in plain and "dropped=zero_advantage:1,duplicate:1" in plain and "in_flight=2" in plain
    assert status.percent(None) == "-"


def test_sparkline() -> None:
    """The least value is the lowest bar, the most the highest; more values than columns are averaged."""
    assert sparkline([0, 7], 10) == "▁█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3, 3, 3], 3) == "▁▁▁"


def test_times_and_sizes() -> None:
    """Ages, ISO times, durations and sizes, by hand."""
    assert shown.time_ms("5m", 1_000_000) == 700_000
    assert shown.time_ms("1970-01-01T00:00:01", 0) == 1000
    with pytest.raises(ConfigError, match="yesterday"):
        shown.time_ms("yesterday", 0)
    assert [shown.duration(x) for x in (850, 12_340, 245_000, 12_000_000)] == [
        "850 ms",
        "12.3 s",
        "4 min 05 s",
        "3 h 20 min",
    ]
    assert [shown.size(x) for x in (None, 999, 1_500_000, 999_960)] == ["-", "999 B", "1.5 MB", "1.0 MB"]
    assert shown.shortened("abcdefghij", 7) == "ab...ij"


def test_dead_letters_are_listed_shown_and_sent_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A letter is found by the place of its record; redriving appends the very bytes to their topic."""
    letter = r.DeadLetter(
        topic="prompts",
        partition=1,
        offset=7,
        key=b"k",
        value=b"\xc1\xff",
        headers=(("ce_type", b"headrace.Prompt.v1"),),
        error="WireError",
        reason="prompts[1]@7: not MessagePack",
        by="experience",
        at_ms=1_796_000_000_000,
    )
    address = asyncio.run(write(tmp_path / "log", [("dead.letters", "prompts/1/7", letter)]))
    at = ("--bus", address)
    assert documents(capsys, "dead-letters", "list", *at)[0]["place"] == "prompts[1]@7"
    assert lines(capsys, "dead-letters", "list", *at)[-1] == "1 x prompts: WireError"
    assert documents(capsys, "dead-letters", "show", "prompts[1]@7", *at)[0]["value_hex"] == "c1ff"
    assert main(["dead-letters", "show", "prompts[1]@8", *at]) == 2
    assert main(["dead-letters", "redrive", *at]) == 2
    assert lines(capsys, "dead-letters", "redrive", "prompts[1]@7", *at) == [
        "prompts[1]@7 sent again to prompts"
    ]

    async def sent() -> list[bytes | None]:
        async with open_bus(address) as bus:
            ends = await bus.ends(["prompts"])
            return [
                d.value
                for tp in ends
                async for d in bus.read_range(TopicPartition("prompts", tp.partition), 0, ends[tp])
            ]

    assert asyncio.run(sent()) == [b"\xc1\xff"]

"""The live half of a report on hand-worked logs, and weights that are bad on purpose."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import torch
from msgspec.structs import replace

from headrace.bus.protocol import Delivery
from headrace.cli import online_loop, online_report, planting
from headrace.cli.online_view import OnlineView, quantile
from headrace.cli.options import Place
from headrace.cli.settings import Settings
from headrace.policy import checkpoint
from headrace.wire import records as r
from headrace.wire.codec import encode
from headrace.wire.examples import EXAMPLES

RUN = "demo"


def told(view: OnlineView, topic: str, record: r.Record, at_ms: int) -> None:
    """As if the log had taken `record` at `at_ms`."""
    value, headers = encode(record, source="test", now_ms=at_ms)
    view.apply(Delivery(topic, 0, 0, at_ms, b"", value, headers))


def step(consumed: dict[str, r.Source], admitted: tuple[str, ...], version_to: int) -> r.TrainStep:
    known = next(example for example in EXAMPLES.values() if isinstance(example, r.TrainStep))
    units = tuple(
        r.Consumed(topic="t", partition=0, offset=n, group_id=group_id, source=source)
        for n, (group_id, source) in enumerate(consumed.items())
    )
    return replace(known, run=RUN, consumed=units, admitted=admitted, version_to=version_to)


def feedback(suggestion: str, *, run: str = RUN, continues: str | None = None) -> r.Feedback:
    return r.Feedback(
        run=run,
        event_id=suggestion,
        suggestion_id=suggestion,
        kind="accepted",
        editor_ms=0,
        continues=continues,
    )


def ack(version: int) -> r.WeightsAck:
    return r.WeightsAck(
        run=RUN, region="eu", replica="i", version=version, root="", outcome="serving", acked_ms=0
    )


def test_clock_goes_from_accept_to_served() -> None:
    """An accept at 1 s, trained into version 3; version 2 is served at 2 s and version 4 at 9 s, which
    suggests something at 9.5 s: 8 s and 8.5 s. A unit whose weights nobody serves yet has no time."""
    view = OnlineView(RUN)
    told(view, "feedback", feedback("a"), 1_000)
    told(view, "feedback", feedback("a"), 5_000)
    told(view, "feedback", feedback("b"), 1_000)
    told(view, "train.steps", step({"a": "live", "g": "sim"}, ("a", "g"), 3), 7_000)
    told(view, "train.steps", step({"b": "live"}, ("b",), 5), 8_000)
    told(view, "weights.acks", ack(2), 2_000)
    told(view, "weights.acks", ack(4), 9_000)
    known = next(example for example in EXAMPLES.values() if isinstance(example, r.RolloutStep))
    told(view, "rollout.steps", replace(known, run=RUN, source="live", weights_version=4), 9_500)
    assert view.clock_ms() == [(8_000, 8_500)]
    assert (view.admitted["live"], view.admitted["sim"]) == (2, 1)


def test_accept_counts_for_the_unit_that_is_judged() -> None:
    """One of the rest of a suggestion is one of the suggestion; one of another run is none of ours."""
    view = OnlineView(RUN)
    told(view, "feedback", feedback("a", run="other"), 1_000)
    told(view, "feedback", feedback("a-7", continues="a"), 2_000)
    told(view, "feedback", feedback("a", continues="a"), 2_100)
    assert view.accepted_ms == {"a": 2_000}


def test_quantile_is_the_nearest_rank() -> None:
    """Of 1 to 100 the median is 50 and the 99th hundredth 99; of one value it is that; of nothing there is
    none."""
    assert quantile(list(range(1, 101)), 0.5) == 50
    assert quantile(list(range(1, 101)), 0.99) == 99
    assert quantile([7], 0.01) == quantile([7], 0.99) == 7
    assert quantile([], 0.5) is None


def test_bad_weights_are_bad_in_their_way() -> None:
    """Each kind changes what it says, and nothing else; the weights given stay."""
    _, weights, codec = checkpoint.load_seed()
    row = codec.special["<|silent|>"]
    nan = planting.bad("nan", weights)
    assert sum(bool(tensor.isnan().any()) for tensor in nan.values()) == 1
    shows = planting.bad("always-shows", weights)
    assert not shows["embed"][row].any() and weights["embed"][row].any()
    assert torch.equal(shows["embed"][row + 1 :], weights["embed"][row + 1 :])
    broken = planting.bad("broken-weights", weights)
    assert all(not torch.equal(broken[name], weights[name]) for name in weights if weights[name].std() > 0)


def test_planting_ends_with_its_order(tmp_path: Path) -> None:
    """Bad weights are announced while the order stands, and the versions are written down."""
    _, weights, _ = checkpoint.load_seed()
    plant = planting.planter("nan", tmp_path)
    assert plant(1, weights) is None
    (tmp_path / planting.ORDER_FILE).touch()
    assert plant(2, weights) is not None
    (tmp_path / planting.ORDER_FILE).unlink()
    assert plant(3, weights) is None
    assert planting.planted(tmp_path) == [2]


class Planting(online_loop.OnlineLoop):
    """A loop without processes, of which only the planting runs. The log says what the test says."""

    plant = "nan"

    def __init__(self, home: Path) -> None:
        demo = replace(Settings().demo, minutes=0.0)
        where = Place(replace(Settings(), demo=demo), home)
        self.phases: list[str] = []
        self.looks = 0
        screen = SimpleNamespace(phase=self.phases.append)
        super().__init__(SimpleNamespace(), where, screen, asyncio.Event())

    async def _silence(self) -> bool:
        return False  # nothing is started

    def _check(self) -> None:
        self.looks += 1

    async def looked(self) -> None:
        """Until it has looked at what the log says twice more."""
        seen = self.looks
        async with asyncio.timeout(20):
            while self.looks < seen + 2:  # noqa: ASYNC110 - the loop looks again itself
                await asyncio.sleep(0.01)

    def says(self, *records: r.Record) -> None:
        for record in records:
            self.view._apply(record)

    async def until(self, words: str) -> None:
        async with asyncio.timeout(20):
            while not any(words in phase for phase in self.phases):  # noqa: ASYNC110 - the loop looks again itself
                await asyncio.sleep(0.01)


def revoked(version: int) -> r.WeightsRevoked:
    return r.WeightsRevoked(run=RUN, version=version, evidence="worse")


def promoted(version: int, share: float = 1.0) -> r.WeightsPromoted:
    return r.WeightsPromoted(run=RUN, version=version, share=share)


def test_a_resumed_demo_plants_anew(tmp_path: Path) -> None:
    """Version 2 was planted and taken back in an earlier demo of the run, which was killed with its order
    standing. The next one begins without either, waits for a version that it planted itself, 12, to be taken
    back, and then for one that it did not plant, 14, to serve everybody."""

    async def scenario() -> None:
        (tmp_path / planting.ORDER_FILE).touch()
        (tmp_path / planting.PLANTED_FILE).write_text("2\n")
        loop = Planting(tmp_path)
        assert not await loop._start()
        assert (planting.planted(tmp_path), (tmp_path / planting.ORDER_FILE).exists()) == ([], False)
        loop.says(promoted(1), revoked(2), step({}, (), 11))
        task = asyncio.create_task(loop._plant(0, 1))
        await loop.until("announced from now on")
        (tmp_path / planting.PLANTED_FILE).write_text("12\n13\n")
        loop.says(promoted(12, 0.5), revoked(2))
        await loop.looked()
        assert (tmp_path / planting.ORDER_FILE).is_file()
        loop.says(revoked(12))
        await loop.until("version 12 taken back")
        assert not (tmp_path / planting.ORDER_FILE).exists()
        loop.says(promoted(13, 0.5), revoked(13), promoted(14, 0.5))
        await loop.looked()
        assert not task.done()
        loop.says(promoted(14))
        await asyncio.wait_for(task, 20)
        assert loop.phases[-1] == "training: version 14, a good one, serves everybody"

    asyncio.run(scenario())


def test_the_report_tells_of_planted_versions_and_the_good_one_after() -> None:
    """12 and 13 are planted: 12 makes two suggestions until it is taken back and one later, 13 one and none;
    14 is given to everybody after its second. What was decided before is not told."""
    view = OnlineView(RUN)
    known = next(example for example in EXAMPLES.values() if isinstance(example, r.RolloutStep))
    told(view, "weights", revoked(2), 50)
    told(view, "weights", promoted(11), 60)
    for version, at_ms in ((12, 100), (12, 110), (12, 130), (13, 140), (14, 160), (14, 170), (14, 190)):
        told(view, "rollout.steps", replace(known, run=RUN, source="live", weights_version=version), at_ms)
    for record, at_ms in ((revoked(12), 120), (revoked(13), 150), (promoted(14, 0.5), 155)):
        told(view, "weights", record, at_ms)
    phases = online_loop.Phases(planted="nan")
    found = online_report.Online(view, phases, [12, 13, 13], (0, 0), 0, None, 0.25, None, None)
    lines = [
        "planted: nan as versions 12 to 13: "
        "version 12 taken back by canary after 2 suggestions, 1 came later",
        "evidence: worse",
        "tried before good ones came: version 13 taken back by canary after 1 suggestions, 0 came later",
    ]
    end = "no good version was given to everybody before the run ended"
    assert online_report.lines(found)[-4:] == [*lines, end]
    told(view, "weights", promoted(14), 180)
    assert online_report.lines(found)[-4:] == [
        *lines,
        "version 14, a good one, given to everybody after 2 suggestions",
    ]

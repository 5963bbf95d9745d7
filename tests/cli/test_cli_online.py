"""The live half of a report on hand-worked logs, and weights that are bad on purpose."""

from pathlib import Path

import torch
from msgspec.structs import replace

from headrace.bus.protocol import Delivery
from headrace.cli import planting
from headrace.cli.online_view import OnlineView, quantile
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


def feedback(suggestion: str) -> r.Feedback:
    return r.Feedback(event_id=suggestion, suggestion_id=suggestion, kind="accepted", editor_ms=0)


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


def test_quantile_is_the_nearest_rank() -> None:
    """Of 1 to 100 the median is 51 and the 99th hundredth 100; of nothing there is none."""
    assert quantile(list(range(1, 101)), 0.5) == 51
    assert quantile(list(range(1, 101)), 0.99) == 100
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

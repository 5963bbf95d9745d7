"""The gateway's benchmark on hand-worked numbers, so that the script does not rot."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the scripts are no part of the package

from benchmarks import feedback_gateway

from headrace.rpc import feedback_pb2 as pb
from headrace.rpc.feedback import fault_of


def test_load_is_what_a_gateway_takes() -> None:
    """Every event is acceptable and has its own id; batches hold what they should."""
    made = feedback_gateway.events(50)
    assert {fault_of(event) for event in made} == {""}
    assert len({event.event_id for event in made}) == 50
    sizes = [len(pb.PublishRequest.FromString(b).events) for b in feedback_gateway.bodies(50, 20)]
    assert sizes == [20, 20, 10]
    assert len(feedback_gateway.records(50)) == 50


def test_latency_of_a_hundred() -> None:
    """Of 1 to 100 ms the median is 51 and the 99th percentile 100: the value at that share of the order."""
    latency = feedback_gateway.Latency.of([number / 1000 for number in range(100, 0, -1)])
    assert latency == pytest.approx((51.0, 100.0))


def test_page_says_which_bars_hold() -> None:
    """Medians of 41,000 and 30,000 events a second: the first bar holds, 1.37 times bare does not."""
    some = feedback_gateway.Latency(1.0, 2.0)
    rates = feedback_gateway.Rates([1.0, 30e3, 31e3], [41e3, 1.0, 50e3], [900.0], some, some)
    rows = [line for line in feedback_gateway.page(rates).splitlines() if "| yes" in line or "| no" in line]
    assert [row.split("|")[3].strip() for row in rows] == ["41,000", "1.37"]
    assert [row.split("|")[4].strip() for row in rows] == ["yes", "no"]

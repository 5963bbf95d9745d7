"""The partitioner is Kafka's, to the bit."""

import pytest
from aiokafka.partitioner import murmur2
from hypothesis import given
from hypothesis import strategies as st

from headrace.bus.protocol import _murmur2, partition_of

GOLDEN = {  # the vectors of Kafka's own test, as signed 32-bit integers
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", GOLDEN)
def test_golden_vectors(key: bytes) -> None:
    """murmur2 of Kafka's own vectors."""
    assert _murmur2(key) == GOLDEN[key] & 0xFFFFFFFF


@given(st.binary(max_size=40), st.integers(1, 64))
def test_agrees_with_the_client(key: bytes, partitions: int) -> None:
    """Any key goes where aiokafka's default partitioner would put it."""
    assert partition_of(key, partitions) == (murmur2(key) & 0x7FFFFFFF) % partitions

"""Bookkeeping of prompts in flight."""

from headrace.bus.protocol import TopicPartition
from headrace.consumers.progress import Progress

P0, P1 = TopicPartition("prompts", 0), TopicPartition("prompts", 1)


def taken(*offsets: int) -> Progress:
    progress = Progress()
    for offset in offsets:
        assert progress.take(P0, offset)
    return progress


def test_slow_first() -> None:
    """Nothing is committed past a slow first prompt, however many later ones are finished."""
    progress = taken(4, 5, 9)
    progress.finish(P0, 5)
    progress.finish(P0, 9)
    assert progress.uncommitted() == {}
    progress.finish(P0, 4)
    assert progress.uncommitted() == {P0: 10}


def test_gaps_in_offsets() -> None:
    """The position is the last finished offset + 1, whatever gap follows."""
    progress = taken(0, 2, 6)
    progress.finish(P0, 0)
    progress.finish(P0, 2)
    assert progress.uncommitted() == {P0: 3}


def test_committed_once() -> None:
    """A position that is committed is not offered again until it moves."""
    progress = taken(0, 1)
    progress.finish(P0, 0)
    progress.committed(progress.uncommitted())
    assert progress.uncommitted() == {}
    progress.finish(P0, 1)
    assert progress.uncommitted() == {P0: 2}


def test_delivered_again() -> None:
    """A prompt in flight, or finished behind a slow one, is not taken a second time."""
    progress = taken(3, 4)
    progress.finish(P0, 4)
    assert not progress.take(P0, 3)
    assert not progress.take(P0, 4)
    assert progress.take(P0, 5)


def test_commit_without_effect() -> None:
    """A delivery below the committed position says that the commit was left out: it is made again."""
    progress = taken(0)
    progress.finish(P0, 0)
    progress.committed(progress.uncommitted())
    assert not progress.take(P0, 0)
    assert progress.uncommitted() == {P0: 1}


def test_lost_partition() -> None:
    """A lost partition is forgotten, the others stay; when it returns, all of it is new."""
    progress = taken(0, 1)
    progress.take(P1, 7)
    progress.finish(P1, 7)
    progress.lose([P0])
    progress.finish(P0, 0)
    assert progress.uncommitted() == {P1: 8}
    assert progress.partitions() == {P1}
    assert progress.take(P0, 0)

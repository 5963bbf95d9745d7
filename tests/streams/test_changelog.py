"""States through the changelog: what is written is what is restored, for about its own size."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_records import prompt, reward, rollout, step

from headrace.errors import WireError
from headrace.streams import changelog
from headrace.streams.changelog import Changelog, Entry
from headrace.streams.experience import ExperienceConfig, ExperienceJoin
from headrace.streams.fold import Fold
from headrace.streams.processor import Event
from headrace.wire.records import Experience, Record

CONFIG = ExperienceConfig(orphan_ms=1_000)


def stored(entries: Iterable[Entry], log: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
    """What compaction keeps."""
    log = {} if log is None else log
    for key, value in entries:
        log.pop(key, None)
        if value is not None:
            log[key] = value
    return log


def restored(log: dict[bytes, bytes]) -> Fold:
    fold = Fold(ExperienceJoin(CONFIG))
    fold.restore(log.items(), 0)
    return fold


def apply(fold: Fold, *records: Record) -> None:
    for record in records:
        fold.apply(Event("t", 0, 0, 0, record))


def test_one_record_for_one_batch() -> None:
    """However many events changed a key, its state is written once; a group that opened and closed leaves its
    memory only."""
    fold = Fold(ExperienceJoin(CONFIG))
    apply(fold, prompt("a"), *rollout("a", 0), prompt("b", size=1), *rollout("b", 0))
    assert [key for key, _ in fold.drain().entries] == [b"a", b"b"]
    assert fold.drain().entries == []
    apply(fold, *rollout("a", 0))
    assert fold.drain().entries == []


def test_timers_are_restored() -> None:
    """A restored group still closes at its deadline, and a closed one is still forgotten."""
    fold = Fold(ExperienceJoin(CONFIG))
    apply(fold, prompt("a", deadline_ms=50), step("a", 0, 0), prompt("b", size=1), *rollout("b", 0))
    again = restored(stored(fold.drain().entries))
    assert (again.open, again.settled, again.due_ms) == (1, 1, 51)
    again.advance(51)
    (output,) = again.drain().outputs
    assert isinstance(output.record, Experience) and output.record.closed == "timeout"
    while again.advance(10**12):
        pass
    assert sorted(again.drain().entries) == [(b"a", None), (b"b", None)]


def test_growing_state_is_not_written_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of 400 steps in 400 batches writes each step about once, plus one head: not its square."""
    monkeypatch.setattr(changelog, "HEAD_BYTES", 2_000)
    fold = Fold(ExperienceJoin(CONFIG))
    apply(fold, prompt("a"))
    log: dict[bytes, bytes] = {}
    written = 0
    for index in range(400):
        apply(fold, step("a", 0, index))
        entries = fold.drain().entries
        written += sum(len(value or b"") for _, value in entries)
        stored(entries, log)
    size = sum(map(len, log.values()))
    assert written < 10 * size
    assert max(map(len, log.values())) < 3_000
    again = restored(log)
    assert again.open_bytes == fold.open_bytes
    monkeypatch.setattr(changelog, "HEAD_BYTES", 1 << 30)
    apply(again, step("a", 0, 400))
    [(_, head)] = again.drain().entries
    assert len(changelog._decompressed(head or b"")) < 4_000, "what is sealed is not in the head again"
    apply(again, step("a", 0, 401, last=True), reward("a", 0, "tests", 1.0), reward("a", 0, "format", 1.0))
    apply(again, *rollout("a", 1))
    (output,) = (changes := again.drain()).outputs
    assert isinstance(output.record, Experience)
    assert [s.step for s in output.record.rollouts[0].steps] == list(range(402))
    assert stored(changes.entries, log).keys() == {b"a"}


def test_segment_larger_than_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment over the record limit is cut into chunks and comes back whole."""
    monkeypatch.setattr(changelog, "HEAD_BYTES", 2_000)
    monkeypatch.setattr(changelog, "CHUNK_BYTES", 100)
    fold = Fold(ExperienceJoin(CONFIG))
    apply(fold, prompt("a"), *(step("a", 0, index) for index in range(50)))
    log = stored(fold.drain().entries)
    assert len(log) > 3 and all(len(value) <= 100 for key, value in log.items() if b"\0" in key)
    assert restored(log).open_bytes == fold.open_bytes


@pytest.mark.parametrize("gone", [0, 1])
def test_lost_segment_is_accounted(monkeypatch: pytest.MonkeyPatch, gone: int) -> None:
    """A group whose segment is gone goes out failed and says what is missing; the others go on; nothing stays
    behind."""
    monkeypatch.setattr(changelog, "HEAD_BYTES", 500)
    fold = Fold(ExperienceJoin(CONFIG))
    log: dict[bytes, bytes] = {}
    for index in range(3):
        apply(fold, prompt("a"), step("a", 0, index), prompt("b"))
        stored(fold.drain().entries, log)
    del log[b"a\0%d.0" % gone]
    again = restored(log)
    changes = again.drain()
    (output,) = changes.outputs
    assert isinstance(output.record, Experience)
    assert (output.key, output.record.closed, output.record.rollouts) == ("a", "failed", ())
    assert output.record.reason == f"state: b'a\\x00{gone}.0' is no longer in the changelog"
    assert (again.open, again.settled, again.counts["lost"]) == (1, 1, 1)
    assert stored(changes.entries, log).keys() == {b"a", b"b"}


def test_stray_segments_are_removed() -> None:
    """Segments that no head names, left by a host without transactions, are counted and removed."""
    fold = restored({b"a\x000.0": b"anything"})
    assert fold.counts["stray"] == 1
    assert fold.drain().entries == [(b"a\x000.0", None)]


def test_forgetting_removes_everything() -> None:
    """A key that is forgotten leaves neither its head nor any chunk behind."""
    gone = Changelog(ExperienceJoin()).forget("a", (1, 2))
    assert gone == [(b"a\x000.0", None), (b"a\x001.0", None), (b"a\x001.1", None), (b"a", None)]


def test_damaged_state_is_named() -> None:
    """A head that is no state is refused with its key."""
    with pytest.raises(WireError, match="state of 'a'"):
        restored({b"a": b"\xc1"})


_RECORDS: list[Record] = [
    record
    for group in "ab"
    for record in (prompt(group, deadline_ms=40), *rollout(group, 0), *rollout(group, 1, attempt=2))
]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(_RECORDS), st.booleans(), st.booleans()), max_size=40))
def test_restarts_change_nothing(steps: list[tuple[Record, bool, bool]]) -> None:
    """Committing and starting anew from the changelog at any points gives the outcome of one uninterrupted
    run."""
    size, changelog.HEAD_BYTES = changelog.HEAD_BYTES, 300
    try:
        straight, broken = Fold(ExperienceJoin(CONFIG)), Fold(ExperienceJoin(CONFIG))
        log: dict[bytes, bytes] = {}
        out = []
        for now_ms, (record, commit, restart) in enumerate(steps):
            for fold in (straight, broken):
                fold.advance(now_ms)
                fold.apply(Event("t", 0, 0, now_ms, record))
            if commit or restart:
                changes = broken.drain()
                out += changes.outputs
                stored(changes.entries, log)
            if restart:
                broken = restored(log)
        changes = broken.drain()
        assert out + changes.outputs == straight.drain().outputs
        assert restored(stored(changes.entries, log)).open_bytes == straight.open_bytes
    finally:
        changelog.HEAD_BYTES = size

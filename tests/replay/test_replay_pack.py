"""Packs: a step of a run in one file replays without the log, and no changed byte gets by."""

import asyncio
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed_place import Place, messages, replayed, source_of

from headrace.bus.protocol import Message
from headrace.consumers import causes
from headrace.consumers.pack import Exported, export
from headrace.consumers.pack_file import CHUNK_BYTES, PackWriter
from headrace.consumers.pack_reader import PackReader
from headrace.consumers.pack_source import PackedSource
from headrace.consumers.replay import Replayed
from headrace.errors import ConfigError, StoreError, TrainingError
from headrace.store.blobs import Blobs
from headrace.trainer import provenance
from headrace.wire.codec import encode
from headrace.wire.records import Claim


async def exported(place: Place, first: int, last: int, path: Path, force: bool = False) -> Exported:
    async with place.opened() as bus:
        source = await source_of(place, bus)
        return await export(source, first, last, path, now=provenance.collect(), force=force)


async def from_pack(path: Path, first: int, last: int) -> list[Replayed]:
    with PackReader(path) as pack:
        return await replayed(await PackedSource.open(pack), first, last)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Three steps of two groups each: a malformed record, and one that is a claim, among them."""
    place = Place(tmp_path_factory.mktemp("trained"))

    async def scenario() -> None:
        async with place.opened() as bus:
            records = messages(place.groups(5), partition=0)
            junk = Message(
                records[0].topic, f"{place.run.name}-junk".encode(), b"\xc1", records[0].headers, 0
            )
            records[2] = await claimed(place)
            await bus.produce([*records[:3], junk, *records[3:]])
            await place.train(bus)

    asyncio.run(scenario())
    return place


async def claimed(place: Place) -> Message:
    """The third group as a claim check."""
    whole = place.groups(3)[2]
    packed = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(whole))
    blob = await Blobs.open(place.store).put(packed)
    light = msgspec.structs.replace(
        whole, rollouts=(), claim=Claim(uri=blob.uri, sha256=blob.sha256, bytes=blob.bytes)
    )
    value, headers = encode(light, source="join", now_ms=0, event_id=whole.group_id)
    return Message("experience", whole.group_id.encode(), value, headers, 0)


@pytest.fixture(scope="module")
def pack(trained: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "steps.hrpack"
    done = asyncio.run(exported(trained, 2, 3, path))
    assert (done.records, done.bytes, done.without_delta) == (4, path.stat().st_size, [])
    return path


def test_a_pack_replays_as_the_log_does(trained: Place, pack: Path, tmp_path: Path) -> None:
    """Claim and malformed record included: the same roots, units, drops and numbers, with log and store
    gone."""

    async def on_the_log() -> list[Replayed]:
        async with trained.opened() as bus:
            return await replayed(await source_of(trained, bus), 2, 3)

    there, here = asyncio.run(on_the_log()), asyncio.run(from_pack(pack, 2, 3))
    assert [done.recorded.step for done in here] == [2, 3]
    for one, other in zip(there, here, strict=True):
        assert other.equal
        assert one.result.state.root == other.result.state.root
        assert one.result.metrics == other.result.metrics
        assert [e.place for e in one.entries] == [e.place for e in other.entries]
    drops = [(d.group_id, d.reason) for d in here[0].result.admission.drops]
    assert drops == [(f"{trained.run.name}-junk", "malformed")]


def test_a_pack_knows_the_published_weights(pack: Path) -> None:
    """So that a step which differs can name its tensor: each version has its announced root."""

    async def scenario() -> None:
        with PackReader(pack) as opened:
            source = await PackedSource.open(opened)
            for done in await replayed(source, 2, 3):
                weights = await causes.recorded_weights(source, done.recorded.version_to)
                assert causes.compare(weights, done.result.state.masters) is None

    asyncio.run(scenario())


def test_only_the_steps_of_the_pack_can_be_asked_for(pack: Path) -> None:
    """The message says which they are."""

    async def recorded(step: int) -> None:
        with PackReader(pack) as opened:
            (await PackedSource.open(opened)).recorded(step)

    for step in (1, 4):
        with pytest.raises(TrainingError, match=f"expected a step of the pack, 2 to 3, got {step}"):
            asyncio.run(recorded(step))


def test_nothing_is_overwritten_and_nothing_half_written(trained: Place, pack: Path, tmp_path: Path) -> None:
    """An existing file stays unless forced; an export that fails leaves no file at all."""
    path = tmp_path / "kept.hrpack"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"kept.hrpack: exists already"):
        asyncio.run(exported(trained, 2, 3, path))
    assert path.read_bytes() == b"mine"
    asyncio.run(exported(trained, 2, 3, path, force=True))
    assert path.read_bytes() == pack.read_bytes()
    with pytest.raises(TrainingError):
        asyncio.run(exported(trained, 2, 9, tmp_path / "never.hrpack"))
    with pytest.raises(RuntimeError), PackWriter(tmp_path / "half.hrpack") as half:
        half.add("a", b"1")
        raise RuntimeError
    with pytest.raises(ConfigError, match=r"nowhere/x.hrpack: expected a place to write to"):
        asyncio.run(exported(trained, 2, 3, tmp_path / "nowhere" / "x.hrpack"))
    assert os.listdir(tmp_path) == ["kept.hrpack"]


def test_a_full_disk_is_an_error_that_names_the_pack(tmp_path: Path) -> None:
    """And not a traceback. /dev/full takes nothing."""
    with (
        pytest.raises(StoreError, match=r"x.hrpack: can't be written: No space left"),
        PackWriter(tmp_path / "x.hrpack") as full,
    ):
        full._file.close()
        full._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        full.add("a", b"1")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_changed_byte_is_refused(pack: Path, tmp_path: Path, share: float, flip: int) -> None:
    """Wherever it is: before anything of the pack is used, with the file and the part or byte in the
    message."""
    content = bytearray(pack.read_bytes())
    content[int(share * len(content))] ^= flip
    changed = tmp_path / "changed.hrpack"
    changed.write_bytes(content)
    with pytest.raises(StoreError, match=r"changed.hrpack: (part '[^']+'|bytes? \d+)"), PackReader(changed):
        pass


def test_every_byte_of_a_small_container(tmp_path: Path) -> None:
    """Every byte changed in turn, and the file cut at every length: refused. A changed byte of a part's
    content names the part."""
    path = tmp_path / "small.hrpack"
    with PackWriter(path) as writer:
        writer.add("a", b"first " * 9)
        writer.add("b/c", b"")
        writer.add("d", random.Random(0).randbytes(90))
    whole = path.read_bytes()
    for index in range(len(whole)):
        for content in (whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :], whole[:index]):
            path.write_bytes(content)
            with pytest.raises(StoreError), PackReader(path):
                pass
    path.write_bytes(whole.replace(random.Random(0).randbytes(90)[:40], b"x" * 40))
    with (
        pytest.raises(StoreError, match=r"part 'd': expected SHA-256 \w+, got \w+: it was changed"),
        PackReader(path),
    ):
        pass
    path.write_bytes(whole + b"\xc0")
    with (
        pytest.raises(StoreError, match=r"expected the end of the file after its seal, got 1 bytes more"),
        PackReader(path),
    ):
        pass


def test_parts_larger_than_a_chunk_and_parts_that_shrink_to_nothing(tmp_path: Path) -> None:
    """Both come back; unknown parts are in nobody's way."""
    path = tmp_path / "large.hrpack"
    large = random.Random(1).randbytes(2 * CHUNK_BYTES + 5)
    with PackWriter(path) as writer:
        writer.add("large", large)
        writer.add("zeros", bytes(9 << 20))
    with PackReader(path) as reader:
        assert reader.names == ["large", "zeros"]
        assert reader.read("large") == large
        assert reader.read("zeros") == bytes(9 << 20)


def hostile() -> Iterator[tuple[str, list[object], str]]:
    """Whole, sealed files that no honest writer makes: (what, objects after the head, message)."""

    def part(name: str, content: bytes, **other: object) -> list[object]:
        head = {"part": name, "bytes": 5, "encoding": "zstd", "stored": len(content)}
        return [head | {"sha256": hashlib.sha256(content).hexdigest()} | other, content]

    frame = zstandard.ZstdCompressor().compress(b"hello")
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(b"hello")
    yield (
        "a bomb that says so",
        part("a", bomb, bytes=64 << 20),
        r"part 'a': .*expected at most \d+ bytes out of",
    )
    yield (
        "a bomb that lies",
        part("a", bomb),
        r"part 'a': expected a frame of 5 bytes, got one that declares 67108864",
    )
    yield "a frame without a size", part("a", silent), r"expected a frame of 5 bytes"
    yield "more behind the frame", part("a", frame + b"more"), r"expected one zstandard frame"
    yield "no frame", part("a", b"hello"), r"expected one zstandard frame"
    yield (
        "the same part twice",
        [*part("a", frame), *part("a", frame)],
        r"part 'a': byte \d+: expected it once",
    )
    yield "a path as a name", part("../../etc/passwd", frame), r"expected the name of a part, got '\.\./"
    yield "an absolute path", part("/etc/passwd", frame), r"expected the name of a part"
    yield "a negative size", part("a", frame, bytes=-1), r"got -1"
    yield "a huge size", part("a", frame, stored=1 << 40), r"expected at most \d+ bytes, got 1099511627776"
    yield "a foreign object", [[1, 2, 3]], r"expected a part or the seal, got ValueError"
    yield (
        "plain of another size",
        part("a", b"hello", encoding="plain", bytes=9),
        r"expected 5 bytes, as stored, got 9",
    )
    yield (
        "text for bytes",
        [part("a", frame)[0], "x" * len(frame)],
        r"part 'a': byte \d+: expected \d+ bytes, got 'xx",
    )


@pytest.mark.parametrize(
    ("what", "objects", "message"), [pytest.param(*case, id=case[0]) for case in hostile()]
)
def test_hostile_files(tmp_path: Path, what: str, objects: list[object], message: str) -> None:
    """A sealed file is not yet an honest one: bounds hold before anything is decompressed."""
    path = tmp_path / "hostile.hrpack"
    content = b"".join(msgpack.packb(o) for o in ({"format": "headrace.pack", "version": 1}, *objects))
    path.write_bytes(content + msgpack.packb({"seal": hashlib.sha256(content).digest()}))
    with pytest.raises(StoreError, match=message), PackReader(path) as reader:
        reader.read("a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"byte 0: expected the head of a headrace.pack, got the end of the file"),
        (b"PK\x03\x04", r"byte 0: expected the head of a headrace.pack, got 80"),
        (b"\x80\x04\x95pickle", r"byte 0: expected the head of a headrace.pack, got \{\}"),
        (
            msgpack.packb({"format": "headrace.pack", "version": 2}),
            r"byte 0: expected version 1 of headrace.pack, got 2: another Headrace wrote it",
        ),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    """Something else under the name, or a format that this reader does not know."""
    path = tmp_path / "other.hrpack"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=message), PackReader(path):
        pass


def rewritten(pack: Path, into: Path, change: dict[str, bytes | None]) -> Path:
    """A pack with other parts, sealed anew."""
    with PackReader(pack) as reader, PackWriter(into) as writer:
        for name in reader.names:
            content = change.get(name, reader.read(name))
            if content is not None:
                writer.add(name, content)
    return into


def test_parts_that_contradict_each_other(pack: Path, tmp_path: Path) -> None:
    """Sealed anew by somebody: a missing record, another state, ledger records exchanged, a changed claim."""
    with PackReader(pack) as reader:
        names = reader.names
        parts = {name: reader.read(name) for name in names}
    record = next(name for name in names if name.startswith("record/"))
    blob = next(name for name in names if name.startswith("blob/"))
    manifest = msgspec.json.decode(parts["manifest"])
    cases: list[tuple[dict[str, bytes | None], str]] = [
        ({record: None}, r"experience\[0\]@\d+: expected the record, consumed by step \d, found none"),
        ({"state": None}, r"expected a part 'state', found none"),
        ({"ledger/3": parts["ledger/2"]}, r"part 'ledger/3': expected step 3 of run .* got step 2"),
        ({"ledger/2": parts["weights/2"]}, r"part 'ledger/2': expected TrainStep, got WeightsPublished"),
        ({"ledger/2": b"\xc1"}, r"part 'ledger/2': expected a record as it lies"),
        ({"manifest": b"{"}, r"part 'manifest'"),
        (
            {"manifest": msgspec.json.encode(manifest | {"first": 3})},
            r"part 'state': expected the state after step 2, got 1",
        ),
        (
            {"manifest": msgspec.json.encode(manifest | {"model": manifest["model"] | {"layers": 1}})},
            r"part 'state': expected a checkpoint of this model",
        ),
        (
            {"manifest": msgspec.json.encode(manifest | {"model": manifest["model"] | {"layers": 1 << 40}})},
            r"part 'manifest': expected up to 4096 layers, got 1099511627776",
        ),
        (
            {"manifest": msgspec.json.encode(manifest | {"model": manifest["model"] | {"width": 7}})},
            r"part 'manifest': model: expected vocabulary, width",
        ),
        (
            {record: parts["ledger/2"]},
            r"part 'record/.*': expected the record of that place, got train.steps",
        ),
        ({blob: b"other"}, r"trained on: claim: .*blob/\w+: expected its SHA-256, got"),
    ]
    for index, (change, message) in enumerate(cases):
        path = rewritten(pack, tmp_path / f"{index}.hrpack", change)
        with pytest.raises(StoreError, match=message):
            asyncio.run(from_pack(path, 2, 3))


def test_records_that_are_gone_are_named(trained: Place, tmp_path: Path) -> None:
    """An export needs the claims too; what is missing is in the message, and no file is left."""

    async def scenario() -> None:
        async with trained.opened() as bus:
            source = await source_of(trained, bus)
            step = msgspec.structs.replace(
                source.ledger.steps[2],
                consumed=tuple(
                    msgspec.structs.replace(c, offset=c.offset + 900) for c in source.ledger.steps[2].consumed
                ),
            )
            source.ledger.steps[2] = step
            await export(source, 3, 3, tmp_path / "gone.hrpack", now=provenance.collect())

    with pytest.raises(StoreError, match=r"experience\[0\]@90\d.*have left the log"):
        asyncio.run(scenario())
    assert not list(tmp_path.iterdir())


@pytest.mark.kafka
def test_steps_of_a_run_on_kafka(kafka: str, tmp_path: Path) -> None:
    """Exported from the broker, they replay equal without it."""
    place = Place(tmp_path, f"kafka:{kafka}", name=f"pack{tmp_path.name}")
    path = tmp_path / "kafka.hrpack"

    async def scenario() -> None:
        async with place.opened() as bus:
            await bus.produce(messages(place.groups(6)))
            await place.train(bus)
        await exported(place, 2, 3, path)
        assert [done.equal for done in await from_pack(path, 2, 3)] == [True, True]

    asyncio.run(scenario())

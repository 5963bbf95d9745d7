"""Several versions at once: each user has a side, numbers are what they are alone, the revoked is gone."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from tiny_model import CONFIG, TINY, complete, generation, numbers, run_out, served, submit, tiny_engine

from headrace.errors import InferenceError, InferenceUnavailable, WeightsUnfit
from headrace.inference.engine import Engine
from headrace.inference.replica import Replica
from headrace.inference.weights import read
from headrace.policy import checkpoint
from headrace.rpc.generation import Generation
from headrace.rpc.messages import request_message, request_of
from headrace.wire.release import in_cohort, place_of

STABLE, CANARY, NEWEST = (served(version, seed) for version, seed in ((1, 1), (2, 2), (3, 3)))


def releasing(share: float = 0.5) -> Engine:
    """Newest 3, stable 1, canary 2."""
    engine = Engine(TINY, CONFIG)
    changes = [engine.install(NEWEST), engine.hold(STABLE), engine.hold(CANARY)]
    changes.append(engine.release("r", stable=1, canary=2, share=share))
    engine.step()
    assert all(change.exception() is None for change in changes)
    return engine


def live(user: str, version: int | None = None) -> Generation:
    return generation(f"live-{user}", lane="live", user=user, prefix=40, version=version)


def of_side(canary: bool, share: float = 0.5) -> str:
    """A user who is in the cohort of version 2, or not."""
    return next(u for u in map(str, range(1000)) if in_cohort("r", 2, u, share) is canary)


def test_cohorts_are_nested_and_of_their_size() -> None:
    """Who is among the 1 % is among the 10 % and the 50 %; of 20,000 users about as many as asked for; other
    users for another version."""
    users = [f"u{i}" for i in range(20_000)]
    cohorts = [{u for u in users if in_cohort("r", 7, u, share)} for share in (0.01, 0.1, 0.5, 1.0)]
    assert cohorts[0] < cohorts[1] < cohorts[2] < cohorts[3] == set(users)
    assert [len(c) for c in cohorts[:3]] == pytest.approx([200, 2000, 10_000], rel=0.15)
    other = {u for u in users if in_cohort("r", 8, u, 0.1)}
    assert len(other & cohorts[1]) == pytest.approx(200, rel=0.3)
    assert place_of("r", 7, "u1") == place_of("r", 7, "u1") != place_of("other", 7, "u1")
    assert not in_cohort("r", 7, "", 1.0)


def test_each_side_has_the_bits_of_its_version_alone() -> None:
    """Rollouts, stable and canary users decoded in the same steps: tokens, log-probs and routes are those of
    engines that serve one version only."""
    requests = [live(of_side(False)), live(of_side(True)), generation("rollout", members=3, prefix=40)]
    together = complete(releasing(), *requests)
    for request, found, version in zip(requests, together, (1, 2, 3), strict=True):
        (alone,) = complete(tiny_engine(seed=version), request)
        assert {m: numbers(c) for m, c in found.items()} == {m: numbers(c) for m, c in alone.items()}
        assert {c.weights_version for c in found.values()} == {version}
        assert {span.weights_version for c in found.values() for span in c.spans} == {version}
    assert [found[0].cohort for found in together] == ["stable", "canary", ""]


def test_same_prompt_is_computed_once_a_version() -> None:
    """Two sides never share what was computed of a prompt, though its tokens are equal."""
    engine = releasing()
    first, second = live(of_side(False)), live(of_side(True))
    second = msgspec.structs.replace(second, prefix_tokens=first.prefix_tokens)
    complete(engine, first, second, first)
    assert engine.status().tokens_prefilled == 2 * 40


def test_a_revoked_version_stops_at_the_next_step() -> None:
    """In the middle of a canary user's answer its version is revoked: the rest is computed by the stable one,
    and the answer says so; new requests of that user have the stable version."""
    engine = releasing()
    user = of_side(True)
    _, collector = submit(engine, live(user))
    for _ in range(3):
        engine.step()
    engine.release("r", stable=1, canary=None, share=0.0)
    run_out(engine)
    spans = [(s.start, s.end, s.weights_version) for s in collector.done[0].spans]
    assert spans == [(0, 3, 2), (3, 8, 1)]
    (after,) = complete(engine, live(user))
    assert (after[0].cohort, after[0].weights_version) == ("stable", 1)
    assert [version for version, _ in engine.status().hosted] == [3, 1]


def test_memory_is_bounded() -> None:
    """A fourth set is refused; one that is hosted already costs nothing, and what a release does not name is
    let go."""
    engine = releasing()
    refused, again = engine.hold(served(9, 9)), engine.hold(served(2, 2))
    engine.step()
    with pytest.raises(InferenceError, match="expected at most 3 versions"):
        refused.result()
    assert again.exception() is None
    assert len(engine.status().hosted) == 3
    ended = engine.release("r", stable=None, canary=None, share=0.0)
    engine.step()
    assert ended.exception() is None
    assert [version for version, _ in engine.status().hosted] == [3]


def test_promotion_needs_no_load() -> None:
    """The canary becomes the stable version, and the newest one too: one set for both names."""
    engine = releasing()
    engine.release("r", stable=2, canary=None, share=0.0)
    engine.install(served(2, 2))
    engine.step()
    assert engine.status().hosted == ((2, CANARY.root),)
    assert engine.status().stable == 2


def test_a_request_may_name_its_version() -> None:
    """Any hosted version can be asked for, in either lane, and is kept to the end; another is unavailable."""
    engine = releasing()
    _, collector = submit(engine, live(of_side(True), version=1))
    engine.step()
    engine.release("r", stable=2, canary=None, share=0.0)
    run_out(engine)
    assert {span.weights_version for span in collector.done[0].spans} == {1}
    assert collector.done[0].cohort == ""
    with pytest.raises(InferenceUnavailable, match=r"expected weights 1 to serve, got \[3, 2\]"):
        submit(engine, live("u", version=1))


def test_a_release_without_its_weights_is_refused() -> None:
    """Version 5 is not hosted: nothing changes; a release cannot end where nothing else could serve."""
    engine = Engine(TINY, CONFIG)
    engine.hold(STABLE)
    missing = engine.release("r", stable=5, canary=None, share=0.0)
    engine.release("r", stable=1, canary=None, share=0.0)
    ending = engine.release("r", stable=None, canary=None, share=0.0)
    engine.step()
    with pytest.raises(InferenceError, match=r"expected hosted versions, got \[5\]"):
        missing.result()
    with pytest.raises(InferenceError, match="newest version to fall back on"):
        ending.result()
    (answer,) = complete(engine, live("u"))
    assert answer[0].weights_version == 1
    with pytest.raises(InferenceUnavailable, match="expected weights to serve"):
        submit(engine, generation())


@pytest.mark.parametrize("plant", ["nan", "overflow"])
def test_weights_that_are_not_finite_are_unfit(tmp_path: Path, plant: str) -> None:
    """Their root is right; the replica says that no replica could serve them, and serves on. Finite numbers
    that overflow are found by trying them."""
    broken = dict(STABLE.tensors)
    names = ["final_norm"] if plant == "nan" else [name for name in broken if name.endswith(("up", "down"))]
    for name in names:
        broken[name] = broken[name] * (float("nan") if plant == "nan" else 1e38)
    path = tmp_path / "broken.safetensors"
    root = checkpoint.save(path, checkpoint.to_bf16(broken))
    with pytest.raises(WeightsUnfit, match="expected finite"):
        read(path, version=4, root=root, config=TINY)

    async def scenario() -> None:
        async with Replica(TINY, CONFIG) as replica:
            await replica.install(STABLE)
            loaded = await replica.load(version=4, path=path, root=root, hold=True)
            assert (loaded.serving, loaded.unfit) == (False, True)
            wrong = await replica.load(version=4, path=path, root="00", hold=True)
            assert (wrong.serving, wrong.unfit) == (False, False)
            assert [version for version, _ in replica.status().hosted] == [1]

    asyncio.run(scenario())


def test_user_and_version_travel() -> None:
    """A request names a user and version 0, or none; both arrive."""
    for version in (0, None):
        request = live("u1", version=version)
        assert request_of(request_message(request)) == request

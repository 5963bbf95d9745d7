"""Requests through the engine, step by step: lanes, ends, cancelling, swaps, shared prompts."""

import msgspec
import pytest
from tiny_model import CONFIG, TINY, complete, generation, numbers, run_out, served, submit, tiny_engine

from headrace.clock import ManualClock
from headrace.errors import InferenceError, InferenceUnavailable, Overloaded
from headrace.inference import scheduler
from headrace.inference.engine import Engine
from headrace.rpc.generation import Sequence
from headrace.wire.records import Span


def test_nothing_is_served_before_the_first_weights() -> None:
    """Without weights a request gets an honest error and nothing queues."""
    engine = Engine(TINY, CONFIG)
    with pytest.raises(InferenceUnavailable, match="expected weights to serve, got none yet"):
        submit(engine, generation())
    assert not engine.step()
    assert engine.status().queued_rollout == 0


def test_two_updates_during_one_generation() -> None:
    """Two tokens under version 1, three under 2, one under 3: the spans say so, and the start was under 1."""
    engine = tiny_engine()
    _, collector = submit(engine, generation(tokens_max=6))
    for version, steps in ((2, 2), (3, 3)):
        for _ in range(steps):
            engine.step()
        engine.install(served(version, seed=version))
    run_out(engine)
    done = collector.done[0]
    assert done.weights_version == 1
    assert done.spans == (
        Span(start=0, end=2, weights_version=1),
        Span(start=2, end=5, weights_version=2),
        Span(start=5, end=6, weights_version=3),
    )


def test_new_requests_never_use_an_old_prompt() -> None:
    """After a swap the same prompt gives what an engine that never knew the old weights gives."""
    expected = complete(tiny_engine(seed=2), generation(members=2))[0]
    engine = tiny_engine(seed=1)
    complete(engine, generation(members=2))
    engine.install(served(2, seed=2))
    found = complete(engine, generation(members=2))[0]
    assert [numbers(found[m]) for m in (0, 1)] == [numbers(expected[m]) for m in (0, 1)]
    assert found[0].spans == (Span(start=0, end=8, weights_version=2),)


def test_what_waited_through_a_swap_starts_under_the_new_version() -> None:
    """Queued under version 1, started under 2: lag counts from the start."""
    engine = tiny_engine(msgspec.structs.replace(CONFIG, slots=2, live_slots=1))
    _, collector = submit(engine, generation(members=2))
    engine.step()
    engine.install(served(2, seed=2))
    run_out(engine)
    assert (collector.done[0].weights_version, collector.done[1].weights_version) == (1, 2)
    assert [span.weights_version for span in collector.done[1].spans] == [2]


def test_a_cancelled_swap_is_no_swap() -> None:
    """A caller that gave its swap up before it happened changes nothing and breaks nothing."""
    engine = tiny_engine()
    assert engine.install(served(2, seed=2)).cancel()
    assert complete(engine, generation())[0][0].weights_version == 1


def test_a_group_pays_for_its_prompt_once() -> None:
    """Eight members and a second request of the same 70 tokens prefill 70; routes cover 70 + 8 - 1 tokens
    each."""
    engine = tiny_engine()
    first = complete(engine, generation(members=8))[0]
    complete(engine, generation(members=8, seed=9))
    assert engine.status().tokens_prefilled == 70
    assert engine.status().tokens_generated == 2 * 8 * 8
    assert {done.routes_shape for done in first.values()} == {(77, 2, 2)}
    assert all(len(done.routes) == 77 * 2 * 2 for done in first.values())


def test_stop_token_is_kept_and_ends() -> None:
    """The third token as stop token: three tokens, finish `stop`, and only two of them fed forward."""
    engine = tiny_engine()
    free = complete(engine, generation())[0][0]
    stop = free.tokens[2]
    index = free.tokens.index(stop)
    done = complete(engine, generation(stop_tokens=(stop,)))[0][0]
    assert (done.tokens, done.finish) == (free.tokens[: index + 1], "stop")
    assert done.routes_shape[0] == 70 + index
    assert free.finish == "length"


def test_the_context_ends_a_sequence() -> None:
    """A prompt of 187 in a context of 192 leaves five tokens, whatever was asked; no more is an error."""
    engine = tiny_engine()
    done = complete(engine, generation(prefix=187, tokens_max=50))[0][0]
    assert (len(done.tokens), done.finish) == (5, "length")
    with pytest.raises(InferenceError, match="expected room for a token"):
        submit(engine, generation(prefix=192))


def test_live_overtakes_rollouts() -> None:
    """With every rollout slot taken and more waiting, a live request ends before the next rollout starts."""
    clock = ManualClock()
    engine = tiny_engine(msgspec.structs.replace(CONFIG, slots=3, live_slots=1), clock=clock)
    _, rollouts = submit(engine, generation(members=6, tokens_max=5))
    engine.step()
    _, live = submit(engine, generation("live", lane="live", tokens_max=3))
    while engine.step():
        clock.advance(1)
    assert live.done[0].ended_ms < min(rollouts.done[m].started_ms for m in range(2, 6))
    assert len(rollouts.done) == 6


def test_only_the_oldest_rollouts_go_on_beside_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rollouts run, two may go on while live users are about: in every second step of three live tokens,
    and a step longer, the two oldest do, then all; each ends with the numbers that it has without live."""
    monkeypatch.setattr(scheduler, "LIVE_ROUNDS", 2)
    monkeypatch.setattr(scheduler, "LIVE_STEPS", 2)
    config = msgspec.structs.replace(CONFIG, beside_live_rows=2)
    alone = complete(tiny_engine(config), generation(members=6))[0]
    engine = tiny_engine(config)
    _, rollouts = submit(engine, generation(members=6))
    engine.step()
    _, live = submit(engine, generation("live", lane="live", tokens_max=3))
    made = []
    for _ in range(5):
        before = engine.status().tokens_generated
        engine.step()
        made.append(engine.status().tokens_generated - before)
    assert made == [1, 3, 1, 2, 6]
    assert live.done[0].finish == "length"
    run_out(engine)
    assert [numbers(rollouts.done[m]) for m in range(6)] == [numbers(alone[m]) for m in range(6)]


def test_prompts_of_rollouts_are_few_beside_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a live sequence one new prompt of a rollout is computed in every second step, without live as
    many as `step_tokens` holds."""
    monkeypatch.setattr(scheduler, "LIVE_STEPS", 2)
    engine = tiny_engine()
    submit(engine, generation("live", lane="live", tokens_max=6))
    engine.step()
    for name in ("a", "bb", "ccc"):
        submit(engine, generation(name))
    prefilled = []
    for _ in range(4):
        before = engine.status().tokens_prefilled
        engine.step()
        prefilled.append(engine.status().tokens_prefilled - before)
    assert prefilled == [0, 70, 0, 70]


def test_cancel_frees_slots_and_queue() -> None:
    """Ten requests cancelled, running or waiting: every slot and place is free, what was written is
    reported."""
    engine = tiny_engine()
    for _ in range(10):
        ticket, collector = submit(engine, generation(members=30, stream_tokens=True))
        engine.step()
        engine.step()
        assert engine.status().slots_used == 10
        engine.cancel(ticket)
        engine.cancel(ticket)
        engine.step()
        assert (engine.status().slots_used, engine.status().queued_rollout) == (0, 0)
        assert {done.finish for done in collector.done.values()} == {"cancelled"}
        assert [len(collector.done[m].tokens) for m in (0, 9, 10, 29)] == [2, 2, 0, 0]
        after, alone = (complete(some, generation("after"))[0][0] for some in (engine, tiny_engine()))
        assert numbers(after) == numbers(alone)


def test_cancel_after_the_end_does_nothing() -> None:
    """A ticket whose request has ended says nothing more."""
    engine = tiny_engine()
    ticket, collector = submit(engine, generation())
    run_out(engine)
    before = len(collector.progress)
    engine.cancel(ticket)
    run_out(engine)
    assert len(collector.progress) == before


def test_a_full_queue_is_overloaded_and_recovers() -> None:
    """401 do not fit in a queue of 400 ever; 10 do not fit now, and do once the queue has moved."""
    engine = tiny_engine()
    with pytest.raises(InferenceError, match="at most 400 sequences, got 401"):
        submit(engine, generation(members=401))
    submit(engine, generation(members=395, tokens_max=1))
    with pytest.raises(Overloaded, match="got 395 of 400 waiting"):
        submit(engine, generation("h", members=10))
    engine.step()
    submit(engine, generation("h", members=10))
    run_out(engine)
    assert engine.status().slots_used == 0


def test_streamed_pieces_are_the_completion() -> None:
    """Progress after each step, one token each; together they are the completion."""
    engine = tiny_engine()
    _, collector = submit(engine, generation(members=2, stream_tokens=True))
    run_out(engine)
    for member in (0, 1):
        pieces = [item for item in collector.progress if item.member == member]
        assert [len(piece.tokens) for piece in pieces] == [1] * 8
        done = collector.done[member]
        assert sum((piece.tokens for piece in pieces), ()) == done.tokens
        assert sum((piece.logp for piece in pieces), ()) == done.logp


def test_a_long_turn_does_not_stall_the_others() -> None:
    """While 60 tokens of an earlier turn are fed in chunks of 8, a running request gets a token every
    step."""
    engine = tiny_engine(msgspec.structs.replace(CONFIG, chunk_tokens=8))
    _, running = submit(engine, generation("a", stream_tokens=True, tokens_max=40))
    engine.step()
    turn = (Sequence(member=0, own_tokens=tuple(range(60))),)
    _, late = submit(engine, generation("b", sequences=turn, stream_tokens=True))
    for step in range(1, 9):
        engine.step()
        assert len(running.progress) == 1 + step
        assert bool(late.progress) == (step == 8)


def test_prompts_of_one_step_are_bounded() -> None:
    """Of five prompts of 70 tokens, a step of 150 computes two; one over the bound still runs, alone."""
    engine = tiny_engine(msgspec.structs.replace(CONFIG, step_tokens=150))
    for index in range(5):
        submit(engine, generation(f"{'x' * index}", prefix=70))
    engine.step()
    assert engine.status().tokens_prefilled == 140
    run_out(engine)
    submit(engine, generation("long" * 9, prefix=180))
    engine.step()
    assert engine.status().tokens_prefilled == 5 * 70 + 180


def test_earlier_turns_of_one_step_are_bounded() -> None:
    """Four turns of 40 tokens start together with room for 64 tokens a step: after one step a decoding
    request has its token, and one turn is fed; three steps feed all four."""
    engine = tiny_engine(msgspec.structs.replace(CONFIG, step_tokens=64))
    _, running = submit(engine, generation("a", stream_tokens=True, tokens_max=40))
    engine.step()
    turn = tuple(Sequence(member=member, own_tokens=tuple(range(40))) for member in range(4))
    _, late = submit(engine, generation("a", sequences=turn, stream_tokens=True))
    started = []
    for step in range(1, 4):
        engine.step()
        assert len(running.progress) == 1 + step
        started.append(len({item.member for item in late.progress}))
    assert started == [1, 3, 4]

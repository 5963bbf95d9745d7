"""The same request gives the same bits, whatever else is going on."""

import msgspec
import pytest
import torch
from tiny_model import (
    CONFIG,
    TINY,
    complete,
    generation,
    numbers,
    run_out,
    served,
    submit,
    tiny_engine,
    tokens,
)

from headrace.inference.config import InferenceConfig
from headrace.inference.engine import Engine
from headrace.inference.sampler import Draw, sample
from headrace.inference.weights import ServedWeights
from headrace.kernels.invariant import log_probs
from headrace.policy import checkpoint
from headrace.policy.decode import Decoder
from headrace.policy.dialogue import prompt_tokens
from headrace.policy.tree import MISSING, Group, tree_logp
from headrace.rpc.generation import Generation, Sequence

SECOND_TURN = generation(
    "second",
    prefix=100,
    sequences=(
        Sequence(member=0, own_tokens=tokens(67, salt=3)),
        Sequence(member=1, own_tokens=tokens(5, salt=4)),
        Sequence(member=2),
    ),
    temperature=0.7,
)


def crowd(count: int) -> list[Generation]:
    return [
        generation(
            f"crowd-{index}",
            prefix=1 + (17 * index) % 120,
            members=1 + index % 3,
            tokens_max=1 + index % 11,
            temperature=(0.0, 0.7, 1.0)[index % 3],
            lane="live" if index % 5 == 0 else "rollout",
        )
        for index in range(count)
    ]


def test_alone_and_among_forty_others() -> None:
    """Tokens, log-probs and routes of a request are equal alone and in a full engine, wherever it queues."""
    alone = complete(tiny_engine(), SECOND_TURN)[0]
    for place in (0, 20, 40):
        others = crowd(40)
        together = complete(tiny_engine(), *others[:place], SECOND_TURN, *others[place:])[place]
        assert [numbers(together[m]) for m in range(3)] == [numbers(alone[m]) for m in range(3)]


@pytest.mark.parametrize(
    "change",
    [{"chunk_tokens": 1}, {"chunk_tokens": 7}, {"step_tokens": 16}, {"slots": 3}, {"prefix_cache_tokens": 0}],
)
def test_chunks_slots_and_cache_do_not_show(change: dict[str, int]) -> None:
    """However prompts and earlier turns are cut, whatever is cached and few slots there are: the same
    bits."""
    expected = complete(tiny_engine(), SECOND_TURN)[0]
    config: InferenceConfig = msgspec.structs.replace(CONFIG, **change)
    found = complete(tiny_engine(config), *crowd(3), SECOND_TURN)[3]
    assert [numbers(found[m]) for m in range(3)] == [numbers(expected[m]) for m in range(3)]


def test_sampling_does_not_depend_on_threads_or_rows() -> None:
    """Forty rows sampled on one thread, on two, and each row alone: the same tokens and log-probs."""
    logits_RV = torch.randn(40, 2048, generator=torch.Generator().manual_seed(0)) * 3
    draws = [Draw(temperature=0.7, greedy=row % 4 == 0, key=row // 2, position=row) for row in range(40)]
    one = sample(logits_RV, draws)
    try:
        torch.set_num_threads(2)
        two = sample(logits_RV, draws)
    finally:
        torch.set_num_threads(1)
    alone = [sample(logits_RV[row : row + 1], [draw]) for row, draw in enumerate(draws)]
    assert one == two == ([token for (token,), _ in alone], [logp for _, (logp,) in alone])


def test_swap_to_identical_weights() -> None:
    """A reload of equal weights in mid-generation changes the spans and nothing else."""
    expected = complete(tiny_engine(), SECOND_TURN)[0]
    engine = tiny_engine()
    _, collector = submit(engine, SECOND_TURN)
    for _ in range(4):
        engine.step()
    engine.install(served(2, seed=1))
    run_out(engine)
    assert [numbers(collector.done[m]) for m in range(3)] == [numbers(expected[m]) for m in range(3)]
    assert [span.weights_version for span in collector.done[1].spans] == [1, 2]


def test_seed_group_and_member_each_change_the_samples() -> None:
    """Another seed, group or member samples otherwise; asking again samples the same."""
    request = generation(members=2, tokens_max=16)
    engine = tiny_engine()
    first = complete(engine, request)[0]
    assert complete(engine, request)[0][0].tokens == first[0].tokens
    other_seed = complete(engine, msgspec.structs.replace(request, seed=6))[0]
    other_group = complete(engine, msgspec.structs.replace(request, group_id="h"))[0]
    assert len({first[0].tokens, first[1].tokens, other_seed[0].tokens, other_group[0].tokens}) == 4


@pytest.mark.parametrize("first", [1, 3, 7])
def test_a_turn_cut_in_two_is_the_same_turn(first: int) -> None:
    """Eight tokens in one request, or some of them and the rest in a second request: the noise belongs to the
    absolute position, so tokens and log-probs are the same."""
    whole = complete(tiny_engine(), generation())[0][0]
    head = complete(tiny_engine(), generation(tokens_max=first))[0][0]
    rest = (Sequence(member=0, own_tokens=head.tokens),)
    tail = complete(tiny_engine(), generation(sequences=rest, tokens_max=8 - first))[0][0]
    assert head.tokens + tail.tokens == whole.tokens
    assert head.logp + tail.logp == whole.logp
    assert tail.routes == whole.routes


def test_logp_and_routes_are_those_of_the_trainer() -> None:
    """The packed tree of the trainer, with the recorded routes, gives the engine's log-probs bit for bit, at
    temperature 0.7, over two turns."""
    engine = tiny_engine()
    first = complete(engine, generation("two", prefix=100, members=3, temperature=0.7, tokens_max=20))[0]
    turns = tuple(Sequence(member=m, own_tokens=first[m].tokens + tokens(9 + m, salt=m)) for m in range(3))
    asked = generation("two", prefix=100, sequences=turns, temperature=0.7, tokens_max=30)
    second = complete(engine, asked)[0]
    own = [list(turns[m].own_tokens + second[m].tokens) for m in range(3)]
    output = tree_logp(served(1, seed=1).tensors, TINY, [Group(list(asked.prefix_tokens), own)], 0.7)
    for member in range(3):
        logp_T = output.logp[0][member].tolist()
        given = len(turns[member].own_tokens)
        assert logp_T[: len(first[member].tokens)] == list(first[member].logp)
        assert logp_T[given:] == list(second[member].logp)


def test_the_seed_on_policy_mismatch_is_zero() -> None:
    """The shipped model at temperature 1: the trainer's log-probs minus the engine's are exactly 0, and with
    the engine's routes replayed no route disagrees."""
    model, tensors, tokenizer = checkpoint.load_seed()
    engine = Engine(model, CONFIG)
    engine.install(ServedWeights(version=0, root=checkpoint.weights_root(tensors), tensors=tensors))
    engine.step()
    prompt = tuple(prompt_tokens(tokenizer, "def f ( a , b ) :\n\treturn a", " b"))
    done = complete(engine, generation("seed", prefix_tokens=prompt, members=4, tokens_max=40))[0]
    shape = (-1, model.layers, model.experts_active)
    routes = [torch.frombuffer(bytearray(done[m].routes), dtype=torch.uint8).view(shape) for m in range(4)]
    missing = torch.full((1, model.layers, model.experts_active), MISSING, dtype=torch.uint8)
    group = Group(
        list(prompt),
        [list(done[m].tokens) for m in range(4)],
        routes[0][: len(prompt)],
        [torch.cat((routes[m][len(prompt) :], missing)) for m in range(4)],
    )
    output = tree_logp(tensors, model, [group], 1.0)
    assert [output.logp[0][m].tolist() for m in range(4)] == [list(done[m].logp) for m in range(4)]
    assert output.route_disagreements == 0


def test_logp_is_taken_at_the_sampling_temperature() -> None:
    """The first token's log-prob is log_softmax(logits / 0.7) of it; greedy at temperature 0 reports
    temperature 1."""
    request = generation(members=1, tokens_max=1, temperature=0.7)
    engine = tiny_engine()
    prefix = Decoder(TINY, 1, 16).prefill(served(1, seed=1).tensors, [list(request.prefix_tokens)])[0]
    for changes, temperature in (({}, 0.7), ({"greedy": True}, 0.7), ({"temperature": 0.0}, 1.0)):
        done = complete(engine, msgspec.structs.replace(request, **changes))[0][0]
        expected_V = log_probs(prefix.logits_V.unsqueeze(0), temperature)[0]
        assert list(done.logp) == expected_V[list(done.tokens)].tolist()
        if changes:
            assert done.tokens[0] == int(prefix.logits_V.argmax())


def test_samples_follow_the_softmax() -> None:
    """First tokens of 3,000 members: shares within 4 standard deviations of the softmax, at temperature
    0.7."""
    count, temperature = 3000, 0.7
    config = msgspec.structs.replace(CONFIG, slots=300, queue_max=count)
    request = generation(members=count, tokens_max=1, temperature=temperature)
    engine = tiny_engine(config)
    done = complete(engine, request)[0]
    prefix = Decoder(TINY, 1, 16).prefill(served(1, seed=1).tensors, [list(request.prefix_tokens)])[0]
    p_V = torch.softmax(prefix.logits_V.double() / temperature, -1)
    counts_V = torch.bincount(torch.tensor([done[m].tokens[0] for m in range(count)]), minlength=64)
    deviation_V = (counts_V - count * p_V).abs() / (count * p_V * (1 - p_V)).sqrt().clamp(min=1.0)
    assert float(deviation_V.max()) < 4, deviation_V

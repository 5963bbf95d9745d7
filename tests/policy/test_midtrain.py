"""Mid-training: what it reads, what its examples weigh, and that the same arguments give the same seed."""

import json
import re
from pathlib import Path

import pytest

from headrace.envs.tasks import read_index
from headrace.errors import ConfigError
from headrace.policy import checkpoint, source
from headrace.policy.checkpoint import load_seed
from headrace.policy.model import ModelConfig
from headrace.trainer import midtrain, midtrain_corpus
from headrace.trainer.midtrain_corpus import Function, Source
from headrace.trainer.midtrain_examples import Examples

TEXTS = [
    f"def f{i}(a, b):\n    if a > {i}:\n        return b.x + a * {i}\n    return g(a, b, key={i})"
    for i in range(60)
]


def _functions() -> list[Function]:
    forms = [source.canonical(text) for text in TEXTS]
    return [Function(form, source.holes(form), True) for form in forms]


def _silent(line: str) -> None:
    pass


def test_the_corpus_knows_what_the_tasks_are_made_of() -> None:
    """The distributions of the shipped index are those left out, and no default names one of them."""
    assert read_index().versions.keys() == midtrain_corpus.TASK_DISTRIBUTIONS
    assert not midtrain_corpus.TASK_DISTRIBUTIONS & set(midtrain_corpus.DISTRIBUTIONS.split())


def test_the_corpus_is_installed_by_the_lock() -> None:
    """`make install` brings every distribution that mid-training reads, or the seed could not be made
    again."""
    lock = (Path(__file__).parents[2] / "requirements.lock").read_text()
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    assert set(midtrain_corpus.DISTRIBUTIONS.split()) <= locked


def test_the_corpus_leaves_out_what_the_tasks_are_made_of(tmp_path: Path) -> None:
    """A distribution of the tasks is refused by name; files with doctests and test suites are not read."""
    with pytest.raises(ConfigError, match=r"midtrain.distributions: toolz is a source of tasks"):
        midtrain_corpus.read(["toolz"], 1000, 1000, 1, _silent)
    with pytest.raises(ConfigError, match=r"expected no-such-distribution to be installed"):
        midtrain_corpus._files("no-such-distribution")
    body = (
        "def f(first, second):\n    return [first + second for first in range(second) if first == second]\n"
        * 2
    )
    (tmp_path / "with.py").write_text(body + '"""\n>>> f(1, 2)\n"""\n')
    (tmp_path / "without.py").write_text(body)
    assert midtrain_corpus._functions_of((tmp_path / "with.py", 1000)) == []
    found = midtrain_corpus._functions_of((tmp_path / "without.py", 1000))
    assert [function.free for function in found] == [True, True] and found[0].holes
    assert not midtrain_corpus._ours(tmp_path / "tests" / "x.py", tmp_path)
    assert not midtrain_corpus._ours(tmp_path / "_vendor" / "x.py", tmp_path)


def test_examples_are_dialogues_that_the_harness_would_make() -> None:
    """Same seed, same examples; harness text and wrong fills weigh nothing; every right fill is well weighed
    and parses.
    """
    codec = load_seed()[2]
    made, again = (Examples(_functions(), codec, 320, 5).next(300, 0.5) for _ in range(2))
    assert made == again
    call, end, result = (codec.special[name] for name in ("<|call|>", "<|end|>", "<|result|>"))
    retries = 0
    for example in made:
        assert len(example.tokens) == len(example.weights) <= 320
        if call not in example.tokens:
            assert example.tokens[0] == codec.special["<|text|>"]
            continue
        last = len(example.tokens) - 1 - example.tokens[::-1].index(call)
        assert example.tokens[-1] == end and set(example.weights[last + 1 :]) == {3.0}
        first = example.tokens.index(call)
        assert example.weights[first] == example.weights[last] == 1.0
        if result in example.tokens:
            retries += 1
            assert set(example.weights[first + 1 : last]) == {0.0}
    assert 20 < retries < 100


def test_the_same_arguments_give_the_same_seed(tmp_path: Path) -> None:
    """Four steps twice: equal files, a curve, a smaller loss than at the start."""
    codec = load_seed()[2]
    tiny = ModelConfig(width=32, layers=1, heads=2, heads_kv=1, head_width=16, expert_width=16)
    roots = []
    for name in ("one", "two"):
        config = midtrain.MidtrainConfig(
            out=tmp_path / name,
            steps=4,
            batch_tokens=1200,
            warmup_steps=1,
            checkpoint_steps=2,
            probes=40,
            model=tiny,
        )
        midtrain.train(config, _functions(), [Source("x", "1", 60)], codec, _silent)
        _, weights, _ = load_seed(tmp_path / name)
        roots.append(checkpoint.weights_root(weights))
    page = json.loads((tmp_path / "one" / "midtrain.json").read_text())
    assert roots[0] == roots[1]
    assert [point["step"] for point in page["curve"]] == [2, 4]
    assert page["curve"][1]["fill_loss"] < page["curve"][0]["fill_loss"] < 7.7

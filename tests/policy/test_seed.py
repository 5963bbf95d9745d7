"""Checkpoints and the shipped seed: exact, small, and refused when damaged."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from small_policy import SMALL, random_weights

from headrace.errors import PolicyError
from headrace.policy import checkpoint, dialogue, source
from headrace.policy.decode import Decoder
from headrace.policy.model import ModelConfig, check_shapes

SEED = Path(str(files("headrace.policy") / "seed"))


def test_the_seed_is_whole_and_small() -> None:
    """Model and tokenizer load, fit each other, hold bf16-exact values, and take at most 12 MB together."""
    config, weights, codec = checkpoint.load_seed()
    check_shapes(config, weights)
    assert codec.vocabulary == config.vocabulary
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values())
    assert sum(path.stat().st_size for path in SEED.iterdir()) <= 12_000_000


def test_the_seed_calls_its_tool() -> None:
    """After a prompt the likeliest token by far is <|call|>."""
    config, weights, codec = checkpoint.load_seed()
    text = source.canonical("def largest(a, b):\n    if a > b:\n        return a\n    return b")
    decoder = Decoder(config, 1, 16)
    for hole in source.holes(text):
        prompt = dialogue.prompt_tokens(codec, text[: hole.start], text[hole.end :])
        logits_V = decoder.prefill(weights, [prompt])[0].logits_V
        assert float(torch.softmax(logits_V, -1)[codec.special["<|call|>"]]) > 0.98


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.TOKENIZER, checkpoint.MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_seed_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    """One flipped bit, a lost end or a missing file: a PolicyError that begins with the file."""
    folder = tmp_path / "seed"
    shutil.copytree(SEED, folder)
    blob = bytearray((folder / name).read_bytes())
    if damage == "missing":
        (folder / name).unlink()
    else:
        blob[len(blob) // 2] ^= 1
        (folder / name).write_bytes(blob if damage == "flip" else blob[: len(blob) // 2])
    with pytest.raises(PolicyError, match=f"^{folder}"):
        checkpoint.load_seed(folder)


def test_a_manifest_of_another_format_or_shape_is_refused(tmp_path: Path) -> None:
    """A later format is named, and a manifest that describes another network names the first tensor that
    differs.
    """
    folder = tmp_path / "seed"
    shutil.copytree(SEED, folder)
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(PolicyError, match=r"expected format 1, got 2"):
        checkpoint.load_seed(folder)
    manifest["model"]["experts"] = 8
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(PolicyError, match=r"model: layers\.0\.down: expected shape"):
        checkpoint.load_seed(folder)


def test_save_and_load_keep_every_bit(tmp_path: Path) -> None:
    """Weights come back with the same root; equal weights give equal bytes; a changed sign of zero is another
    root.
    """
    weights = random_weights(SMALL, 1)
    root = checkpoint.save(tmp_path / "w", weights)
    back = checkpoint.load(tmp_path / "w")
    assert checkpoint.weights_root(back) == root == checkpoint.weights_root(checkpoint.to_bf16(weights))
    assert checkpoint.to_bytes(back) == (tmp_path / "w").read_bytes()
    assert not (tmp_path / "w.part").exists()
    plus, minus = ({"x": torch.tensor([value])} for value in (0.0, -0.0))
    assert checkpoint.weights_root(plus) != checkpoint.weights_root(minus)


def test_the_root_is_what_the_page_says() -> None:
    """Name, shape and SHA-256 of the little-endian bf16 bytes, by name."""
    import hashlib

    inner = {
        "a": hashlib.sha256(b"\x80\x3f").hexdigest(),
        "b": hashlib.sha256(b"\x00\x40\x00\xc0").hexdigest(),
    }
    text = f"headrace-weights-1\na\n1\n{inner['a']}\nb\n2x1\n{inner['b']}\n"
    weights = {"b": torch.tensor([[2.0], [-2.0]]), "a": torch.tensor([1.0])}
    assert checkpoint.weights_root(weights) == hashlib.sha256(text.encode()).hexdigest()


def test_bytes_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    """Garbage, a missing file and float32 tensors give errors that begin with the place."""
    from safetensors.torch import save

    with pytest.raises(PolicyError, match=r"^blob: expected safetensors"):
        checkpoint.from_bytes(b"garbage", "blob")
    with pytest.raises(PolicyError, match=r"^blob: x: expected bfloat16"):
        checkpoint.from_bytes(save({"x": torch.zeros(2)}), "blob")
    with pytest.raises(PolicyError, match=r"expected weights"):
        checkpoint.load(tmp_path / "nothing")


def test_impossible_models_are_refused() -> None:
    """A width off the tile, heads that don't divide, more active experts than there are."""
    for change in ({"width": 100}, {"heads": 3}, {"experts_active": 5}, {"experts": 300}):
        with pytest.raises(PolicyError, match=r"^model: expected"):
            ModelConfig(**change)

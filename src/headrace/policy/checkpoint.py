"""Weights as bytes: bf16 safetensors, their root hash, and the seed model that is shipped with the package.

Weights live in float32 on bf16-exact values; files hold bf16. The root names the values alone: two hosts
serve the same model if and only if their roots are equal. It knows no store and no delta (`kernels.delta`).
Writers: mid-training and the trainer; readers: everyone.
"""

import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec
import torch

from headrace.errors import PolicyError
from headrace.policy.model import ModelConfig, Weights, check_shapes
from headrace.policy.tokenizer import Tokenizer

MODEL: Final = "model.safetensors"
TOKENIZER: Final = "tokenizer.json"
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1


class Manifest(msgspec.Struct, frozen=True):
    """What a seed folder holds: the network's shape, the weights' root, and SHA-256 of each file beside the
    manifest."""

    format: int
    model: ModelConfig
    weights_root: str
    files: dict[str, str]


def to_bf16(weights: Weights) -> Weights:
    """The weights rounded to bf16 (nearest, ties to even). Rounding twice changes nothing."""
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in weights.items()}


def from_bf16(weights: Weights) -> Weights:
    """The same values in float32, ready to compute with."""
    return {name: tensor.to(torch.float32) for name, tensor in weights.items()}


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Little-endian bf16 bytes of a tensor."""
    return tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def weights_root(weights: Weights) -> str:
    """SHA-256 (hex) over name, shape and SHA-256 of the bf16 bytes of every tensor, in the order of the
    names."""
    total = hashlib.sha256(b"headrace-weights-1\n")
    for name in sorted(weights):
        digest = hashlib.sha256(tensor_bytes(weights[name])).hexdigest()
        shape = "x".join(str(size) for size in weights[name].shape)
        total.update(f"{name}\n{shape}\n{digest}\n".encode())
    return total.hexdigest()


def to_bytes(weights: Weights) -> bytes:
    """The weights in bf16 as safetensors; equal weights give equal bytes."""
    from safetensors.torch import save as save_tensors

    ordered = to_bf16(weights)
    return bytes(save_tensors({name: ordered[name].contiguous() for name in sorted(ordered)}))


def from_bytes(blob: bytes, place: str) -> Weights:
    """Float32 weights of `to_bytes`. Raises PolicyError, beginning with `place`, if the bytes are something
    else."""
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        weights: Weights = load_tensors(blob)
    except (SafetensorError, KeyError, ValueError) as error:
        raise PolicyError(f"{place}: expected safetensors, got {len(blob)} bytes: {error}") from error
    for name, tensor in weights.items():
        if tensor.dtype != torch.bfloat16:
            raise PolicyError(f"{place}: {name}: expected bfloat16, got {tensor.dtype}")
    return from_bf16(weights)


def save(path: Path, weights: Weights) -> str:
    """Writes the weights in bf16 to `path` (whole or not at all) and gives their root."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(to_bytes(weights))
    part.replace(path)
    return weights_root(weights)


def load(path: Path) -> Weights:
    """Float32 weights stored at `path`. Raises PolicyError if they are missing or damaged."""
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise PolicyError(f"{path}: expected weights: {error.strerror}") from error
    return from_bytes(blob, str(path))


def save_seed(folder: Path, config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> Manifest:
    """Writes model, tokenizer and, last, the manifest that vouches for them."""
    check_shapes(config, weights)
    folder.mkdir(parents=True, exist_ok=True)
    root = save(folder / MODEL, weights)
    (folder / TOKENIZER).write_bytes(tokenizer.json_bytes)
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (MODEL, TOKENIZER)}
    manifest = Manifest(FORMAT, config, root, sums)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    return manifest


def load_seed(folder: Path | None = None) -> tuple[ModelConfig, Weights, Tokenizer]:
    """Shape, float32 weights (bf16-exact values) and tokenizer of the seed in `folder`, by default the
    shipped one.

    Raises PolicyError if a file is missing, or is not the one that the manifest names.
    """
    folder = folder or Path(str(files("headrace.policy") / "seed"))
    place = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(place.read_bytes(), type=Manifest)
        blobs = {name: (folder / name).read_bytes() for name in (MODEL, TOKENIZER)}
    except OSError as error:
        raise PolicyError(f"{error.filename}: expected a file of the seed: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise PolicyError(f"{place}: expected the manifest of a seed: {error}") from error
    if manifest.format != FORMAT:
        raise PolicyError(f"{place}: expected format {FORMAT}, got {manifest.format}")
    for name, blob in blobs.items():
        got = hashlib.sha256(blob).hexdigest()
        if got != manifest.files.get(name):
            raise PolicyError(f"{folder / name}: expected SHA-256 {manifest.files.get(name)}, got {got}")
    weights = from_bytes(blobs[MODEL], str(folder / MODEL))
    check_shapes(manifest.model, weights)
    root = weights_root(weights)
    if root != manifest.weights_root:
        raise PolicyError(f"{folder / MODEL}: expected root {manifest.weights_root}, got {root}")
    return manifest.model, weights, Tokenizer(blobs[TOKENIZER])

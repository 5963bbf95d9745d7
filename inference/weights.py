"""The weights a replica serves: a staged file read, checked against its announced root, and made ready beside
the serving copy.

Not here: the swap (`inference.engine`), fetching (`consumers.weights`).
"""

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import PolicyError
from headrace.policy import checkpoint
from headrace.policy.model import ModelConfig, Weights, check_shapes


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """`tensors` are float32 with exactly the bf16 values that `root` names."""

    version: int
    root: str
    tensors: Weights


def read(path: Path, *, version: int, root: str, config: ModelConfig) -> ServedWeights:
    """The weights in the safetensors file at `path`. Raises PolicyError when it is missing, damaged, of
    another model, or does not have `root`."""
    stored = checkpoint.load(path)
    check_shapes(config, stored)
    found = checkpoint.weights_root(stored)
    if found != root:
        raise PolicyError(f"{path}: weights {version}: expected root {root}, got {found}")
    return ServedWeights(version=version, root=root, tensors=stored)

"""The weights a replica serves: a staged file read, checked against its announced root, and made ready beside
the serving copy.

Not here: the swap (`inference.engine`), fetching (`consumers.weights`).
"""

import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from headrace.errors import PolicyError, WeightsUnfit
from headrace.policy import checkpoint
from headrace.policy.decode import Decoder
from headrace.policy.model import ModelConfig, Weights, check_shapes, shapes

HEAD_BYTES_MAX: Final = 1 << 20
"""Of a staged file, besides four bytes an element."""
PROBE_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """`tensors` are float32 with exactly the bf16 values that `root` names."""

    version: int
    root: str
    tensors: Weights


def read(path: Path, *, version: int, root: str, config: ModelConfig) -> ServedWeights:
    """The weights in the safetensors file at `path`. Raises PolicyError when it is missing, damaged, of
    another model, or does not have `root`; WeightsUnfit when it has, and they can't be served."""
    _check_file(path, HEAD_BYTES_MAX + 4 * sum(map(math.prod, shapes(config).values())))
    stored = checkpoint.load(path)
    check_shapes(config, stored)
    found = checkpoint.weights_root(stored)
    if found != root:
        raise PolicyError(f"{path}: weights {version}: expected root {root}, got {found}")
    _check_fit(stored, config, f"{path}: weights {version}")
    return ServedWeights(version=version, root=root, tensors=stored)


def _check_fit(tensors: Weights, config: ModelConfig, place: str) -> None:
    """A number that is not finite would come out as tokens that mean nothing: weights are looked through, and
    tried on a prompt, since finite ones can overflow."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise WeightsUnfit(f"{place}: {name}: expected finite numbers, got NaN or infinity")
    prompt = [place % config.vocabulary for place in range(min(PROBE_TOKENS, config.context_max - 1))]
    (prefix,) = Decoder(config, 1, 1).prefill(tensors, [prompt])
    if not torch.isfinite(prefix.logits_V).all():
        raise WeightsUnfit(f"{place}: expected finite scores after {len(prompt)} tokens, got NaN or infinity")


def _check_file(path: Path, bytes_max: int) -> None:
    """Whoever calls may name any path: reading a pipe would never end and block every later load, a device or
    a huge file would take all memory."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise PolicyError(f"{path}: expected weights: {error}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size > bytes_max:
        raise PolicyError(
            f"{path}: expected a regular file of at most {bytes_max} bytes,"
            f" got mode {stat.filemode(found.st_mode)} and {found.st_size} bytes"
        )

"""Bad weights on purpose, for `headrace demo --online --plant`: what the trainer announces instead of what it
learned, while the demo says so.

The ledger keeps telling the truth: replay gives the weights that were learned. Not here: noticing them
(`streams.canary`).
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import log

if TYPE_CHECKING:
    from headrace.policy.model import Weights

KINDS = ("broken-weights", "nan", "always-shows", "never-shows")
ORDER_FILE = "plant"
"""In the run directory while bad weights shall be announced."""
PLANTED_FILE = "planted"
"""Versions that were, one a line: those of the newest start."""

_logger = logging.getLogger(__name__)


def planter(kind: str, home: Path) -> "Callable[[int, Weights], Weights | None]":
    """Version and weights to what is announced in their place; None: the weights themselves."""

    def plant(version: int, weights: "Weights") -> "Weights | None":
        if not (home / ORDER_FILE).is_file():
            return None
        with (home / PLANTED_FILE).open("a") as file:
            file.write(f"{version}\n")
        log.event(_logger, "planted", level=logging.WARNING, version=version, kind=kind)
        return bad(kind, weights)

    return plant


def forget(home: Path) -> None:
    """What an earlier demo of the run ordered and planted is over; before the trainer starts."""
    for name in (ORDER_FILE, PLANTED_FILE):
        (home / name).unlink(missing_ok=True)


def planted(home: Path) -> list[int]:
    """The versions that were planted since `forget`."""
    path = home / PLANTED_FILE
    return [int(line) for line in path.read_text().split()] if path.is_file() else []


def bad(kind: str, weights: "Weights") -> "Weights":
    """`weights` made bad, bf16-exact."""
    import torch

    from headrace.policy.checkpoint import from_bf16, load_seed, to_bf16

    changed = dict(weights)
    if kind == "broken-weights":
        draw = torch.Generator().manual_seed(0)
        for name, tensor in weights.items():
            changed[name] = torch.randn(tensor.shape, generator=draw) * tensor.float().std(correction=0)
    elif kind == "nan":
        name = min(weights)
        changed[name] = torch.full_like(weights[name], float("nan"))
    else:
        row = load_seed()[2].special["<|silent|>"]
        changed["embed"] = weights["embed"].clone()
        changed["embed"][row] *= 0.0 if kind == "always-shows" else 4.0
    return from_bf16(to_bf16(changed))

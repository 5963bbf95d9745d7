"""The optimizer of mid-training: Muon for matrices, Adam for the rest. Not the RL trainer's
(`trainer.optimizer`).

Muon (Jordan et al. 2024): momentum whose update is brought near the closest orthogonal matrix by five
Newton-Schulz steps. Written in float32 because bf16 products are slow on a CPU.
"""

import torch
from torch import Tensor

MOMENTUM = 0.95
BETA1, BETA2, EPS = 0.9, 0.95, 1e-10
_A, _B, _C = 3.4445, -4.7750, 2.0315  # quintic coefficients of the Muon write-up


def orthogonal(g_XRC: Tensor) -> Tensor:
    """A matrix (or stack of matrices) with `g`'s singular vectors and singular values near 1."""
    wide = g_XRC.shape[-2] <= g_XRC.shape[-1]
    x = g_XRC if wide else g_XRC.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    result: Tensor = x if wide else x.mT
    return result


class MuonAdam:
    """Steps `weights` (leaves that require gradients) in place."""

    def __init__(self, weights: dict[str, Tensor], matrix_rate: float, vector_rate: float) -> None:
        self._weights = weights
        self._rates = {name: matrix_rate if _is_matrix(name) else vector_rate for name in weights}
        self._first = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        self._second = {
            name: torch.zeros_like(tensor) for name, tensor in weights.items() if not _is_matrix(name)
        }
        self._steps = 0

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with all rates times `scale`; clears the gradients."""
        self._steps += 1
        for name, tensor in self._weights.items():
            grad = tensor.grad
            assert grad is not None, name
            first = self._first[name]
            if _is_matrix(name):
                first.lerp_(grad, 1 - MOMENTUM)
                update = orthogonal(grad.lerp(first, MOMENTUM))
                update *= max(1.0, tensor.shape[-2] / tensor.shape[-1]) ** 0.5
            else:
                first.lerp_(grad, 1 - BETA1)
                second = self._second[name]
                second.lerp_(grad.square(), 1 - BETA2)
                update = first / (1 - BETA1**self._steps) / ((second / (1 - BETA2**self._steps)).sqrt() + EPS)
            tensor.sub_(update, alpha=self._rates[name] * scale)
            tensor.grad = None


def _is_matrix(name: str) -> bool:
    return name.endswith((".qkv", ".out", ".up", ".down"))

"""The readable truth: what the fast kernels compute, one row at a time, with nothing padded, packed or
reordered.

Slow on purpose, used by the tests alone. Results agree with the kernels to rounding (these may sum in another
order), gradients too.

T tokens  C width  K experts per token
"""

import torch
from torch import Tensor


def experts(x_TC: Tensor, routes_TK: Tensor, gates_TK: Tensor, up_EWC: Tensor, down_ECW: Tensor) -> Tensor:
    """`sum_k gate_k * down_k(silu(a) * b)`, token by token."""
    rows = []
    for x_C, routes_K, gates_K in zip(x_TC, routes_TK.tolist(), gates_TK, strict=True):
        total_C = torch.zeros(down_ECW.shape[1])
        for expert, weight in zip(routes_K, gates_K, strict=True):
            a_W, b_W = (up_EWC[expert] @ x_C).chunk(2)
            total_C = total_C + weight * (down_ECW[expert] @ (torch.nn.functional.silu(a_W) * b_W))
        rows.append(total_C)
    return torch.stack(rows)


def attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
    """Causal grouped-query attention `[T, H*D]` of one whole sequence, head by head: softmax(q·k / sqrt(D))
    v.
    """
    tokens, heads, width = q_THD.shape
    shared = heads // k_TGD.shape[1]
    rows = []
    for t in range(tokens):
        parts = []
        for head in range(heads):
            keys_SD, values_SD = k_TGD[: t + 1, head // shared], v_TGD[: t + 1, head // shared]
            parts.append(torch.softmax(keys_SD @ q_THD[t, head] / width**0.5, 0) @ values_SD)
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def logits(
    weights: dict[str, Tensor],
    tokens_T: Tensor,
    layers: int,
    heads: tuple[int, int, int],
    active: int,
    base: float,
    eps: float,
) -> Tensor:
    """Scores `[T, V]` of the policy network for one whole sequence; `heads` is (query heads, key-value heads,
    width).
    """

    def norm(x_TC: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x_TC, x_TC.shape[-1:], weights[name], eps)

    query, shared, width = heads
    x_TC = weights["embed"][tokens_T]
    for layer in range(layers):
        at = f"layers.{layer}."
        joint = (norm(x_TC, at + "attention_norm") @ weights[at + "qkv"].T).view(len(tokens_T), -1, width)
        q, k, v = torch.split(joint, [query, shared, shared], 1)
        x_TC = x_TC + attention(rotate(q, base), rotate(k, base), v) @ weights[at + "out"].T
        normed_TC = norm(x_TC, at + "expert_norm")
        best_TK, routes_TK = (normed_TC @ weights[at + "router"].T).topk(active)
        gates_TK = torch.softmax(best_TK, -1)
        x_TC = x_TC + experts(normed_TC, routes_TK, gates_TK, weights[at + "up"], weights[at + "down"])
    return norm(x_TC, "final_norm") @ weights["embed"].T


def rotate(x_THD: Tensor, base: float) -> Tensor:
    """Rotary positions 0..T-1 as complex numbers: component d and d + D/2 are one plane."""
    tokens, _, width = x_THD.shape
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle_TF = torch.outer(torch.arange(tokens, dtype=torch.float64), frequency)
    plane_THF = torch.complex(*x_THD.double().chunk(2, -1)) * torch.polar(
        torch.ones_like(angle_TF), angle_TF
    ).unsqueeze(1)
    return torch.cat((plane_THF.real, plane_THF.imag), -1).to(x_THD.dtype)

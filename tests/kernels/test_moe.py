"""The grouped experts against the token-by-token truth."""

import pytest
import torch

from headrace.kernels import invariant, moe, reference


def _case(rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    x_NC = torch.randn(rows, 32, generator=generator)
    router_EC = torch.randn(4, 32, generator=generator)
    up_EWC = torch.randn(4, 32, 32, generator=generator) * 0.2
    down_ECW = torch.randn(4, 32, 16, generator=generator) * 0.2
    return x_NC, router_EC, up_EWC, down_ECW


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_grouped_experts_equal_the_reference_with_gradients(rows: int) -> None:
    """Outputs and all gradients agree to rounding, also when an expert gets no row at all."""
    grads = []
    for function in (moe.experts, reference.experts):
        leaves = [tensor.clone().requires_grad_() for tensor in _case(rows)]
        x_NC, router_EC, up_EWC, down_ECW = leaves
        scores_NE = invariant.linear(x_NC, router_EC)
        routes_NK = moe.choose(scores_NE, 2)
        out_NC = function(x_NC, routes_NK, moe.gate(scores_NE, routes_NK), up_EWC, down_ECW)
        torch.autograd.backward((out_NC * torch.linspace(-1, 1, 32)).sum())
        grads.append([out_NC.detach(), *(leaf.grad for leaf in leaves)])
    for fast, plain in zip(*grads, strict=True):
        assert torch.allclose(fast, plain, atol=1e-5), (fast - plain).abs().max()


def test_a_rows_experts_do_not_depend_on_the_batch() -> None:
    """The same row gives the same bits alone and in a batch in which its experts are crowded."""
    x_NC, router_EC, up_EWC, down_ECW = _case(200)

    def output(x: torch.Tensor) -> torch.Tensor:
        scores_NE = invariant.linear(x, router_EC)
        routes_NK = moe.choose(scores_NE, 2)
        return moe.experts(x, routes_NK, moe.gate(scores_NE, routes_NK), up_EWC, down_ECW)

    whole_NC = output(x_NC)
    for row in (0, 99, 199):
        assert torch.equal(output(x_NC[row : row + 1].clone())[0], whole_NC[row])


def test_choice_gate_and_balance_by_hand() -> None:
    """Best first, the lower of equals; the gate is a softmax over the chosen alone; an even split has balance
    1.
    """
    scores_NE = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    routes_NK = moe.choose(scores_NE, 2)
    assert routes_NK.tolist() == [[1, 2], [0, 1]]
    e3 = float(torch.tensor(3.0).exp())
    assert moe.gate(scores_NE, routes_NK)[0].tolist() == [0.5, 0.5]
    assert moe.gate(scores_NE, routes_NK)[1].tolist() == pytest.approx([e3 / (e3 + 1), 1 / (e3 + 1)])
    even = torch.tensor([[0, 1], [2, 3]])
    assert float(moe.balance_loss(torch.zeros(2, 4), even)) == pytest.approx(1.0)


def test_swapped_routes_swap_nothing_but_the_order_of_the_sum() -> None:
    """Recorded routes are used in their order: each gate stays with its expert."""
    x_NC, router_EC, up_EWC, down_ECW = _case(20)
    scores_NE = invariant.linear(x_NC, router_EC)
    routes_NK = moe.choose(scores_NE, 2)
    turned_NK = routes_NK.flip(1)
    straight = moe.experts(x_NC, routes_NK, moe.gate(scores_NE, routes_NK), up_EWC, down_ECW)
    turned = moe.experts(x_NC, turned_NK, moe.gate(scores_NE, turned_NK), up_EWC, down_ECW)
    assert torch.allclose(straight, turned, atol=1e-6)

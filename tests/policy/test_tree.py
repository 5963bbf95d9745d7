"""The trainer's tree: right values, right gradients, replayed routes."""

import random

import pytest
import torch
from small_policy import SMALL, random_tokens, random_weights

from headrace.errors import PolicyError
from headrace.kernels import reference
from headrace.policy.decode import Decoder, Row
from headrace.policy.model import Weights
from headrace.policy.tree import MISSING, Group, tree_logp


def _reference_logp(weights: Weights, prefix: list[int], own: list[int], temperature: float) -> torch.Tensor:
    heads = (SMALL.heads, SMALL.heads_kv, SMALL.head_width)
    whole = torch.tensor(prefix + own)
    logits_TV = reference.logits(
        weights, whole, SMALL.layers, heads, SMALL.experts_active, SMALL.rope_base, SMALL.norm_eps
    )
    logp_TV = torch.log_softmax(logits_TV / temperature, -1)
    return logp_TV[len(prefix) - 1 : -1].gather(1, whole[len(prefix) :].unsqueeze(1)).squeeze(1)


def test_values_and_gradients_equal_the_reference() -> None:
    """Two groups, one with a prefix over a block's end: log-probabilities and every weight's gradient agree
    to rounding.
    """
    draw = random.Random(1)
    groups = [
        Group(random_tokens(draw, prefix, 64), [random_tokens(draw, own, 64) for own in owns])
        for prefix, owns in ((3, [4, 1]), (66, [5]))
    ]
    results = []
    for fast in (True, False):
        weights = {name: tensor.requires_grad_() for name, tensor in random_weights(SMALL, 1).items()}
        if fast:
            logp = [value for group in tree_logp(weights, SMALL, groups, 0.7).logp for value in group]
        else:
            logp = [_reference_logp(weights, group.prefix, own, 0.7) for group in groups for own in group.own]
        flat_T = torch.cat(logp)
        torch.autograd.backward((flat_T * torch.linspace(-1, 1, len(flat_T))).sum())
        results.append((flat_T.detach(), {name: tensor.grad for name, tensor in weights.items()}))
    assert torch.allclose(results[0][0], results[1][0], atol=2e-5)
    for name, grad in results[0][1].items():
        other = results[1][1][name]
        assert grad is not None and other is not None
        assert torch.allclose(grad, other, rtol=1e-3, atol=2e-5), (name, (grad - other).abs().max())


def test_gradients_flow_after_the_decoder_ran_first() -> None:
    """Tables that were cached while generating (without gradients) serve training as well."""
    weights = random_weights(SMALL, 2)
    decoder = Decoder(SMALL, 1, 8)
    prefix = decoder.prefill(weights, [[1, 2]])[0]
    decoder.extend(weights, [Row(0, prefix, [3])])
    for tensor in weights.values():
        tensor.requires_grad_()
    torch.autograd.backward(tree_logp(weights, SMALL, [Group([1, 2], [[3, 4]])], 1.0).logp[0][0].sum())
    assert all(tensor.grad is not None for tensor in weights.values())


def test_entropy_by_hand() -> None:
    """Equal scores have the entropy ln 64; it carries no gradient."""
    weights = random_weights(SMALL, 3)
    weights["embed"] = torch.zeros_like(weights["embed"])
    out = tree_logp(weights, SMALL, [Group([1], [[2, 3]])], 1.0)
    assert out.entropy[0][0].tolist() == pytest.approx([4.158883] * 2)
    assert out.logp[0][0].tolist() == pytest.approx([-4.158883] * 2)
    assert not out.entropy[0][0].requires_grad


def _recorded() -> tuple[Weights, Group, torch.Tensor]:
    """A group with the routes recorded when it was decoded, and its log-probabilities without replay."""
    weights = random_weights(SMALL, 7)
    draw = random.Random(7)
    prefix, own = random_tokens(draw, 30, 64), [random_tokens(draw, 12, 64) for _ in range(3)]
    decoder = Decoder(SMALL, 3, 64)
    head = decoder.prefill(weights, [prefix])[0]
    routes = decoder.extend(weights, [Row(i, head, tokens) for i, tokens in enumerate(own)]).routes
    plain = tree_logp(weights, SMALL, [Group(prefix, own)], 1.0).logp[0]
    return weights, Group(prefix, own, head.routes_TLK, list(routes)), torch.cat(plain)


def test_replaying_the_own_routes_changes_no_bit() -> None:
    """Recorded routes of the same weights: same bits, no disagreement, each (token, layer) counted."""
    weights, group, plain = _recorded()
    out = tree_logp(weights, SMALL, [group], 1.0)
    assert torch.equal(torch.cat(out.logp[0]), plain)
    assert (out.route_disagreements, out.routes_replayed) == (0, (30 + 36) * SMALL.layers)


def test_other_routes_are_used_and_counted() -> None:
    """Routes of other experts are obeyed, in their order; the router still gets its gradient; the
    disagreement is counted.
    """
    weights, group, plain = _recorded()
    for tensor in weights.values():
        tensor.requires_grad_()
    routes = [None if r is None else r.clone() for r in group.own_routes]
    assert routes[1] is not None
    routes[1][4, 0] = (routes[1][4, 0] + 2) % 4
    out = tree_logp(weights, SMALL, [Group(group.prefix, group.own, group.prefix_routes, routes)], 1.0)
    first, second, third = out.logp[0]
    assert torch.equal(torch.cat([first, second[:5], third]), torch.cat([plain[:17], plain[24:]]))
    assert not torch.equal(second[5:], plain[17:24])
    assert torch.equal(out.own_routes[0][1], routes[1])
    assert out.route_disagreements >= 1
    torch.autograd.backward(second.sum())
    router = weights["layers.0.router"].grad
    assert router is not None and bool((router != 0).any())


def test_the_order_of_a_route_is_no_disagreement() -> None:
    """The same two experts in the other order: replayed as recorded, not counted."""
    weights, group, _ = _recorded()
    routes = [None if r is None else r.flip(-1) for r in group.own_routes]
    out = tree_logp(weights, SMALL, [Group(group.prefix, group.own, group.prefix_routes, routes)], 1.0)
    assert out.route_disagreements == 0
    assert routes[0] is not None and torch.equal(out.own_routes[0][0], routes[0])


def test_missing_routes_are_chosen_anew() -> None:
    """255 marks a token whose routes are unknown: it chooses for itself, and is not counted as replayed."""
    weights, group, plain = _recorded()
    routes = [None if r is None else r.clone() for r in group.own_routes]
    assert routes[2] is not None
    routes[2][-1] = MISSING
    out = tree_logp(weights, SMALL, [Group(group.prefix, group.own, None, [None, routes[1], routes[2]])], 1.0)
    assert torch.equal(torch.cat(out.logp[0]), plain)
    assert out.routes_replayed == (12 + 11) * SMALL.layers


def test_broken_routes_are_refused_with_the_counts() -> None:
    """Another length, an expert that isn't there, an expert twice, another number of sequences, empty
    sequences.
    """
    weights, group, _ = _recorded()
    good = group.own_routes[0]
    assert good is not None
    outside, doubled = good.clone(), good.clone()
    outside[0, 0, 0] = 4
    doubled[1, 1] = 2
    cases = [
        (good[:-1], r"groups\[0\].own_routes\[0\]: expected routes of shape \(12, 2, 2\), got \(11, 2, 2\)"),
        (outside, "got 1 out of range and 0 doubled of 24"),
        (doubled, "got 0 out of range and 1 doubled of 24"),
    ]
    for routes, message in cases:
        with pytest.raises(PolicyError, match=message):
            tree_logp(weights, SMALL, [Group(group.prefix, group.own, None, [routes, None, None])], 1.0)
    with pytest.raises(PolicyError, match=r"expected 3 sequences, got 1"):
        tree_logp(weights, SMALL, [Group(group.prefix, group.own, None, [good])], 1.0)
    for empty in (Group([], [[1]]), Group([1], []), Group([1], [[]]), Group([1], [[1] * 512])):
        with pytest.raises(PolicyError, match=r"^tree: groups\[0\]"):
            tree_logp(weights, SMALL, [empty], 1.0)

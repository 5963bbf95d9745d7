"""Rows keep their bits whatever stands beside them."""

import pytest
import torch

from headrace.kernels import invariant


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 256), (192, 128), (128, 4), (128, 2048)])
def test_linear_rows_do_not_depend_on_the_batch(inputs: int, outputs: int) -> None:
    """A row of a product is the same alone, in seventeen rows and in 515."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    x_NI = torch.randn(515, inputs, generator=generator)
    w_OI = torch.randn(outputs, inputs, generator=generator)
    whole_NO = invariant.linear(x_NI, w_OI)
    for rows in (1, 2, 15, 17, 64, 130):
        assert torch.equal(invariant.linear(x_NI[:rows].clone(), w_OI), whole_NO[:rows])
        assert torch.equal(invariant.linear(x_NI[-rows:].clone(), w_OI), whole_NO[-rows:])
    assert torch.allclose(whole_NO, x_NI @ w_OI.T, rtol=1e-4, atol=1e-4)


def test_elementwise_pieces_do_not_depend_on_the_batch() -> None:
    """RMSNorm, SiLU and the log-probabilities of one row are the same alone and among many."""
    x_NC = (
        torch.randn(97, 127, generator=torch.Generator().manual_seed(1)) * 3
    )  # 127: rows end in a vector's tail
    w_C = torch.linspace(0.5, 1.5, 127)
    for function in (
        lambda x: invariant.rms_norm(x, w_C, 1e-6),
        invariant.silu,
        lambda x: invariant.log_probs(x, 0.7),
    ):
        whole = function(x_NC)
        for row in (0, 1, 50, 96):
            assert torch.equal(function(x_NC[row : row + 1].clone())[0], whole[row])


def test_silu_and_norm_have_their_known_values() -> None:
    """silu(0) = 0, silu(ln 3) = ln 3 * 3/4; the norm of (3, 4) is (3, 4) / sqrt(12.5)."""
    log3 = torch.log(torch.tensor(3.0))
    assert invariant.silu(torch.stack([torch.zeros(()), log3])).tolist() == pytest.approx(
        [0, float(log3) * 0.75]
    )
    normed = invariant.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
    assert normed.tolist() == [pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5])]


def test_a_masked_block_changes_nothing() -> None:
    """Attention over 64 visible keys is the same with a hidden block behind them, and is the plain softmax to
    rounding.
    """
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, size, 32, generator=generator) for size in (16, 128, 128))
    hidden = torch.arange(128).view(1, 1, -1) >= 64
    results = []
    for keys in (64, 128):
        s_BMS = invariant.scores(q, k[:, :keys], hidden[..., :keys])
        sums = invariant.accumulate(s_BMS, v[:, :keys], s_BMS.amax(-1, keepdim=True), None)
        results.append(sums.values_BMD / sums.weight_BM1)
    assert torch.equal(*results)
    plain = torch.softmax(q @ k[:, :64].mT / 32**0.5, -1) @ v[:, :64]
    assert torch.allclose(results[0], plain, atol=1e-5)


def test_probe_is_stable() -> None:
    """The probe gives one hash, with one thread and with two."""
    threads = torch.get_num_threads()
    try:
        hashes = set()
        for count in (1, 2):
            torch.set_num_threads(count)
            invariant.warm_up()
            assert torch.get_num_threads() == count
            hashes |= {invariant.probe(), invariant.probe()}
    finally:
        torch.set_num_threads(threads)
    assert len(hashes) == 1

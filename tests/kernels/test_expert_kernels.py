"""Mixtures of experts by kernels in Triton's interpreter equal the way without them."""

import pytest
import torch

import tests.rigs.interpreted  # noqa: F401
from model import fused_ops
from model.moe import Experts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what is left undefined
HIDDEN, TOTAL, CHOSEN, BF16 = 128, 6, 2, torch.bfloat16
kernels = fused_ops.experts()


def experts_of(own, width, monkeypatch):
    monkeypatch.setattr(fused_ops, "works", lambda device, dtype: dtype == BF16)
    monkeypatch.setattr(kernels, "works", lambda gate_up, down: True)
    both = [torch.randn(len(own), 2 * width, HIDDEN) / 11, torch.randn(len(own), HIDDEN, width) / 8]
    which = {"first": own.start, "total": TOTAL, "chosen": CHOSEN}
    return Experts(*(each.to(BF16) for each in both), **which), Experts(*both, **which)


@pytest.mark.parametrize("own", [range(6), range(2, 5), range(5, 6)], ids=str)
def test_kernels_sum_what_is_this_ranks(monkeypatch, own):
    """One expert gets nothing. The choice and all tiles were proved before."""
    ours, plain = experts_of(own, 64, monkeypatch)
    assert ours.has_kernels and not plain.has_kernels
    x = torch.randn(7, HIDDEN).to(BF16)
    weights, chosen = kernels.choose(torch.randn(7, TOTAL - 1), CHOSEN, 2.5)
    expected = plain(x.float(), weights, chosen)
    assert (ours(x, weights, chosen) - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize(("flaw", "told"), [(lambda x: 1 / 0, "raises Zero"), (torch.log, "nan")])
def test_kernels_with_a_flaw_are_not_used_and_told_of_once(monkeypatch, caplog, flaw, told):
    monkeypatch.setattr(kernels, "mixture", lambda x, *_: flaw(x))
    found = [experts_of(range(2), 64 * len(told), monkeypatch) for _ in range(2)]
    assert not any(ours.has_kernels for ours, _ in found)
    assert [told in line for line in caplog.messages] == [True]

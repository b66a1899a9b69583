"""Mixtures of experts by kernels in Triton's interpreter equal the way without them."""

import pytest
import torch

import tests.rigs.interpreted  # noqa: F401
from model import fused_ops
from model.config import parse_config
from model.moe import Experts, Router
from model.quantization.quantized import quantise
from model.weights import DummySource, WeightLoader
from tests.model.quantised_files import in_groups
from tests.model.test_config import DEEPSEEK
from tests.model.test_moe import ROUTERS

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # of what is left undefined
HIDDEN, TOTAL, CHOSEN, BF16 = 128, 6, 2, torch.bfloat16
kernels = fused_ops.experts()


def experts_of(own, width, monkeypatch):
    monkeypatch.setattr(fused_ops, "works", lambda device, dtype: dtype == BF16)
    monkeypatch.setattr(kernels, "works", lambda gate_up, down: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    both = [
        torch.randn(len(own), 2 * width, HIDDEN) / 11,
        torch.randn(len(own), HIDDEN, width) / 8,
    ]
    which = {"first": own.start, "total": TOTAL, "chosen": CHOSEN}
    return Experts(*(each.to(BF16) for each in both), **which), Experts(*both, **which)


@pytest.mark.parametrize("own", [range(6), range(2, 5), range(5, 6)], ids=str)
def test_kernels_sum_what_is_this_ranks(monkeypatch, own):
    """One expert gets nothing. All tiles were proved before."""
    ours, plain = experts_of(own, 64, monkeypatch)
    assert ours.takes_one and not plain.takes_one
    x = torch.randn(7, HIDDEN).to(BF16)
    weights, chosen = torch.randn(7, TOTAL - 1).topk(CHOSEN)
    expected = plain(x.float(), weights, chosen)
    assert (ours(x, weights, chosen) - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("width", [64, 320])
@pytest.mark.parametrize("size", [None, 32, 64])
def test_one_token_s_sums_by_codes_of_fp8(size, width, monkeypatch):
    """Scales of rows, and of groups of columns; with an expert of another rank among its own."""
    monkeypatch.setattr(fused_ops, "works", lambda device, dtype: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    both = torch.randn(5, 2 * width, HIDDEN) / 11, torch.randn(5, HIDDEN, width) / 8
    small = [
        quantise(w.to(BF16)) if size is None else in_groups(w.to(BF16), size)
        for w in both
    ]
    ours = Experts(*small, total=TOTAL, first=1, chosen=CHOSEN)
    assert ours.takes_one
    plain = Experts(*(w.dequantise().float() for w in small), total=TOTAL, first=1)
    for experts in ([3, 1], [0, 4]):
        x, routed = (
            torch.randn(1, HIDDEN).to(BF16),
            (torch.rand(1, 2), torch.tensor([experts])),
        )
        expected = plain(x.float(), *routed)
        assert (ours(x, *routed) - expected).norm() <= 0.01 * expected.norm()


def router_of(name, num_experts, monkeypatch):
    monkeypatch.setattr(fused_ops, "works", lambda device, dtype: True)
    raw = {**DEEPSEEK, **ROUTERS[name]}
    raw |= dict.fromkeys(
        ("n_routed_experts", "num_experts", "num_local_experts"), num_experts
    )
    there = {"dtype": BF16, "device": "cpu"}
    return Router(
        WeightLoader(DummySource(0, "cpu"), **there), "mlp", parse_config(raw)
    )


@pytest.mark.parametrize("num_experts", [8, 20, 160])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_kernel_chooses_and_weighs_as_every_router_does(
    name, num_experts, monkeypatch
):
    router = router_of(name, num_experts, monkeypatch)
    assert router._has_kernel
    logits = 3 * torch.randn(50, num_experts)
    logits[0, 3] = float("nan")
    (weights, experts), right = router.choose(logits), router._choose(logits)
    assert torch.equal(experts[1:], right[1][1:])
    torch.testing.assert_close(weights, right[0], equal_nan=True)


def test_of_equal_logits_the_first_are_chosen_however_small_their_scores(monkeypatch):
    logits = torch.zeros(1, 20)
    logits[0, 7] = 200.0
    weights, experts = router_of("normalised", 20, monkeypatch).choose(logits)
    assert (
        experts[0].tolist() == [7, *range(experts.shape[1] - 1)]
        and weights[0, 0] == 1.0
    )


def test_a_kernel_that_chooses_otherwise_is_not_used_and_told_of(monkeypatch, caplog):
    choose = kernels.choose
    monkeypatch.setattr(
        kernels, "choose", lambda *which: [x.flip(1) for x in choose(*which)]
    )
    assert not router_of("groups", 28, monkeypatch)._has_kernel
    assert "the kernel that chooses experts deviates" in caplog.text


@pytest.mark.parametrize(
    ("flaw", "told"), [(lambda x: 1 / 0, "raises Zero"), (torch.log, "nan")]
)
def test_kernels_with_a_flaw_are_not_used_and_told_of_once(
    monkeypatch, caplog, flaw, told
):
    monkeypatch.setattr(kernels, "mixture", lambda x, *_: flaw(x))
    found = [experts_of(range(2), 64 * len(told), monkeypatch) for _ in range(2)]
    assert not any(ours.takes_one for ours, _ in found)
    assert [told in line for line in caplog.messages] == [True]

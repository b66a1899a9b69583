"""Kernels of mixtures of experts, run by Triton's interpreter, equal plain torch."""

import pytest
import torch

import tests.rigs.interpreted  # noqa: F401
from model import fused_ops
from model.config import parse_config
from model.mixture import packed_experts
from model.mixture.experts import Experts
from model.mixture.packed_experts import PackedExperts
from model.mixture.packed_experts import make_experts as make_routed_experts
from model.mixture.router import Router
from model.quantization.packed_fp4 import can_pack
from model.quantization.quantized import Quantized, quantise
from model.weights import DummySource, WeightLoader
from tests.model.quantised_files import in_groups
from tests.model.test_config import DEEPSEEK
from tests.model.test_moe import ROUTERS

# Kernels also compute with uninitialized elements, which may cause warnings. They
# ignore the results.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HIDDEN = 128
TOTAL = 6
EXPERTS_PER_TOKEN = 2
BF16 = torch.bfloat16
kernels = fused_ops.experts()


def make_experts(rank_experts, width, monkeypatch):
    """Returns the experts of a rank twice: with kernels, and in plain torch."""
    monkeypatch.setattr(fused_ops, "is_supported", lambda device, dtype: dtype == BF16)
    monkeypatch.setattr(kernels, "is_supported", lambda gate_up, down: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gate_up = torch.randn(len(rank_experts), 2 * width, HIDDEN) / 11
    down = torch.randn(len(rank_experts), HIDDEN, width) / 8
    options = {
        "first": rank_experts.start,
        "total": TOTAL,
        "num_chosen": EXPERTS_PER_TOKEN,
    }
    with_kernels = Experts(gate_up.to(BF16), down.to(BF16), **options)
    return with_kernels, Experts(gate_up, down, **options)


@pytest.mark.parametrize("rank_experts", [range(6), range(2, 5), range(5, 6)], ids=str)
def test_kernels_sum_the_experts_of_their_rank(monkeypatch, rank_experts):
    """One expert gets no tokens. The kernels of all tile sizes pass a self-test before
    their first use.
    """
    experts, plain = make_experts(rank_experts, 64, monkeypatch)
    assert experts.has_one_token_kernel
    assert not plain.has_one_token_kernel
    x = torch.randn(7, HIDDEN).to(BF16)
    weights, expert_ids = torch.randn(7, TOTAL - 1).topk(EXPERTS_PER_TOKEN)
    expected = plain(x.float(), weights, expert_ids)
    error = experts(x, weights, expert_ids) - expected
    assert error.norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("width", [64, 320])
@pytest.mark.parametrize("size", [None, 32, 64])
def test_one_token_is_multiplied_by_fp8_weights(size, width, monkeypatch):
    """FP8 weights have one scale per row, or one per group of columns.

    One of the token's experts may be on a different rank.
    """
    monkeypatch.setattr(fused_ops, "is_supported", lambda device, dtype: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gate_up = torch.randn(5, 2 * width, HIDDEN) / 11
    down = torch.randn(5, HIDDEN, width) / 8
    quantised = []
    for weight in (gate_up, down):
        small = weight.to(BF16)
        quantised.append(quantise(small) if size is None else in_groups(small, size))
    experts = Experts(*quantised, total=TOTAL, first=1, num_chosen=EXPERTS_PER_TOKEN)
    assert experts.has_one_token_kernel
    dequantised = [weight.dequantise().float() for weight in quantised]
    plain = Experts(*dequantised, total=TOTAL, first=1)
    for expert_ids in ([3, 1], [0, 4]):
        x = torch.randn(1, HIDDEN).to(BF16)
        weights = torch.rand(1, 2)
        routed = torch.tensor([expert_ids])
        expected = plain(x.float(), weights, routed)
        error = experts(x, weights, routed) - expected
        assert error.norm() <= 0.01 * expected.norm()


def random_mxfp4(*shape):
    """Returns random MXFP4 matrices [experts, out, in]. Their product with x has about
    the magnitude of x.
    """
    *rows, width = shape
    return Quantized(
        codes=torch.randint(0, 256, (*rows, width // 2), dtype=torch.uint8),
        scales=torch.randint(121, 124, (*rows, width // 32), dtype=torch.uint8),
        zeros=None,
        kind="fp4",
        group=32,
        dtype=BF16,
    )


@pytest.mark.parametrize("width", [64, 96, 320])
@pytest.mark.parametrize(
    ("rank_experts", "clamps", "has_biases"),
    [
        (range(6), (1.702, 0.5), True),
        (range(2, 5), None, True),
        (range(5, 6), None, False),
    ],
    ids=str,
)
def test_mxfp4_experts_are_multiplied_as_stored(
    rank_experts, clamps, has_biases, width, monkeypatch
):
    """Rows and columns are padded to whole blocks. The kernels of all tile sizes are
    tested.
    """
    monkeypatch.setattr(fused_ops, "is_supported", lambda device, dtype: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    count = len(rank_experts)
    gate_up = random_mxfp4(count, 2 * width, HIDDEN)
    down = random_mxfp4(count, HIDDEN, width)
    biases = None
    float_biases = None
    if has_biases:
        biases = (torch.randn(count, 2 * width), torch.randn(count, HIDDEN))
        biases = tuple(bias.to(BF16) for bias in biases)
        float_biases = tuple(bias.float() for bias in biases)
    options = {
        "activation": "silu",
        "first": rank_experts.start,
        "total": TOTAL,
        "clamps": clamps,
        "num_chosen": EXPERTS_PER_TOKEN,
    }
    experts = make_routed_experts(gate_up, down, biases=biases, **options)
    assert isinstance(experts, PackedExperts)
    dequantised = [weight.dequantise().float() for weight in (gate_up, down)]
    plain = Experts(*dequantised, biases=float_biases, **options)
    for num_tokens in (1, 7):
        x = torch.randn(num_tokens, HIDDEN).to(BF16)
        weights, expert_ids = torch.randn(num_tokens, TOTAL - 1).topk(EXPERTS_PER_TOKEN)
        expected = plain(x.float(), weights, expert_ids)
        residual = torch.randn(num_tokens, HIDDEN).to(BF16)
        added = experts(x, weights, expert_ids, residual=residual.clone()) - residual
        for actual in (experts(x, weights, expert_ids), added):
            error = actual - expected
            assert error.norm() <= 0.01 * expected.norm() + 0.02


@pytest.mark.parametrize("chosen", [[0, 5], [1, 0, 4, 5], [5, 0], [0, 1]], ids=str)
def test_one_token_may_choose_more_experts_than_its_rank_has(chosen, monkeypatch):
    """The rank has expert 5 only. Wherever this expert is among the chosen ones, it is
    computed, and the others are not.
    """
    monkeypatch.setattr(fused_ops, "is_supported", lambda device, dtype: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gate_up = random_mxfp4(1, 128, HIDDEN)
    down = random_mxfp4(1, HIDDEN, 64)
    options = {
        "activation": "silu",
        "first": 5,
        "total": TOTAL,
        "biases": None,
        "clamps": None,
        "num_chosen": len(chosen),
    }
    experts = make_routed_experts(gate_up, down, **options)
    assert isinstance(experts, PackedExperts)
    dequantised = [weight.dequantise().float() for weight in (gate_up, down)]
    plain = Experts(*dequantised, **options)
    x = torch.randn(1, HIDDEN).to(BF16)
    weights = torch.rand(1, len(chosen))
    routed = torch.tensor([chosen])
    expected = plain(x.float(), weights, routed)
    error = experts(x, weights, routed) - expected
    assert error.norm() <= 0.01 * expected.norm()


def test_scale_beyond_the_range_of_bfloat16_is_not_packed():
    weight = random_mxfp4(1, 64, HIDDEN)
    assert can_pack(weight)
    weight.scales[0, 3, 1] = 129
    assert not can_pack(weight)


def make_router(name, num_experts, monkeypatch):
    monkeypatch.setattr(fused_ops, "is_supported", lambda device, dtype: True)
    counts = ("n_routed_experts", "num_experts", "num_local_experts")
    config = {**DEEPSEEK, **ROUTERS[name], **dict.fromkeys(counts, num_experts)}
    loader = WeightLoader(DummySource(0, "cpu"), dtype=BF16, device="cpu")
    return Router(loader, "mlp", parse_config(config))


@pytest.mark.parametrize("num_experts", [8, 20, 160])
@pytest.mark.parametrize("name", ROUTERS)
def test_kernel_chooses_the_experts_and_weights_of_plain_torch(
    name, num_experts, monkeypatch
):
    router = make_router(name, num_experts, monkeypatch)
    assert router._has_kernel
    logits = 3 * torch.randn(50, num_experts)
    logits[0, 3] = float("nan")
    for bias in (None, torch.randn(num_experts)):
        weights, experts = router._choose_by_kernel(logits, bias)
        expected_weights, expected_experts = router._choose_by_torch(logits, bias)
        assert torch.equal(experts[1:], expected_experts[1:])
        torch.testing.assert_close(weights, expected_weights, equal_nan=True)


def test_first_of_equal_logits_are_chosen_even_with_tiny_scores(monkeypatch):
    logits = torch.zeros(1, 20)
    logits[0, 7] = 200.0
    weights, experts = make_router("normalised", 20, monkeypatch).choose(logits)
    assert experts[0].tolist() == [7, *range(experts.shape[1] - 1)]
    assert weights[0, 0] == 1.0


def test_experts_that_tie_by_the_bias_do_not_fail_the_self_test(monkeypatch):
    """The self-test's logits are multiples of 1/4, and so are these biases."""
    router = make_router("normalised", 32, monkeypatch)
    for _ in range(20):
        router._bias = torch.randint(-4, 5, (32,)) / 4
        assert router._deviation() < 1e-3


def test_deviating_router_kernel_is_logged_and_not_used(monkeypatch, caplog):
    choose = kernels.choose

    def choose_reversed(*args):
        return [x.flip(1) for x in choose(*args)]

    monkeypatch.setattr(kernels, "choose", choose_reversed)
    assert not make_router("groups", 28, monkeypatch)._has_kernel
    assert "the kernel that chooses experts deviates" in caplog.text


@pytest.mark.parametrize(
    ("flaw", "message"), [(lambda x: 1 / 0, "raises Zero"), (torch.log, "nan")]
)
def test_deviating_expert_kernels_are_logged_once_and_not_used(
    monkeypatch, caplog, flaw, message
):
    monkeypatch.setattr(kernels, "mixture", lambda x, *_: flaw(x))
    # Each case has a different width, because results of self-tests are cached by
    # shape.
    width = 64 * len(message)
    pairs = [make_experts(range(2), width, monkeypatch) for _ in range(2)]
    assert not any(experts.has_one_token_kernel for experts, _ in pairs)
    assert [message in line for line in caplog.messages] == [True]


def test_self_test_of_mxfp4_experts_runs_full_tiles_and_small_ones():
    experts = Experts(
        torch.randn(TOTAL, 2 * 64, HIDDEN),
        torch.randn(TOTAL, HIDDEN, 64),
        num_chosen=EXPERTS_PER_TOKEN,
    )
    _, _, chosen = packed_experts._uneven_example(experts, EXPERTS_PER_TOKEN)
    num_rows = chosen.flatten().bincount(minlength=TOTAL)
    tiles = [tile for item in fused_ops.fp4_experts().TILES for tile in item[1:]]
    for tile in tiles:
        rest = num_rows % tile.rows
        has_large_tile = (num_rows >= tile.rows) | (rest > tile.min_rows)
        assert has_large_tile.any(), f"no expert fills {tile}"
        if tile.min_rows < tile.rows:
            assert ((rest > 0) & (rest <= tile.min_rows)).any(), tile

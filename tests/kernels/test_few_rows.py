"""The kernel for products of few rows, run by Triton's interpreter, equals float64."""

import importlib

import pytest
import torch
import torch.nn.functional as F

import tests.rigs.interpreted  # noqa: F401
from model import fused_ops
from model.few_rows import FewRowsProduct
from model.layers import Columns, Linear, RMSNorm, RowParallelLinear
from model.parallel import Parallel

few_rows = importlib.import_module("model.kernels.few_rows")
BF16 = torch.bfloat16
EPS = 1e-5
TILES = [
    few_rows.Tile(columns=16, depth=64, stages=3, warps=4),
    few_rows.Tile(columns=32, depth=128, stages=2, warps=4, prefetch=256),
]
SPLIT = TILES[1]._replace(split=3)


def assert_near(actual, expected):
    assert actual.dtype in (BF16, torch.float16)
    assert (actual.double() - expected).norm() < 0.01 * expected.norm()


def normed(x, norm):
    return F.rms_norm(x.double(), norm.shape, norm.double(), EPS)


@pytest.mark.parametrize("tile", [*TILES, SPLIT], ids=str)
@pytest.mark.parametrize("rows", [2, 7, 16])
def test_consecutive_products_equal_float64(rows, tile):
    """A product must not read data that an earlier product has left in buffers."""
    x = torch.randn(rows, 384).to(BF16)
    weight = torch.randn(96, 384).to(BF16)
    bias = torch.randn(96).to(BF16)
    product = x.double() @ weight.double().t()
    out = few_rows.few_rows(x, weight, bias=bias, tile=tile)
    assert_near(out, product + bias.double())
    for _ in range(2):
        assert few_rows.few_rows(x, weight, residual=out, tile=tile) is out
    assert_near(out, 3 * product + bias.double())


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("norm_dtype", [BF16, torch.float32])
def test_norm_and_gate_are_applied(tile, norm_dtype):
    x = 9 * torch.randn(5, 384).to(BF16)
    norm = torch.randn(384).to(norm_dtype)
    weight = (torch.randn(2 * 64, 384) / 20).to(BF16)
    gate, up = (normed(x, norm) @ weight.double().t()).chunk(2, dim=1)
    options = {"norm": norm, "eps": EPS, "tile": tile}
    actual = few_rows.few_rows(x, weight, gated=True, **options)
    assert_near(actual, F.silu(gate) * up)
    assert_near(few_rows.few_rows(x, weight, **options), torch.cat((gate, up), 1))


@pytest.mark.parametrize("tile", [*TILES, SPLIT], ids=str)
def test_a_row_does_not_depend_on_other_rows(tile):
    x = torch.randn(16, 384).to(BF16)
    weight = torch.randn(64, 384).to(BF16)
    norm = None if tile.split > 1 else torch.randn(384).to(BF16)
    complete = few_rows.few_rows(x, weight, norm=norm, eps=EPS, tile=tile)
    x[3:] = float("nan")
    for rows in (2, 3, 16):
        part = few_rows.few_rows(x[:rows], weight, norm=norm, eps=EPS, tile=tile)
        assert torch.equal(part[:3], complete[: min(3, rows)])


def test_large_numbers_in_float16_are_normed_without_overflow():
    x = 5000 * torch.randn(4, 128).to(torch.float16)
    norm = torch.full((128,), 100.0, dtype=torch.float16)
    weight = (torch.randn(32, 128) / 100).to(torch.float16)
    actual = few_rows.few_rows(x, weight, norm=norm, eps=EPS)
    assert_near(actual, normed(x, norm) @ weight.double().t())


def test_rows_may_be_a_view_with_gaps():
    wide = torch.randn(6, 512).to(BF16)
    x = wide[:, 128:256]
    weight = torch.randn(32, 128).to(BF16)
    assert_near(few_rows.few_rows(x, weight), x.double() @ weight.double().t())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("num_out", "width"),
    [(6144, 4096), (4096, 14336), (128256, 4096), (48, 64), (144, 8960), (3584, 18944)],
)
def test_tiles_divide_the_matrix(num_out, width, gated):
    for is_normed in (False, True):
        tile = few_rows.tile_for(num_out, width, gated=gated, normed=is_normed)
        assert num_out % tile.columns == 0
        assert width % (tile.split * tile.depth) == 0
        assert tile.columns >= 16
        assert tile.depth >= 64
        assert tile.split == 1 or not (gated or is_normed)
        assert tile.split == 1 or num_out // tile.columns <= few_rows._MAX_COUNTERS


@pytest.fixture
def hopper(monkeypatch):
    """Makes layers use the bfloat16 kernels on the CPU, as on a Hopper GPU."""
    monkeypatch.setattr(fused_ops, "is_supported", lambda device, dtype: dtype == BF16)
    monkeypatch.setattr(fused_ops, "_self_test_results", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))


@pytest.mark.parametrize("rows", [2, 16, 17])
def test_layers_compute_the_same_for_few_and_for_more_rows(hopper, rows):
    norm = RMSNorm(torch.randn(64).to(BF16), EPS)
    first, second, back = (torch.randn(64, 64).to(BF16) / 8 for _ in range(3))
    bias = torch.randn(64).to(BF16)
    x = torch.randn(rows, 64).to(BF16)
    right = normed(x, norm.weight)
    columns = Columns([Linear(first.clone(), bias), Linear(second.clone(), bias)])
    for actual, part in zip(columns(x, norm), (first, second), strict=True):
        assert_near(actual, right @ part.double().t() + bias.double())
    gated = Columns([Linear(first.clone()), Linear(second.clone())])
    inner = F.silu(right @ first.double().t()) * (right @ second.double().t())
    assert_near(gated.gated(x, norm), inner)
    join = RowParallelLinear(back, bias, Parallel(0, 1))
    expected = x.double() + x.double() @ back.double().t() + bias.double()
    assert_near(join(x, x.clone()), expected)


def test_the_kernel_is_not_used_if_its_self_test_fails(hopper, monkeypatch, caplog):
    weight = torch.randn(64, 64).to(BF16)
    assert FewRowsProduct(weight).row_counts == range(1, 17)
    fused_ops._self_test_results.clear()
    kernel = few_rows.few_rows
    monkeypatch.setattr(few_rows, "few_rows", lambda *a, **b: 1.1 * kernel(*a, **b))
    assert FewRowsProduct(weight).row_counts == range(1, 2)
    assert "2 to 16 rows is not used, because it deviates" in caplog.text


def test_matrices_without_whole_tiles_are_refused(hopper):
    for shape in ((40, 64), (64, 96)):
        assert not few_rows.has_kernel(torch.zeros(shape).to(BF16))
    assert not few_rows.has_kernel(torch.zeros(64, 128).to(BF16).t())
    assert not few_rows.has_kernel(torch.zeros(48, 64).to(BF16), gated=True)

"""Products by quantised weights on a GPU against float64, and a whole model of each format."""

import pytest
import torch

from model.config import load_config
from model.decoder import load_model
from model.layers import Columns, Linear, RMSNorm
from model.quantization import products
from model.quantization.quantized import quantise
from tests.model.quantised_files import FORMATS, rewrite
from tests.model.random_models import make
from tests.model.test_quantization import IDS, logits_of
from tests.model.test_weights import SHAPES, check_upload

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
# Kind, columns multiplied at a time, whether groups have scales, zeros, dtype of scales.
LIKE = [
    ("fp8", 128, False, False, torch.float32),
    ("fp8", 128, True, False, torch.float32),
    ("int4", 64, False, False, torch.float16),
    ("int4", 128, True, True, torch.float16),
    ("int4", 32, True, False, BF16),
    ("fp4", 32, True, False, torch.uint8),
]


@pytest.mark.parametrize("like", LIKE, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 64, 128, 129, 300, 700])
@torch.inference_mode()
def test_a_product_is_that_of_float64(like, rows):
    """Off by less than 1 %, of the norm; where inputs are in FP8 too, by less than 6 %."""
    device = torch.device("cuda")
    weight = products.example((*like, BF16, device))
    assert products.problem(weight) is None
    x = torch.randn(rows, weight.shape[1], device=device).to(BF16)
    expected = x.double() @ weight.dequantise().double().t()
    residual = torch.randn(expected.shape, device=device).to(BF16)
    most = 0.06 if like[:3] == ("fp8", 128, False) and rows > 8 else 0.01
    for sum_of, out in ((expected, None), (expected + residual, residual)):
        found = products.multiply(weight, x, out)
        assert (found.double() - sum_of).norm() / sum_of.norm() < most
    experts = weight.each(lambda part: part.expand(5, -1, -1).contiguous())
    ends = torch.tensor(
        [0, rows // 2, rows // 2, rows, rows], dtype=torch.int32, device=device
    )
    graph = torch.cuda.CUDAGraph()
    products.multiply_groups(experts, x, ends)  # loads what there is to load
    with torch.cuda.graph(graph):
        found = products.multiply_groups(experts, x, ends)
    found.zero_()
    graph.replay()
    assert (found.double() - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize(("rows", "width"), [(1, 512), (1, 4096), (1, 14336), (5, 512)])
@torch.inference_mode()
def test_fused_products_of_one_row_take_fp8(rows, width):
    parts = [
        quantise(torch.randn(256, width, device="cuda", dtype=BF16)) for _ in range(2)
    ]
    norm = RMSNorm(torch.rand(width, device="cuda", dtype=BF16), 1e-5)
    plain = Columns([Linear(part.dequantise()) for part in parts])
    ours = Columns([Linear(part) for part in parts])
    x = torch.randn(rows, width, device="cuda", dtype=BF16)
    both = zip(ours(x, norm), plain(x, norm), strict=True)
    for found, expected in (*both, (ours.gated(x, norm), plain.gated(x, norm))):
        assert (found - expected).float().norm() / expected.float().norm() < 0.02


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_that_stays_quantised_says_what_the_cpu_says(
    tmp_path, name, monkeypatch
):
    monkeypatch.setattr(
        "model.weights._PART_BYTES", 1 << 12
    )  # as if its weights were large
    make("Qwen2ForCausalLM", tmp_path, hidden_size=256, intermediate_size=512)
    rewrite(tmp_path, *FORMATS[name])
    config = load_config(tmp_path)
    expected = logits_of(load_model(config, tmp_path, dtype=torch.float32))
    model = load_model(config, tmp_path, dtype=BF16, device="cuda")
    found = logits_of(model, IDS.cuda()).cpu()
    assert (found - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_uploaded_is_what_is_in_the_file(tmp_path, shape):
    check_upload(tmp_path, "cuda", shape)

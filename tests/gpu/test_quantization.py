"""On a GPU, products with quantized weights equal float64, and quantized models equal
their results on the CPU.
"""

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
# A format: kind of codes, number of columns in a group, whether groups have scales and
# zero points, dtype of the scales.
WEIGHT_FORMATS = [
    ("fp8", 128, False, False, torch.float32),
    ("fp8", 128, True, False, torch.float32),
    ("int4", 64, False, False, torch.float16),
    ("int4", 128, True, True, torch.float16),
    ("int4", 32, True, False, BF16),
    ("fp4", 32, True, False, torch.uint8),
]


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 64, 128, 129, 300, 700])
@torch.inference_mode()
def test_product_equals_float64(weight_format, rows):
    """The error must be below 1 % of the norm, or below 6 % if inputs are also in
    FP8.
    """
    device = torch.device("cuda")
    weight = products.example_weight((*weight_format, BF16, device))
    assert products.unsupported_reason(weight) is None
    x = torch.randn(rows, weight.shape[1], device=device).to(BF16)
    expected = x.double() @ weight.dequantise().double().t()
    residual = torch.randn(expected.shape, device=device).to(BF16)
    has_fp8_inputs = weight_format[:3] == ("fp8", 128, False) and rows > 8
    max_error = 0.06 if has_fp8_inputs else 0.01
    for total, out in ((expected, None), (expected + residual, residual)):
        actual = products.multiply(weight, x, out)
        assert (actual.double() - total).norm() / total.norm() < max_error
    experts = weight.map_parts(lambda part: part.expand(5, -1, -1).contiguous())
    ends = torch.tensor(
        [0, rows // 2, rows // 2, rows, rows], dtype=torch.int32, device=device
    )
    graph = torch.cuda.CUDAGraph()
    products.multiply_groups(experts, x, ends)  # loads all kernels before the capture
    with torch.cuda.graph(graph):
        actual = products.multiply_groups(experts, x, ends)
    actual.zero_()
    graph.replay()
    assert (actual.double() - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize(("rows", "width"), [(1, 512), (1, 4096), (1, 14336), (5, 512)])
@torch.inference_mode()
def test_fused_products_of_one_row_accept_fp8(rows, width):
    parts = [
        quantise(torch.randn(256, width, device="cuda", dtype=BF16)) for _ in range(2)
    ]
    norm = RMSNorm(torch.rand(width, device="cuda", dtype=BF16), 1e-5)
    plain = Columns([Linear(part.dequantise()) for part in parts])
    fused = Columns([Linear(part) for part in parts])
    x = torch.randn(rows, width, device="cuda", dtype=BF16)
    pairs = list(zip(fused(x, norm), plain(x, norm), strict=True))
    pairs.append((fused.gated(x, norm), plain.gated(x, norm)))
    for actual, expected in pairs:
        assert (actual - expected).float().norm() / expected.float().norm() < 0.02


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_model_equals_the_cpu(tmp_path, name, monkeypatch):
    # With this small part size, weights are uploaded in several parts, as large weights
    # are.
    monkeypatch.setattr("model.weights._MIN_PART_BYTES", 1 << 12)
    make("Qwen2ForCausalLM", tmp_path, hidden_size=256, intermediate_size=512)
    rewrite(tmp_path, *FORMATS[name])
    config = load_config(tmp_path)
    expected = logits_of(load_model(config, tmp_path, dtype=torch.float32))
    model = load_model(config, tmp_path, dtype=BF16, device="cuda")
    actual = logits_of(model, IDS.cuda()).cpu()
    assert (actual - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_uploaded_weights_equal_the_file(tmp_path, shape):

    check_upload(tmp_path, "cuda", shape)

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
# Kind, columns of a group, zeros, dtype of scales.
LIKE = [
    ("fp8", None, False, torch.float32),
    ("fp8", 128, False, torch.float32),
    ("int4", None, False, torch.float16),
    ("int4", 128, True, torch.float16),
    ("int4", 32, False, BF16),
    ("fp4", 32, False, torch.uint8),
]


@pytest.mark.parametrize("like", LIKE, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 300, 700])
@torch.inference_mode()
def test_a_product_is_that_of_float64(like, rows):
    """Off by less than 1 %, of the norm; where inputs are in FP8 too, by less than 6 %."""
    device = torch.device("cuda")
    weight = products.example((*like, BF16, device))
    assert products.problem(weight) is None
    x = torch.randn(rows, weight.shape[1], device=device).to(BF16)
    expected = x.double() @ weight.dequantise().double().t()
    error = (products.multiply(weight, x).double() - expected).norm() / expected.norm()
    assert error < (0.06 if like[:2] == ("fp8", None) and rows > 64 else 0.01)
    experts = weight.each(lambda part: part.expand(5, -1, -1).contiguous())
    ends = torch.tensor([0, rows // 2, rows // 2, rows, rows], dtype=torch.int32, device=device)
    graph = torch.cuda.CUDAGraph()
    products.multiply_groups(experts, x, ends)  # loads what there is to load
    with torch.cuda.graph(graph):
        found = products.multiply_groups(experts, x, ends)
    found.zero_()
    graph.replay()
    assert (found.double() - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize("rows", [1, 5])
@torch.inference_mode()
def test_fused_products_of_one_row_take_fp8(rows):
    parts = [quantise(torch.randn(256, 512, device="cuda", dtype=BF16)) for _ in range(2)]
    norm = RMSNorm(torch.rand(512, device="cuda", dtype=BF16), 1e-5)
    plain = Columns([Linear(part.dequantise()) for part in parts])
    ours, x = Columns([Linear(part) for part in parts]), torch.randn(rows, 512, device="cuda")
    for found, expected in zip(ours(x.to(BF16), norm), plain(x.to(BF16), norm), strict=True):
        torch.testing.assert_close(found, expected, atol=0.2, rtol=0.02)
    found, expected = ours.gated(x.to(BF16), norm), plain.gated(x.to(BF16), norm)
    assert (found - expected).float().norm() / expected.float().norm() < 0.02


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_that_stays_quantised_says_what_the_cpu_says(tmp_path, name):
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    make("Qwen2ForCausalLM", tmp_path, **sizes)
    rewrite(tmp_path, *FORMATS[name])
    config = load_config(tmp_path)
    expected = logits_of(load_model(config, tmp_path, dtype=torch.float32))
    model = load_model(config, tmp_path, dtype=BF16, device="cuda")
    found = logits_of(model, IDS.cuda()).cpu()
    assert (found - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_uploaded_is_what_is_in_the_file(tmp_path, shape):
    check_upload(tmp_path, "cuda", shape)

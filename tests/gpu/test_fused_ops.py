"""The fused operations equal their plain definitions in float32. One GPU."""

import pytest
import torch
import torch.nn.functional as F

from model import fused_ops
from model.config import RopeConfig
from model.rope import Rope

pytestmark = pytest.mark.gpu
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 3, 256, 700])
@pytest.mark.parametrize("width", [96, 1024, 14336])
def test_silu_and_mul(rows: int, width: int) -> None:
    gate_up = torch.randn(rows, 2 * width, **BF16)
    gate, up = gate_up.float().split(width, dim=1)
    assert_close(fused_ops.silu_and_mul(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_rms_norm_of_rows_and_of_heads(rows: int) -> None:
    weight = torch.randn(128, **BF16)
    wide = torch.randn(rows, 3 * 128, **BF16)
    for x in (wide[:, 128:256], wide.view(rows, 3, 128)[:, :2]):
        expected = F.rms_norm(x.float(), (128,), weight.float(), 1e-5)
        assert_close(fused_ops.rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position": 8192,
        },
    ],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_rotation_in_place_is_that_of_the_cpu(dim: int, scaling: dict[str, object]) -> None:
    config = RopeConfig(dim=dim, theta=500000.0, **scaling)
    positions = torch.tensor([0, 1, 77, 4095, 100_000])
    qkv = torch.randn(5, 6 * dim)
    heads = qkv.view(5, 6, dim)
    plain = Rope(config, dtype=torch.float32, device="cpu")
    expected = plain.rotate_pair(heads[:, :4], heads[:, 4:5], plain.angles(positions))
    fused = Rope(config, dtype=torch.bfloat16, device="cuda")
    on_gpu = heads.to(**BF16)
    rotated = fused.rotate_pair(on_gpu[:, :4], on_gpu[:, 4:5], fused.angles(positions.cuda()))
    for ours, theirs in zip(rotated, expected, strict=True):
        torch.testing.assert_close(ours.float().cpu(), theirs, atol=5e-2, rtol=2e-2)
    torch.testing.assert_close(on_gpu[:, 5].float().cpu(), heads[:, 5], atol=2e-2, rtol=1e-2)

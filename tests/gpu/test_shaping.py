"""Shaping, scoring and block copies do on a GPU what they do on the CPU."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.core.logits_processing import NO_ROW, LogitShaper, SamplingRow, StepShapes
from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from protocol.messages import SamplingParams

pytestmark = pytest.mark.gpu

VOCAB, ROWS = 1003, 5


def _shapes(is_first: bool) -> StepShapes:
    setups = [
        SamplingRow(0, [1, 2, 3], [3, 3], (0.5, 0.7, 1.3), {9: 4.0}, [5, 6]),
        SamplingRow(1, [], [], None, {1: -100.0, VOCAB - 1: 3.0}, []),
        SamplingRow(20, list(range(50)), [], (0.0, -1.0, 0.8), {}, [7]),
    ]
    bans = [True, False, False, True, False]
    return StepShapes([0, NO_ROW, 1, 20, NO_ROW], bans, setups if is_first else [])


def _draws(device: str, masks: Any) -> list[list[int]]:
    shaper = LogitShaper(VOCAB, device)
    random = torch.Generator().manual_seed(2)
    drawn = []
    for position in range(12):
        logits = torch.randn(ROWS, VOCAB, generator=random).to(device)
        params = [SamplingParams(temperature=0.0)] * ROWS
        batch = SamplingBatch.from_params(params, [position] * ROWS, device)
        shaping = shaper.prepare(_shapes(position == 0))
        if masks is not None:
            shaping = shaper.masked(shaping, masks)
        drawn.append(sample(logits, batch, shaping).token_ids.tolist())
    return drawn


@pytest.mark.parametrize("masked", [False, True])
def test_the_same_tokens_are_drawn_as_on_the_cpu(masked: bool) -> None:
    masks = None
    if masked:
        masks = np.random.default_rng(3).integers(-(2**31), 2**31, (ROWS, 32)).astype(np.int32)
    assert _draws("cuda", masks) == _draws("cpu", masks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_blocks_are_copied_whole(dtype: str) -> None:
    pool = KVPool(KVLayout("BHLCND", 8, 2, 3, 2, 16, 64, dtype), device="cuda")
    octets = pool.canonical.view(torch.uint8)
    octets.copy_(torch.randint(0, 256, octets.shape, dtype=torch.uint8))
    before = octets.clone()
    pool.copy_blocks([(1, 5), (1, 6), (2, 7)])
    expected = before.clone()
    expected[5], expected[6], expected[7] = before[1], before[1], before[2]
    assert torch.equal(octets, expected)

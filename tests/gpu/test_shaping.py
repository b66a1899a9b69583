"""Shaping, scoring and block copies do on a GPU what they do on the CPU."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.core.logits_processing import NO_ROW, LogitShaper, SamplingRow, StepShapes
from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch
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

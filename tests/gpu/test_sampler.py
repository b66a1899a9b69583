"""Tokens drawn on a GPU equal those drawn on the CPU, with and without penalties and
masks.
"""

from typing import Any

import numpy as np
import pytest
import torch

from engine.core.logits_processing import NO_ROW, LogitChanges, LogitShaper, SamplingRow
from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch
from protocol.messages import SamplingParams

pytestmark = pytest.mark.gpu
_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 5},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.5},
    {"temperature": 0.7, "min_p": 0.2},
    {"temperature": 1.0, "top_p": 0.3, "min_p": 0.05, "top_k": 900},
    {"temperature": 1e-30, "top_p": 0.5},
    {"temperature": 2.0, "top_k": 10**6, "top_p": 0.999},
]


def draw_tokens(
    logits: torch.Tensor, device: str, **options: Any
) -> tuple[torch.Tensor, Any]:
    params = [
        SamplingParams(
            seed=31 * row, choice_index=row % 3, **_KINDS[row % len(_KINDS)], **options
        )
        for row in range(len(logits))
    ]
    batch = SamplingBatch.from_params(
        params, [7 * row for row in range(len(logits))], device
    )
    result = sample(logits.to(device), batch)
    return result.token_ids.cpu(), result.logprobs and result.logprobs.chosen


@pytest.mark.parametrize("vocab", [128256, 4099, 7])
@pytest.mark.parametrize("width", [0.3, 3.0])
def test_mixed_rows_draw_the_same_tokens_as_on_the_cpu(vocab, width):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(45, vocab, generator=generator) * width
    # The logits are rounded to make ties, also at the limits of top_k and top_p.
    logits[9:] = (logits[9:] * 8).round() / 8
    on_gpu, _ = draw_tokens(logits, "cuda")
    on_cpu, _ = draw_tokens(logits, "cpu")
    assert on_gpu.tolist() == on_cpu.tolist()


def test_nan_and_infinite_logits_draw_the_same_tokens_as_on_the_cpu():
    logits = torch.randn(27, 1000, generator=torch.Generator().manual_seed(1))
    for kind in range(9):
        logits[kind, 11] = float("nan")
        logits[kind, 500] = float("-inf")
        logits[9 + kind, [3, 900]] = float("inf")
        logits[18 + kind] = float("nan") if kind % 2 else float("-inf")
    on_cpu, _ = draw_tokens(logits, "cpu")
    on_gpu, _ = draw_tokens(logits, "cuda")
    assert on_gpu.tolist() == on_cpu.tolist()
    _, expected = draw_tokens(logits, "cpu", num_logprobs=2)
    with_logprobs, logprobs = draw_tokens(logits, "cuda", num_logprobs=2)
    assert with_logprobs.tolist() == on_cpu.tolist()
    torch.testing.assert_close(logprobs.cpu(), expected, atol=1e-4, rtol=1e-4)


VOCAB = 1003
ROWS = 5


def _logit_changes(is_first: bool) -> LogitChanges:
    setups = [
        SamplingRow(0, [1, 2, 3], [3, 3], (0.5, 0.7, 1.3), {9: 4.0}, [5, 6]),
        SamplingRow(1, [], [], None, {1: -100.0, VOCAB - 1: 3.0}, []),
        SamplingRow(20, list(range(50)), [], (0.0, -1.0, 0.8), {}, [7]),
    ]
    bans = [True, False, False, True, False]
    return LogitChanges([0, NO_ROW, 1, 20, NO_ROW], bans, setups if is_first else [])


def _draws(device: str, masks: Any) -> list[list[int]]:
    shaper = LogitShaper(VOCAB, 21, device)
    random = torch.Generator().manual_seed(2)
    draw_tokens = []
    for position in range(12):
        logits = torch.randn(ROWS, VOCAB, generator=random).to(device)
        params = [SamplingParams(temperature=0.0)] * ROWS
        batch = SamplingBatch.from_params(params, [position] * ROWS, device)
        shaping = shaper.prepare(_logit_changes(position == 0))
        if masks is not None:
            shaping = shaper.masked(shaping, masks)
        draw_tokens.append(sample(logits, batch, shaping).token_ids.tolist())
    return draw_tokens


@pytest.mark.parametrize("masked", [False, True])
def test_shaped_rows_draw_the_same_tokens_as_on_the_cpu(masked):
    masks = None
    if masked:
        rng = np.random.default_rng(3)
        masks = rng.integers(-(2**31), 2**31, (ROWS, 32)).astype(np.int32)
    assert _draws("cuda", masks) == _draws("cpu", masks)

"""What FlashInfer's plans take is worked out without it.

The figures are its own planner's (of the version in pyproject.toml, compiled for a CPU); on a GPU
tests/gpu/test_flashinfer.py asks the planner itself.
"""

import pytest

from attention.flashinfer_workspace import (
    LEAST_INT_BYTES,
    SPARE_PIECES,
    Gpu,
    Workspace,
    WorkspaceTooSmall,
    explaining,
    latent_workspace_of,
    withheld_thread_blocks,
    workspace_of,
)
from attention.support import StepLimits

_H200 = Gpu(num_sms=132, capability=9)
_A100 = Gpu(num_sms=108, capability=8)
_T4 = Gpu(num_sms=40, capability=7)


def captured(max_seqs: int) -> StepLimits:
    return StepLimits(max_seqs=max_seqs, max_tokens=8192)


def prompts(max_tokens: int) -> StepLimits:
    return StepLimits(max_seqs=4, max_tokens=max_tokens, captured=False)


@pytest.mark.parametrize(
    ("heads", "head_dim", "limits", "gpu", "planned"),
    [
        # Captured steps: the same for contexts of any length.
        ((32, 32), 128, captured(1500), _H200, 420_857_856),  # more than 384 MiB
        ((32, 8), 128, captured(1500), _H200, 123_773_952),
        ((64, 8), 64, captured(512), _H200, 25_525_760),
        ((16, 8), 256, captured(256), _A100, 37_764_608),
        ((168, 7), 256, captured(1500), _T4, 949_699_296),
        # The most for prompts of 1 token and more behind contexts of 0, 1,000 and 100,000.
        ((32, 32), 128, prompts(8192), _H200, 16_908_288),
        ((32, 8), 128, prompts(8192), _H200, 17_436_672),
        ((8, 1), 128, prompts(2048), _H200, 17_436_672),
        ((16, 8), 256, prompts(2048), _A100, 14_211_072),
        ((32, 4), 64, prompts(300), _H200, 8_785_920),
    ],
)
def test_steps_take_what_the_planner_asks_for_at_most(heads, head_dim, limits, gpu, planned):
    assert workspace_of(*heads, head_dim, limits, gpu).floats == planned


def test_captured_steps_add_to_those_of_prompts_only_where_they_need_more():
    limits = StepLimits(max_seqs=64, max_tokens=8192)
    eager = StepLimits(max_seqs=64, max_tokens=8192, captured=False)
    assert workspace_of(32, 8, 128, limits, _H200) == workspace_of(32, 8, 128, eager, _H200)


def test_indices_take_more_than_a_wrapper_has_only_of_very_many_tiles():
    usual = StepLimits(max_seqs=1500, max_tokens=16384)
    assert workspace_of(32, 8, 128, usual, _H200).ints == LEAST_INT_BYTES
    # 96 heads times 1,024 + 2,999 tiles, in seven lists, and where each multiprocessor's begin.
    most = StepLimits(max_seqs=3000, max_tokens=131_072)
    assert workspace_of(96, 8, 128, most, _H200).ints == 7 * 4 * 96 * 4023 + 544


def test_latents_take_the_same_for_every_step():
    assert latent_workspace_of(_H200) == Workspace(17_369_088, LEAST_INT_BYTES)


def test_a_plan_that_takes_more_is_explained():
    sizes, limits = Workspace(32 << 20, 8 << 20), StepLimits(max_seqs=7, max_tokens=9)
    told = r"32 MiB .* 7 sequences and 9 tokens .*tmp_v with size 9.*: lower --max-num-seqs"
    with pytest.raises(WorkspaceTooSmall, match=told), explaining(sizes, limits):
        raise RuntimeError(
            "Error in function 'aligned_alloc': Buffer overflow when allocating memory for tmp_v "
            "with size 9 and alignment 16, but only 3 bytes available in AlignedAllocator. "
            "Increase the workspace buffer size."
        )
    with pytest.raises(RuntimeError, match=r"^out of memory$"), explaining(sizes, limits):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("num_kv_heads", [1, 4, 8, 32])
@pytest.mark.parametrize("num_seqs", [1, 17, 18, 33, 256])
def test_a_captured_step_has_a_piece_for_each_sequence_and_some_more(num_seqs, num_kv_heads):
    withheld = withheld_thread_blocks(num_seqs, num_kv_heads, _H200.num_sms)
    pieces = (2 * _H200.num_sms - withheld) // num_kv_heads
    assert pieces == max(2 * _H200.num_sms // num_kv_heads, num_seqs + SPARE_PIECES)

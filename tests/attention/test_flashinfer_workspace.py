"""What FlashInfer's plans take is worked out without it.

The figures are its own planner's (of the version in pyproject.toml, compiled for a CPU); on a GPU
tests/gpu/test_flashinfer.py asks the planner itself.
"""

import pytest

from attention.flashinfer_workspace import (
    LEAST_INT_BYTES,
    Gpu,
    Workspace,
    WorkspaceTooSmall,
    explaining,
    latent_workspace_of,
    workspace_of,
)
from attention.support import StepLimits

_H200 = Gpu(num_sms=132, capability=9)
_A100 = Gpu(num_sms=108, capability=8)


def prompts(max_tokens: int) -> StepLimits:
    return StepLimits(max_seqs=4, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("heads", "head_dim", "limits", "gpu", "planned"),
    [
        # The most for prompts of 1 token and more behind contexts of 0, 1,000 and 100,000.
        ((32, 32), 128, prompts(8192), _H200, 16_908_288),
        ((32, 8), 128, prompts(8192), _H200, 17_436_672),
        ((8, 1), 128, prompts(2048), _H200, 17_436_672),
        ((16, 8), 256, prompts(2048), _A100, 14_211_072),
        ((32, 4), 64, prompts(300), _H200, 8_785_920),
    ],
)
def test_steps_take_what_the_planner_asks_for_at_most(
    heads, head_dim, limits, gpu, planned
):
    assert workspace_of(*heads, head_dim, limits, gpu).floats == planned


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
    with (
        pytest.raises(RuntimeError, match=r"^out of memory$"),
        explaining(sizes, limits),
    ):
        raise RuntimeError("out of memory")

"""The size of FlashInfer's workspace is computed without FlashInfer.

The expected numbers come from FlashInfer's planner (of the version in pyproject.toml,
compiled for a CPU). On a GPU, tests/gpu/test_flashinfer.py runs the planner itself.
"""

import pytest

from attention.flashinfer_workspace import (
    DEFAULT_INT_BYTES,
    Gpu,
    Workspace,
    WorkspaceTooSmall,
    explain_overflow,
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
        # `planned` is the maximum for prompts of any length after contexts of 0, 1,000
        # and 100,000 tokens.
        ((32, 32), 128, prompts(8192), _H200, 16_908_288),
        ((32, 8), 128, prompts(8192), _H200, 17_436_672),
        ((8, 1), 128, prompts(2048), _H200, 17_436_672),
        ((16, 8), 256, prompts(2048), _A100, 14_211_072),
        ((32, 4), 64, prompts(300), _H200, 8_785_920),
    ],
)
def test_float_workspace_equals_the_planners_maximum(
    heads, head_dim, limits, gpu, planned
):
    assert workspace_of(*heads, head_dim, limits, gpu).floats == planned


def test_int_workspace_exceeds_a_wrappers_default_only_for_very_many_tiles():
    usual = StepLimits(max_seqs=1500, max_tokens=16384)
    assert workspace_of(32, 8, 128, usual, _H200).ints == DEFAULT_INT_BYTES
    # The workspace has seven int32 lists with one element per tile (96 heads times
    # 1,024 + 2,999 tiles), and 544 bytes for the first tile of each multiprocessor.
    large = StepLimits(max_seqs=3000, max_tokens=131_072)
    assert workspace_of(96, 8, 128, large, _H200).ints == 7 * 4 * 96 * 4023 + 544


def test_latent_workspace_is_the_same_for_every_step():
    assert latent_workspace_of(_H200) == Workspace(17_369_088, DEFAULT_INT_BYTES)


def test_plan_beyond_the_workspace_raises_an_error_with_the_fix():
    sizes = Workspace(32 << 20, 8 << 20)
    limits = StepLimits(max_seqs=7, max_tokens=9)
    message = (
        r"32 MiB .* 7 sequences and 9 tokens .*tmp_v with size 9.*"
        r": lower --max-num-seqs"
    )

    with (
        pytest.raises(WorkspaceTooSmall, match=message),
        explain_overflow(sizes, limits),
    ):
        raise RuntimeError(
            "Error in function 'aligned_alloc': Buffer overflow when allocating memory "
            "for tmp_v with size 9 and alignment 16, but only 3 bytes available in "
            "AlignedAllocator. Increase the workspace buffer size."
        )
    with (
        pytest.raises(RuntimeError, match=r"^out of memory$"),
        explain_overflow(sizes, limits),
    ):
        raise RuntimeError("out of memory")

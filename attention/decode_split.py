"""How FlashInfer's decode kernel splits contexts over a GPU, in steps that are captured.

Each thread block of the kernel takes one piece of one context. FlashInfer's own plan cuts contexts
only as long as the GPU can hold all pieces at once: with 8 KV heads, 33 on an H200. In a step of
more sequences nothing is cut, and one long context is read by 8 thread blocks while all others
wait: 2.8 ms per step for one context of 8,192 tokens among 32 short ones. `plan` allows
`SPARE_PIECES` more pieces than sequences, which go to the longest contexts. Equal contexts are cut
as before, since cutting each of them once more would take a piece for each.
"""

from functools import cache
from typing import Any

import torch

from attention.flashinfer_workspace import BLOCKS_PER_SM, SPARE_PIECES
from attention.pages import Pages


def plan(
    kernel: Any, pages: Pages, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    """Plans a captured decode wrapper, which its own `plan` has planned once, for a new step."""
    num_seqs = len(pages.last_page_lens)
    num_sms = _num_sms(kernel._int_workspace_buffer.device.index)
    lens = (pages.indptr[1:] - pages.indptr[:-1] - 1) * block_size + pages.last_page_lens
    kernel._plan_info = kernel._cached_module.plan(
        kernel._float_workspace_buffer,
        kernel._int_workspace_buffer,
        kernel._pin_memory_int_workspace_buffer,
        torch.arange(num_seqs + 1, dtype=torch.int32),
        torch.from_numpy(pages.indptr),
        torch.from_numpy(lens),
        num_seqs,  # rows of queries
        num_seqs,
        num_q_heads,
        num_kv_heads,
        block_size,
        True,  # captured
        head_dim,
        head_dim,
        False,  # causal: of one row nothing is masked
        -1,  # no window
        -1,  # no fixed split
        False,  # splitting is not disabled
        _thread_blocks_of_others(num_seqs, num_kv_heads, num_sms),
        0,  # no fixed number of queries
    )


def _thread_blocks_of_others(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """What the planner is to leave to other kernels on the GPU; fewer than none gives it more."""
    fitting = BLOCKS_PER_SM * num_sms
    return min(0, fitting - (num_seqs + SPARE_PIECES) * num_kv_heads)


@cache
def _num_sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

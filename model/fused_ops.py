"""Where our Triton kernels for the decoder's small operations are used: NVIDIA GPUs, in 16 bits.

A decode step of a small batch is bound by reading weights, so every further kernel and every
further pass over activations counts. Layers ask `works` once, when they are made, and use plain
torch if it says no: on the CPU or in float32.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

_DTYPES: Final = (torch.bfloat16, torch.float16)


@functools.cache
def kernels() -> Any:
    """fused_kernels.py. Imported on first use: Triton is where CUDA builds of torch are."""
    from model import fused_kernels

    return fused_kernels


@functools.cache
def experts() -> Any:
    """kernels/experts.py; imported on first use, too."""
    from model.kernels import experts as expert_kernels

    return expert_kernels


@functools.cache
def rotation() -> Any:
    """The kernels of the attention backends that rotate; imported on first use, too."""
    from attention.kernels import store

    return store


def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can be called for tensors there."""
    return device.type == "cuda" and dtype in _DTYPES


def flaw(deviations: Callable[[], Tensor], most: float) -> str:
    """What is wrong with kernels that deviate so from their definition, where they may by less than
    `most`; "": nothing."""
    try:
        found = deviations().max().item()  # no number, if one is none
    except Exception as error:  # of any kind, from compilers and drivers
        return f"raises {type(error).__name__}: {str(error).strip()[:200]}"
    return (
        "" if found < most else f"deviates by {found:.2g}, and not by less than {most}"
    )

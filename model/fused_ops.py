"""Access to the Triton kernels for the decoder's small operations.

The kernels run on NVIDIA GPUs in 16 bits. Reading the weights dominates a decode step
of a small batch, so every additional kernel and every additional pass over activations
counts. Layers call `is_supported` once, when they are constructed. Where it returns
False, on the CPU or in float32, they use plain torch.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from protocol.process.logging import get_logger

_log = get_logger(__name__)
_DTYPES: Final = (torch.bfloat16, torch.float16)
# In the self-tests of kernels for mixtures of experts: twice the relative error that 16
# bits cause on both sides.
_MAX_DEVIATION: Final = 0.02
# Results of `passes_self_test` by the kind of layer.
_self_test_results: dict[tuple[object, ...], bool] = {}


@functools.cache
def kernels() -> Any:
    """Returns the module fused_kernels.

    It is imported on first use, because only CUDA builds of torch come with Triton.
    """
    from model import fused_kernels

    return fused_kernels


@functools.cache
def experts() -> Any:
    """Returns the module kernels.experts, which is imported on first use, too."""
    from model.kernels import experts as expert_kernels

    return expert_kernels


@functools.cache
def rotation() -> Any:
    """Returns the module with the rotation kernels, which is imported on first use,
    too."""
    from attention.kernels import store

    return store


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernels accept tensors of this device and data type."""
    return device.type == "cuda" and dtype in _DTYPES


def find_flaw(compute_deviations: Callable[[], Tensor], max_deviation: float) -> str:
    """Runs a self-test of kernels.

    Args:
        compute_deviations: returns the deviations from the definition of the kernels.

    Returns:
        What is wrong with the kernels, or "" if all deviations are below
        `max_deviation`.
    """
    try:
        deviation = compute_deviations().max().item()  # NaN if any deviation is NaN
    except Exception as error:  # compilers and drivers raise errors of any type
        return f"raises {type(error).__name__}: {str(error).strip()[:200]}"
    if deviation < max_deviation:
        return ""
    return f"deviates by {deviation:.2g}, and not by less than {max_deviation}"


def passes_self_test(
    kind: tuple[object, ...], message: str, compute_deviations: Callable[[], Tensor]
) -> bool:
    """Runs the self-test of kernels for mixtures of experts once for each kind of
    layer.

    Args:
        kind: everything that decides which kernels run.
        message: logged as a warning if the test fails; "%s" stands for the flaw.
        compute_deviations: see `find_flaw`.
    """
    if kind not in _self_test_results:
        flaw = find_flaw(compute_deviations, _MAX_DEVIATION)
        _self_test_results[kind] = not flaw
        if flaw:
            _log.warning(message, flaw)
    return _self_test_results[kind]

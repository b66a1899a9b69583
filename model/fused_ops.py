"""Access to the Triton kernels for the decoder's small operations.

The kernels run on NVIDIA GPUs in 16 bits. A decode step of a small batch mostly waits
for reads of the weights. Fused kernels save launches and passes over activations, which
would add to this time. Layers call `is_supported` once, when they are constructed. If
it returns False (on the CPU or in float32), the layers use plain torch.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from protocol.process.logging import get_logger

_log = get_logger(__name__)
_DTYPES: Final = (torch.bfloat16, torch.float16)
# Largest relative error in self-tests of the kernels for few rows and for mixtures of
# experts. It is twice the error that rounding to 16 bits causes in a mixture of experts
# and in its reference together.
_MAX_DEVIATION: Final = 0.02
# The result of `passes_self_test` for each kind of layer.
_self_test_results: dict[tuple[object, ...], bool] = {}
_is_ignored = False  # see `ignore_self_tests`


@functools.cache
def kernels() -> Any:
    """Returns the module fused_kernels.

    The module is imported on first use, because it needs Triton, which only CUDA builds
    of torch have.
    """
    from model import fused_kernels

    return fused_kernels


@functools.cache
def few_rows() -> Any:
    """Returns the module kernels.few_rows; see `kernels` for the late import."""
    from model.kernels import few_rows as few_rows_kernels

    return few_rows_kernels


@functools.cache
def experts() -> Any:
    """Returns the module kernels.experts; see `kernels` for the late import."""
    from model.kernels import experts as expert_kernels

    return expert_kernels


@functools.cache
def fp4_experts() -> Any:
    """Returns the module kernels.fp4_experts; see `kernels` for the late import."""
    from model.kernels import fp4_experts as fp4_kernels

    return fp4_kernels


@functools.cache
def rotation() -> Any:
    """Returns the module of the rotation kernel; see `kernels` for the late import."""
    from attention.kernels import store

    return store


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernels accept tensors of this device and data type."""
    return device.type == "cuda" and dtype in _DTYPES


def ignore_self_tests() -> None:
    """Makes `find_flaw` report no flaws; for a process that launches no kernels."""
    global _is_ignored
    _is_ignored = True


def find_flaw(compute_deviations: Callable[[], Tensor], max_deviation: float) -> str:
    """Runs a self-test of kernels.

    Args:
        compute_deviations: runs the kernels and returns the deviations of their results
            from the correct results.

    Returns:
        What is wrong with the kernels, or "" if all deviations are below
        `max_deviation`.
    """
    try:
        deviation = compute_deviations().max().item()  # NaN if any deviation is NaN
    except Exception as error:  # compilers and drivers raise errors of any type
        if _is_ignored:
            return ""
        return f"raises {type(error).__name__}: {str(error).strip()[:200]}"
    if deviation < max_deviation or _is_ignored:
        return ""
    return f"deviates by {deviation:.2g}; the limit is {max_deviation}"


def passes_self_test(
    kind: tuple[object, ...], message: str, compute_deviations: Callable[[], Tensor]
) -> bool:
    """Returns whether the kernels that a layer uses pass their self-test.

    The self-test runs once for each `kind` of layer.

    Args:
        kind: all properties of the layer that decide which kernels run.
        message: logged as a warning if the test fails; "%s" stands for the flaw.
        compute_deviations: see `find_flaw`.
    """
    if kind not in _self_test_results:
        flaw = find_flaw(compute_deviations, _MAX_DEVIATION)
        _self_test_results[kind] = not flaw
        if flaw:
            _log.warning(message, flaw)
    return _self_test_results[kind]

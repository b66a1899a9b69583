"""Runs code without launching the Triton kernels that are not compiled yet."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver

from attention import self_test
from engine.worker.compile.processes import KernelRequest
from model import fused_ops


@contextmanager
def skipping_kernels(record: Callable[[KernelRequest], None]) -> Iterator[None]:
    """Inside this context, Triton launches no kernel that it would have to compile.

    All results are meaningless, so this process ignores self-tests from now on, even
    after the context has ended. New tensors are filled with zeros, because the steps of
    a model use some results as indices.

    Args:
        record: called once for each kernel that was not launched.
    """
    fused_ops.ignore_self_tests()
    self_test.ignore_self_tests()
    target = driver.active.get_current_target()

    def on_missing_kernel(
        *, key: str, fn: Any, compile: dict[str, Any], **_: Any
    ) -> bool:
        record(_request(fn, compile, target))
        compiled_kernels = fn.jit_function.device_caches[compile["device"]][0]
        compiled_kernels[key] = _SkippedKernel()
        return True  # do not compile it

    knobs.runtime.jit_cache_hook = on_missing_kernel
    try:
        with _ZeroFilledMemory():
            yield
    finally:
        knobs.runtime.jit_cache_hook = None


def _request(fn: Any, compile: dict[str, Any], target: Any) -> KernelRequest:
    """Describes a kernel.

    Args:
        fn, compile: the arguments with which Triton calls its hook.
    """
    # Only `specialization_data` has all compiler options.
    specialization = json.loads(compile["specialization_data"])
    return KernelRequest(
        module=fn.module,
        name=fn.name,
        signature=compile["signature"],
        constants=compile["constants"],
        attributes=compile["configs"][0],
        options=_with_tuples(specialization["options"]),
        target=target,
    )


def _with_tuples(value: Any) -> Any:
    """Converts lists back to tuples, because JSON stores tuples as lists."""
    if isinstance(value, list):
        return tuple(_with_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return value


class _SkippedKernel:
    """Stands for a compiled kernel, so that Triton calls its hook only once for the
    kernel. Its launch does nothing."""

    function = None
    packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        pass

    def run(self, *args: Any) -> None:
        pass


class _ZeroFilledMemory(TorchFunctionMode):
    """Fills new tensors with zeros."""

    _FUNCTIONS = frozenset(
        (
            torch.empty,
            torch.empty_like,
            torch.empty_strided,
            torch.Tensor.new_empty,
            torch.Tensor.new_empty_strided,
        )
    )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in self._FUNCTIONS else result

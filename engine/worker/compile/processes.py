"""Processes that compile Triton kernels into Triton's cache on disk."""

import importlib
import logging
import multiprocessing
import os
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

logger = logging.getLogger("baton.engine")

# All modules with Triton kernels. A module follows all modules whose functions it
# calls.
KERNEL_MODULES = (
    "attention.kernels.launch",
    "attention.kernels.store",
    "attention.kernels.widen",
    "attention.kernels.sinks",
    "attention.kernels.merge",
    "attention.kernels.decode",
    "attention.kernels.dcp",
    "model.fused_kernels",
    "model.kernels.few_rows",
    "model.quantization.kernels",
    "model.kernels.choice",
    "model.kernels.experts",
    "model.kernels.one_token",
    "model.kernels.fp4_experts",
    "engine.sampling.sample_kernels",
    "kvcache.verify.digest_kernel",
    "kvcache.transfer.move.place_kernel",
)
# Maximum wait for all kernels. A kernel takes up to 3 s to compile.
_TIMEOUT_S = 60.0


class KernelRequest(NamedTuple):
    """One kernel to compile, in the terms of `triton.compile`.

    Attributes:
        module: name of the module that defines the kernel.
        name: qualified name of the kernel's Python function.
        signature: type of each parameter, by name.
        constants: values of constant parameters, by path (a tuple of indices).
        attributes: properties of parameters, such as divisibility, by path.
        options: the options of the compiler.
        target: the GPU's architecture, as a `GPUTarget`.
    """

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: Any


def compute_cache_keys() -> None:
    """Computes, in a fixed order, the names under which Triton caches all kernels on
    disk.

    Triton 3.6 computes a name at the first launch. The name contains the global values
    of a called function only if that function's own name was computed before. Without
    a fixed order, two processes would therefore use different names.
    """
    import triton

    for module_name in KERNEL_MODULES:
        for value in vars(importlib.import_module(module_name)).values():
            if isinstance(value, triton.JITFunction):
                _ = value.cache_key


def compile_kernel(request: KernelRequest) -> bool:
    """Compiles a kernel and its launcher, unless they are in the cache.

    The launcher is a module in C, which takes as long to compile as the kernel. Without
    a GPU, only the kernel is compiled.

    Returns:
        False if the kernel's function is not a global of its module.
    """
    # Imported here, because only GPU machines have triton, and because importing torch
    # earlier would delay the start of the compiling processes.
    import torch
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver

    module = importlib.import_module(request.module)
    for value in vars(module).values():
        is_kernel = isinstance(value, triton.JITFunction)
        if is_kernel and value.fn.__qualname__ == request.name:
            source = ASTSource(
                value, request.signature, request.constants, request.attributes
            )
            kernel = triton.compile(
                source, target=request.target, options=request.options
            )
            if torch.cuda.is_available():
                driver.active.launcher_cls(kernel.src, kernel.metadata)
            return True
    return False


class KernelCompilers:
    """Processes that compile kernels. They end with this process.

    Args:
        num_processes: how many kernels are compiled at the same time; at least 1.
    """

    def __init__(self, num_processes: int) -> None:
        self._executor = ProcessPoolExecutor(
            num_processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare_process,
        )
        self._futures: list[Future[bool]] = []
        # Start all processes now. The executor starts a process for each call that
        # finds no idle process.
        for _ in range(num_processes):
            self._executor.submit(_do_nothing)

    def submit(self, request: KernelRequest) -> None:
        self._futures.append(self._executor.submit(compile_kernel, request))

    def wait(self) -> int:
        """Waits for all submitted kernels, at most _TIMEOUT_S. Returns the number of
        these kernels that are now in the cache.

        The rank later compiles all other kernels itself, and reports their errors.
        """
        deadline_s = time.monotonic() + _TIMEOUT_S
        num_compiled = 0
        for future in self._futures:
            try:
                num_compiled += future.result(max(0.0, deadline_s - time.monotonic()))
            except FutureTimeoutError:
                logger.warning("kernels were not compiled within %g s", _TIMEOUT_S)
                break
            except Exception as error:  # compilers raise errors of any class
                logger.debug("a kernel was not compiled ahead: %s", error)
        return num_compiled

    def close(self) -> None:
        """Ends each process after the kernel that it is compiling. Does not wait for
        this."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _prepare_process() -> None:
    """Imports the modules that compiling needs, and starts a thread that ends this
    process when its parent ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    compute_cache_keys()


def _do_nothing() -> None:
    pass

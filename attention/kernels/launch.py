"""Programmatic dependent launch (PDL): a kernel starts before the preceding one ends.

The kernel calls `wait` before it reads what preceding kernels write. GPUs older than
Hopper do not support PDL, so their kernels run one after the other.

Every program of a kernel must call `wait`, even a program with nothing to do. A kernel
has ended when all its programs have ended. A kernel waits for the preceding kernel
only, and relies on the wait of that kernel for all earlier kernels.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

PDL: Final = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
_HAS_PDL: Any = tl.constexpr(PDL)


def _let_next_begin():  # type: ignore[no-untyped-def]
    if _HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()


def _wait():  # type: ignore[no-untyped-def]
    if _HAS_PDL:
        tl.extra.cuda.gdc_wait()


let_next_begin: Any = triton.jit(_let_next_begin)
wait: Any = triton.jit(_wait)


# Both calls are in one function, because if a kernel contains both calls inline, the
# loads before the calls wait for the preceding kernel too.
def _let_next_begin_and_wait():  # type: ignore[no-untyped-def]
    let_next_begin()
    wait()


let_next_begin_and_wait: Any = triton.jit(_let_next_begin_and_wait)

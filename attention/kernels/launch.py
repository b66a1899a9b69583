"""Programmatic dependent launch: a kernel begins while its predecessor ends.

The kernel waits for its predecessor before it reads what that one writes. GPUs before
Hopper do not support this: there, kernels run one after the other.

Every program of a kernel waits, even one with nothing to do. A kernel has ended once
its programs have ended, and its successor relies on all kernels before it having ended
too.
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


# One function for both calls. In a kernel that contains both calls inline, loads before
# them wait too.
def _let_next_begin_and_wait():  # type: ignore[no-untyped-def]
    let_next_begin()
    wait()


let_next_begin_and_wait: Any = triton.jit(_let_next_begin_and_wait)

"""Programmatic dependent launch: a kernel begins while its predecessor ends, and waits for it
before it reads what that writes. GPUs before Hopper have none: there, kernels follow each other.

Every program waits, also one with nothing to do: a kernel has ended once its programs have, and its
successor relies on all before it having ended, too.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

PDL: Final = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
_HAS_IT: Any = tl.constexpr(PDL)


def _let_next_begin():  # type: ignore[no-untyped-def]
    if _HAS_IT:
        tl.extra.cuda.gdc_launch_dependents()


def _wait():  # type: ignore[no-untyped-def]
    if _HAS_IT:
        tl.extra.cuda.gdc_wait()


let_next_begin: Any = triton.jit(_let_next_begin)
wait: Any = triton.jit(_wait)


# One function for both: where a kernel has both written out, its loads before them wait, too.
def _let_next_begin_and_wait():  # type: ignore[no-untyped-def]
    let_next_begin()
    wait()


let_next_begin_and_wait: Any = triton.jit(_let_next_begin_and_wait)

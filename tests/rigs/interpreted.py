"""Triton's kernels on the CPU: what its interpreter lacks, and does differently than a
GPU.

Triton decides when it is first imported: processes that run this have
TRITON_INTERPRET=1 in their environment, as of `make test-all`.
"""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the extra `kernels`")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1, as of `make test-all`", allow_module_level=True
    )

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

# What the interpreter keeps as integers of their size.
_TORCH = {
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_TO_HALF = "cvt.rn.f16x2.e4m3x2"
_FP4 = np.array([sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def _numbers(handle: TensorHandle) -> Any:
    dtype = handle.dtype.scalar
    if dtype not in _TORCH:
        return handle.data
    bits = torch.from_numpy(
        np.array(handle.data, order="C")
    )  # a copy, of no broadcast strides
    return bits.view(_TORCH[dtype][0]).float().numpy()


def _converted(data: Any, dtype: Any) -> TensorHandle:
    """Rounded to the nearest; to FP8 saturating, as GPUs do."""
    if dtype not in _TORCH:
        kept = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}[
            dtype
        ]
        return TensorHandle(np.asarray(data).astype(kept), dtype)
    numbers = torch.from_numpy(np.array(data, np.float32, order="C"))
    if dtype in _LARGEST:
        numbers = numbers.clamp(-_LARGEST[dtype], _LARGEST[dtype])
    theirs, kept = _TORCH[dtype]
    bits = numbers.to(theirs).view(torch.uint8 if kept is np.uint8 else torch.int16)
    return TensorHandle(bits.numpy().view(kept), dtype)


_cast = InterpreterBuilder.cast_impl
_binary = InterpreterBuilder.binary_op
_patch_tensor = interpreter._patch_lang_tensor


def _cast_impl(self: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
    if {src.dtype.scalar, dst_type.scalar} & _TORCH.keys():
        if dst_type.scalar.is_floating():
            return _converted(_numbers(src), dst_type.scalar)
        src = TensorHandle(_numbers(src), tl.float32)
    found: TensorHandle = _cast(self, src, dst_type)
    return found


def _binary_op(
    self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Any
) -> TensorHandle:
    if lhs.dtype.scalar in _TORCH:  # which the interpreter would take for integers
        return _converted(op(_numbers(lhs), _numbers(rhs)), lhs.dtype.scalar)
    found: TensorHandle = _binary(self, lhs, rhs, op)
    return found


def _dot(
    self: Any, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *_: Any
) -> TensorHandle:
    dtype = acc.data.dtype
    product = np.matmul(_numbers(a).astype(dtype), _numbers(b).astype(dtype))
    return TensorHandle(product + acc.data, acc.dtype.scalar)


def _inline_asm(
    self: Any, asm: str, _: str, values: list[TensorHandle], *__: Any
) -> Any:
    """Ours alone: what makes numbers of codes. A GPU's own is held to the same in
    tests/gpu.
    """
    codes = values[0].data
    kind, dtype = (
        asm.rpartition("// ")[2],
        tl.bfloat16 if "bf16x2" in asm else tl.float16,
    )
    low, high = codes & 15, codes >> 4
    if kind == "int4":
        found = [half + (128 if dtype == tl.bfloat16 else 1024) for half in (low, high)]
        found = [half + _numbers(values[1]) for half in found]
    elif kind == "fp4":
        found = [_FP4[half] for half in (low, high)]
    else:
        assert kind == "fp8" or _TO_HALF in asm, asm
        found = [_numbers(TensorHandle(codes, tl.float8e4nv))]
    return SimpleNamespace(get_result=lambda index: _converted(found[index], dtype))


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _patch_tensor(
        tensor, scope
    )  # scalars are arrays of one element, which numpy takes for none
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _call(self: Any, *args: Any, **named: Any) -> Any:
    if tl.core.is_builtin(tl.core.load):  # once is enough, and each time takes long
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **named)


InterpreterBuilder.cast_impl = _cast_impl
InterpreterBuilder.create_fp_to_fp = lambda self, src, dst_type, _: _cast_impl(
    self, src, dst_type
)
InterpreterBuilder.binary_op = _binary_op
InterpreterBuilder.create_dot = _dot
interpreter._patch_lang_tensor = _patch_lang_tensor
InterpreterBuilder.create_inline_asm = _inline_asm
interpreter.InterpretedFunction.__call__ = _call

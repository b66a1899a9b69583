"""Patches of Triton's interpreter, so that it runs the kernels on the CPU.

The patches add operations that the interpreter lacks, and correct operations whose
results differ from a GPU's. Processes that use this module must have
TRITON_INTERPRET=1, which `make test-all` sets. Triton reads this variable when it is
first imported.
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
        "needs TRITON_INTERPRET=1, which `make test-all` sets", allow_module_level=True
    )

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

# The dtypes that the interpreter stores as integers. The values are (torch dtype, numpy
# dtype of the stored integers).
_STORED_AS_INTEGERS = {
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_TO_HALF = "cvt.rn.f16x2.e4m3x2"
_FP4 = np.array([sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def _numbers(handle: TensorHandle) -> Any:
    """Return the values of a handle as an array of numbers, decoded if they are stored
    as integers.
    """
    dtype = handle.dtype.scalar
    if dtype not in _STORED_AS_INTEGERS:
        return handle.data
    # np.array copies, because torch does not accept the strides of a broadcast array.
    bits = torch.from_numpy(np.array(handle.data, order="C"))
    return bits.view(_STORED_AS_INTEGERS[dtype][0]).float().numpy()


def _converted(data: Any, dtype: Any) -> TensorHandle:
    """Return a handle of `dtype` with these numbers, rounded to nearest.

    FP8 numbers beyond the largest one are clamped, as on GPUs.
    """
    if dtype not in _STORED_AS_INTEGERS:
        numpy_dtypes = {
            tl.float16: np.float16,
            tl.float32: np.float32,
            tl.float64: np.float64,
        }
        return TensorHandle(np.asarray(data).astype(numpy_dtypes[dtype]), dtype)
    numbers = torch.from_numpy(np.array(data, np.float32, order="C"))
    if dtype in _LARGEST:
        numbers = numbers.clamp(-_LARGEST[dtype], _LARGEST[dtype])
    torch_dtype, integer_dtype = _STORED_AS_INTEGERS[dtype]
    bits_dtype = torch.uint8 if integer_dtype is np.uint8 else torch.int16
    bits = numbers.to(torch_dtype).view(bits_dtype)
    return TensorHandle(bits.numpy().view(integer_dtype), dtype)


_cast = InterpreterBuilder.cast_impl
_binary = InterpreterBuilder.binary_op
_patch_tensor = interpreter._patch_lang_tensor


def _cast_impl(self: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
    if {src.dtype.scalar, dst_type.scalar} & _STORED_AS_INTEGERS.keys():
        if dst_type.scalar.is_floating():
            return _converted(_numbers(src), dst_type.scalar)
        src = TensorHandle(_numbers(src), tl.float32)
    result: TensorHandle = _cast(self, src, dst_type)
    return result


def _binary_op(
    self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Any
) -> TensorHandle:
    # Without this patch, the interpreter would compute with the stored integers.
    if lhs.dtype.scalar in _STORED_AS_INTEGERS:
        return _converted(op(_numbers(lhs), _numbers(rhs)), lhs.dtype.scalar)
    result: TensorHandle = _binary(self, lhs, rhs, op)
    return result


def _dot(
    self: Any, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *_: Any
) -> TensorHandle:
    dtype = acc.data.dtype
    product = np.matmul(_numbers(a).astype(dtype), _numbers(b).astype(dtype))
    return TensorHandle(product + acc.data, acc.dtype.scalar)


def _inline_asm(
    self: Any, asm: str, _: str, values: list[TensorHandle], *__: Any
) -> Any:
    """Evaluate the inline assembly of Baton's kernels, which decodes quantized weights
    or prefetches.

    The tests in tests/gpu run the real instructions. They use the same reference as the
    tests that run this function.
    """
    if "prefetch" in asm:
        nothing = TensorHandle(np.zeros(values[0].data.shape, np.int32), tl.int32)
        return SimpleNamespace(get_result=lambda index: nothing)
    codes = values[0].data
    kind = asm.rpartition("// ")[2]
    dtype = tl.bfloat16 if "bf16x2" in asm else tl.float16
    halves = (codes & 15, codes >> 4)
    if kind == "int4":
        bias = 128 if dtype == tl.bfloat16 else 1024
        results = [half + bias + _numbers(values[1]) for half in halves]
    elif kind == "fp4":
        results = [_FP4[half] for half in halves]
    elif kind == "fp4 words":
        # Each 32-bit factor holds the same bfloat16 number in both halves.
        factor = (values[1].data & 0xFFFF).astype(np.uint16)
        scales = _numbers(TensorHandle(factor, tl.bfloat16)) * 2.0**-126
        results = [number * scales for number in _numbers_of_words(codes)]
    else:
        assert kind == "fp8" or _TO_HALF in asm, asm
        results = [_numbers(TensorHandle(codes, tl.float8e4nv))]
    return SimpleNamespace(get_result=lambda index: _converted(results[index], dtype))


def _numbers_of_words(words: Any) -> list[Any]:
    """Return the eight numbers that each word of FP4 codes holds. `packed_fp4.pack`
    describes their order.
    """
    words = words.astype(np.int64) & 0xFFFFFFFF
    rotated = words >> 6 | words << 26
    registers = (
        words,
        words << 6,
        rotated,
        words << 4 & 0x81808180 | words >> 4 & 0x00400040,
    )
    numbers = []
    for register in registers:
        for upper_half in range(2):
            bits = register >> 16 * upper_half
            numbers.append(_FP4[bits >> 12 & 8 | bits >> 6 & 7])
    return numbers


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    # The interpreter's scalars are arrays of one element, which numpy does not accept
    # as an index.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _call(self: Any, *args: Any, **named: Any) -> Any:
    if tl.core.is_builtin(tl.core.load):  # not patched yet; patching is slow
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

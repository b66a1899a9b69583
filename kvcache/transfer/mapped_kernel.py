"""The gather kernel: gather.py's arithmetic on a GPU. The only file that imports Triton.

One variant is compiled for a width of the unit (and a pair of dtypes, where they differ); geometry
arrives as numbers in memory, so a new peer compiles nothing. Few programs, each of which takes
tiles of units in turn: reading over NVLink wants many bytes in flight, not many multiprocessors,
and the rest are the decode batch's.
"""

import ctypes
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcache.pool import KVPool
from kvcache.transfer.cuda_driver import driver
from kvcache.transfer.gather import Share, unit_elements
from protocol.handshake import FP8

TILE_UNITS = 2048  # 32 KiB
CONVERTED_TILE_UNITS = 512
NUM_WARPS = 8
_WORDS = {16: (tl.int32, 4), 8: (tl.int32, 2), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}
_DTYPES = {
    "float32": tl.float32,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float8_e4m3fn": tl.float8e4nv,
}
_compiled: dict[tuple[int, "_Variant"], tuple[Any, tuple[Any, ...]]] = {}  # by device


class _Numbers(ctypes.Structure):
    """The kernel's arguments, and the two that Triton appends, which are for what it lacks."""

    _fields_ = (
        ("source_address", ctypes.c_int64),
        ("target_address", ctypes.c_int64),
        ("parameters", ctypes.c_int64),
        ("remote_table", ctypes.c_int64),
        ("local_table", ctypes.c_int64),
        ("ordinal", ctypes.c_int32),
        ("num_units", ctypes.c_int32),
        ("token_start", ctypes.c_int32),
        ("token_stop", ctypes.c_int32),
        ("scratch", ctypes.c_int64 * 2),
    )


_SIZES = [8] * 5 + [4] * 4 + [8] * 2


@dataclass(eq=False)
class Kernel:
    """A compiled kernel and its arguments; one thread's.

    Triton's dispatch takes some 50 us and its launcher 10 or more; nothing that they look at ever
    changes here, so the driver is called with the arguments as they lie.
    """

    compiled: Any
    constants: tuple[Any, ...]
    direct: bool = field(init=False)  # its parameters are as expected
    numbers: _Numbers = field(default_factory=_Numbers)
    arguments: Any = field(init=False)

    def __post_init__(self) -> None:
        start = ctypes.addressof(self.numbers)
        offsets = [sum(_SIZES[:index]) for index in range(len(_SIZES))]
        self.arguments = (ctypes.c_void_p * len(offsets))(*(start + each for each in offsets))
        metadata = self.compiled.metadata
        self.function, self.shared = self.compiled.function, metadata.shared
        self.address = ctypes.addressof(self.arguments)
        sizes = driver().parameter_sizes(self.function)
        scratch = getattr(metadata, "global_scratch_size", 0)
        self.direct = not scratch and len(sizes) >= 9 and sizes == _SIZES[: len(sizes)]

    def launch(self, num_programs: int, stream: int, *numbers: int) -> None:
        """`numbers` as the kernel takes them."""
        if not self.direct:
            self.compiled[(num_programs, 1, 1)](*numbers, *self.constants, stream=stream)
            return
        n = self.numbers
        (
            n.source_address,
            n.target_address,
            n.parameters,
            n.remote_table,
            n.local_table,
            n.ordinal,
            n.num_units,
            n.token_start,
            n.token_stop,
        ) = numbers
        driver().launch(
            self.function, num_programs, 32 * NUM_WARPS, self.shared, stream, self.address
        )


class _Variant(NamedTuple):
    source_dtype: str
    target_dtype: str
    unit_elements: int
    is_scaled: bool

    @property
    def types(self) -> tuple[Any, Any, int]:
        if self.converts:
            return _DTYPES[self.source_dtype], _DTYPES[self.target_dtype], self.unit_elements
        itemsize = getattr(torch, self.source_dtype).itemsize
        word, width = _WORDS[self.unit_elements * itemsize]
        return word, word, width

    @property
    def converts(self) -> bool:
        return self.is_scaled or self.source_dtype != self.target_dtype


def kernel_for(share: Share, memory: int, stream: int) -> Kernel:
    """What gathers such a share on the current device, compiled if it has to be.

    Args:
        memory, stream: an address on the device and CUDA's handle of a stream, where the kernel
            is tried with nothing to do.
    """
    dtypes = share.source_dtype, share.target_dtype
    variant = _Variant(*dtypes, share.unit_elements, share.factors is not None)
    return Kernel(*_compile(variant, memory, stream))


def compile_kernels(pool: KVPool, *, convert: bool) -> None:
    """Has ready, on the pool's device, all that any peer's KV may need to get into the pool.

    Args:
        convert: also KV of other dtypes and scales.
    """
    target = pool.layout
    with torch.cuda.device(pool.device):
        stream = torch.cuda.current_stream().cuda_stream
        for source in _DTYPES if convert else (target.dtype,):
            units = unit_elements(replace(target, dtype=source), target)
            may_scale = convert and FP8 in (source, target.dtype)
            for is_scaled in (False, True)[: 1 + may_scale]:
                variant = _Variant(source, target.dtype, units, is_scaled)
                _compile(variant, pool.base_address, stream)


def _compile(variant: _Variant, memory: int, stream: int) -> tuple[Any, tuple[Any, ...]]:
    """The kernel and its constants."""
    key = torch.cuda.current_device(), variant
    if key not in _compiled:
        tile = CONVERTED_TILE_UNITS if variant.converts else TILE_UNITS
        constants = (*variant.types, tile, variant.is_scaled, 1)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):  # type: ignore[no-untyped-call]
            numbers = [memory] * 5 + [0] * 4
            compiled = _kernel[(1,)](*numbers, *constants, num_warps=NUM_WARPS)
        _compiled[key] = compiled, constants
    return _compiled[key]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _divisor(p):  # type: ignore[no-untyped-def]
    """The constant whose (d, magic, shift) lie at p."""
    return tl.load(p).to(tl.int32), tl.load(p + 1).to(tl.uint64), tl.load(p + 2).to(tl.uint64)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _axis(p):  # type: ignore[no-untyped-def]
    """The strides at p: source, target, tokens, factors."""
    return tl.load(p), tl.load(p + 1), tl.load(p + 2).to(tl.int32), tl.load(p + 3).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _divide(number, divisor):  # type: ignore[no-untyped-def]
    """Quotient and remainder of i32."""
    wide = number.to(tl.uint32).to(tl.uint64)
    quotient = ((wide * divisor[1]) >> divisor[2]).to(tl.int32)
    return quotient, number - quotient * divisor[0]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _step(number, source, target, token, factor, divisor, axis):  # type: ignore[no-untyped-def]
    """Takes one axis off the units' numbers."""
    number, index = _divide(number, divisor)
    source += index.to(tl.int64) * axis[0]
    target += index.to(tl.int64) * axis[1]
    token += index * axis[2]
    factor += index * axis[3]
    return number, source, target, token, factor


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _walk(  # type: ignore[no-untyped-def]
    number, source, target, size_0, axis_0, size_1, axis_1, size_2, axis_2, size_3, axis_3
):
    """Takes all four axes off the units' numbers; what is left numbers their blocks."""
    token = number * 0
    factor = number * 0
    number, source, target, token, factor = _step(
        number, source, target, token, factor, size_0, axis_0
    )
    number, source, target, token, factor = _step(
        number, source, target, token, factor, size_1, axis_1
    )
    number, source, target, token, factor = _step(
        number, source, target, token, factor, size_2, axis_2
    )
    number, source, target, token, factor = _step(
        number, source, target, token, factor, size_3, axis_3
    )
    return number, source, target, token, factor


@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=[
        "source_address",
        "target_address",
        "parameters",
        "remote_table",
        "local_table",
        "ordinal",
        "num_units",
        "token_start",
        "token_stop",
    ]
)
def _kernel(  # type: ignore[no-untyped-def]
    source_address: tl.int64,
    target_address: tl.int64,
    parameters: tl.int64,
    remote_table: tl.int64,
    local_table: tl.int64,
    ordinal: tl.int32,
    num_units: tl.int32,
    token_start: tl.int32,
    token_stop: tl.int32,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """See gather.py; numbers of the form p + k are indices into its parameters, which are read
    once: in the loop they would cost twice the registers."""
    p = parameters.to(tl.pointer_type(tl.int64))
    remote_blocks = remote_table.to(tl.pointer_type(tl.int64))
    local_blocks = local_table.to(tl.pointer_type(tl.int64))
    source_base = tl.multiple_of(source_address.to(tl.pointer_type(SOURCE)), 16)
    target_base = tl.multiple_of(target_address.to(tl.pointer_type(TARGET)), 16)
    source_first, target_first = tl.load(p), tl.load(p + 1)
    source_block, target_block, target_token = tl.load(p + 2), tl.load(p + 3), tl.load(p + 4)
    block_step, source_tokens = tl.load(p + 5).to(tl.int32), tl.load(p + 6).to(tl.int32)
    target_tokens, row_units = _divisor(p + 7), _divisor(p + 10)
    size_0, size_1, size_2 = _divisor(p + 13), _divisor(p + 20), _divisor(p + 27)
    axis_0, axis_1, axis_2 = _axis(p + 16), _axis(p + 23), _axis(p + 30)
    size_3, axis_3 = _divisor(p + 34), _axis(p + 37)
    lanes = tl.arange(0, WIDTH)[None, :]
    for start in tl.range(
        tl.program_id(0) * TILE, num_units, tl.num_programs(0) * TILE, num_stages=STAGES
    ):
        number = start + tl.arange(0, TILE)[:, None]
        wanted = number < num_units
        number, unit = _divide(number, row_units)
        source, target = source_first + unit, target_first + unit
        number, source, target, token, factor = _walk(
            number, source, target, size_0, axis_0, size_1, axis_1, size_2, axis_2, size_3, axis_3
        )
        block = ordinal + number * block_step
        token += block * source_tokens
        wanted &= (token >= token_start) & (token < token_stop)
        target_ordinal, target_offset = _divide(token, target_tokens)
        source += tl.load(remote_blocks + block, mask=wanted, other=0) * source_block
        target += tl.load(local_blocks + target_ordinal, mask=wanted, other=0) * target_block
        target += target_offset.to(tl.int64) * target_token
        value = tl.load(source_base + (source * WIDTH + lanes), mask=wanted)
        if SCALED:
            bits = tl.load(p + 41 + factor, mask=wanted, other=0).to(tl.int32)
            value = (value.to(tl.float32) * bits.to(tl.float32, bitcast=True)).to(TARGET)
        elif SOURCE != TARGET:
            value = value.to(tl.float32).to(TARGET)
        tl.store(target_base + (target * WIDTH + lanes), value, mask=wanted)

"""The gather kernel: gather.py's arithmetic on a GPU. The only file that imports Triton.

One variant is compiled for a width of the unit (and a pair of dtypes, where they differ); geometry
arrives as numbers in memory, so a new peer compiles nothing. Few programs, each of which takes
tiles of units in turn: reading over NVLink wants many bytes in flight, not many multiprocessors,
and the rest are the decode batch's.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kvcache.transfer.gather import Gather

TILE_UNITS = 2048  # 32 KiB
CONVERTED_TILE_UNITS = 512
NUM_WARPS = 8
_WORDS = {16: (tl.int32, 4), 8: (tl.int32, 2), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}
# By device, dtypes, width of a unit, whether elements are scaled and thread blocks: what launches
# the compiled kernel, and its constants.
_compiled: dict[tuple[int, str, str, int, bool, int], tuple[Any, tuple[Any, ...]]] = {}
_DTYPES = {
    "float32": tl.float32,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float8_e4m3fn": tl.float8e4nv,
}


def launch(
    gather: Gather,
    source_address: int,
    target_address: int,
    parameters: int,
    remote_table: int,
    local_table: int,
    first: int,
    count: int,
    *,
    num_programs: int,
    stream: int,
) -> None:
    """Queues one launch on a stream (CUDA's handle) of the current device.

    Args:
        source_address: of the peer's allocation as mapped here.
        target_address: of this rank's pool.
        parameters, remote_table, local_table: addresses on the device of gather.parameters and of
            the two block tables, i64 each.
        first, count: of `launches`.
    """
    device = torch.cuda.current_device()
    key = (
        device,
        gather.source_dtype,
        gather.target_dtype,
        gather.unit_elements,
        gather.factors is not None,
        num_programs,
    )
    numbers = (
        source_address,
        target_address,
        parameters,
        remote_table,
        local_table,
        first,
        count * gather.block_units,
    )
    variant = _compiled.get(key)
    if variant is None:
        tile = CONVERTED_TILE_UNITS if gather.converts else TILE_UNITS
        constants = (*_types(gather), tile, gather.factors is not None)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):  # type: ignore[no-untyped-call]
            kernel = _kernel[(num_programs,)](*numbers, *constants, num_warps=NUM_WARPS)
        _compiled[key] = kernel[(num_programs, 1, 1)], constants
    else:
        # Triton's own dispatch takes some 50 us; nothing of what it looks at ever changes here.
        run, constants = variant
        run(*numbers, *constants, stream=stream)


def _types(gather: Gather) -> tuple[Any, Any, int]:
    source, target = _DTYPES[gather.source_dtype], _DTYPES[gather.target_dtype]
    if gather.converts:
        return source, target, gather.unit_elements
    itemsize = getattr(torch, gather.source_dtype).itemsize
    word, width = _WORDS[gather.unit_elements * itemsize]
    return word, word, width


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _divide(number, divisor):  # type: ignore[no-untyped-def]
    """Quotient and remainder of i32 by the constant whose (d, magic, shift) lie at `divisor`."""
    size = tl.load(divisor).to(tl.int32)
    magic = tl.load(divisor + 1).to(tl.uint64)
    shift = tl.load(divisor + 2).to(tl.uint64)
    wide = number.to(tl.uint32).to(tl.uint64)
    quotient = ((wide * magic) >> shift).to(tl.int32)
    return quotient, number - quotient * size


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _step(number, source, target, token, factor, axis):  # type: ignore[no-untyped-def]
    """Takes one axis off the units' numbers."""
    number, index = _divide(number, axis)
    source += index.to(tl.int64) * tl.load(axis + 3)
    target += index.to(tl.int64) * tl.load(axis + 4)
    token += index * tl.load(axis + 5).to(tl.int32)
    factor += index * tl.load(axis + 6).to(tl.int32)
    return number, source, target, token, factor


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _locate(  # type: ignore[no-untyped-def]
    p, remote_blocks, local_blocks, first, start, num_units, TILE: tl.constexpr
):
    """Source, target, whether it is wanted and its factor, of the units from `start` on."""
    number = start + tl.arange(0, TILE)[:, None]
    wanted = number < num_units
    number, unit = _divide(number, p + 13)
    source = tl.load(p) + unit
    target = tl.load(p + 1) + unit
    token = number * 0
    factor = number * 0
    number, source, target, token, factor = _step(number, source, target, token, factor, p + 16)
    number, source, target, token, factor = _step(number, source, target, token, factor, p + 23)
    number, source, target, token, factor = _step(number, source, target, token, factor, p + 30)
    number, source, target, token, factor = _step(number, source, target, token, factor, p + 37)
    ordinal = tl.load(p + 7).to(tl.int32) + (first + number) * tl.load(p + 8).to(tl.int32)
    token += ordinal * tl.load(p + 9).to(tl.int32)
    wanted &= (token >= tl.load(p + 5).to(tl.int32)) & (token < tl.load(p + 6).to(tl.int32))
    target_ordinal, target_offset = _divide(token, p + 10)
    source += tl.load(remote_blocks + ordinal, mask=wanted, other=0) * tl.load(p + 2)
    target += tl.load(local_blocks + target_ordinal, mask=wanted, other=0) * tl.load(p + 3)
    target += target_offset.to(tl.int64) * tl.load(p + 4)
    return source, target, wanted, factor


@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=[
        "source_address",
        "target_address",
        "parameters",
        "remote_table",
        "local_table",
        "first",
        "num_units",
    ]
)
def _kernel(  # type: ignore[no-untyped-def]
    source_address: tl.int64,
    target_address: tl.int64,
    parameters: tl.int64,
    remote_table: tl.int64,
    local_table: tl.int64,
    first: tl.int32,
    num_units: tl.int32,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """See gather.py; numbers of the form p + k are indices into its parameters."""
    p = parameters.to(tl.pointer_type(tl.int64))
    remote_blocks = remote_table.to(tl.pointer_type(tl.int64))
    local_blocks = local_table.to(tl.pointer_type(tl.int64))
    source_base = tl.multiple_of(source_address.to(tl.pointer_type(SOURCE)), 16)
    target_base = tl.multiple_of(target_address.to(tl.pointer_type(TARGET)), 16)
    lanes = tl.arange(0, WIDTH)[None, :]
    for start in range(tl.program_id(0) * TILE, num_units, tl.num_programs(0) * TILE):
        source, target, wanted, factor = _locate(
            p, remote_blocks, local_blocks, first, start, num_units, TILE
        )
        value = tl.load(source_base + (source * WIDTH + lanes), mask=wanted)
        if SCALED:
            bits = tl.load(p + 44 + factor, mask=wanted, other=0).to(tl.int32)
            value = (value.to(tl.float32) * bits.to(tl.float32, bitcast=True)).to(TARGET)
        elif SOURCE != TARGET:
            value = value.to(tl.float32).to(TARGET)
        tl.store(target_base + (target * WIDTH + lanes), value, mask=wanted)

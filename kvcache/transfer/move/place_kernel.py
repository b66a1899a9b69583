"""The placing kernel, which copies KV into the pool; cuda_placer.py explains it.

This is the only file of kvcache/transfer/ that imports Triton.

One variant of the kernel is compiled for each size of a unit, and for each pair of
dtypes that needs a conversion. The geometry is passed as numbers in memory, so nothing
is compiled for a new peer. Only a few programs (thread blocks) run, and each processes
one tile of units after another. Reading over NVLink needs many bytes in flight, but few
multiprocessors. The decode batch needs all other multiprocessors.
"""

import triton
import triton.language as tl

from protocol.handshake import ITEMSIZE

TILE_UNITS = 2048  # 32 KiB of 16-byte units
CONVERTED_TILE_UNITS = 512
NUM_WARPS = 8
_WORDS = {
    16: (tl.int32, 4),
    8: (tl.int32, 2),
    4: (tl.int32, 1),
    2: (tl.int16, 1),
    1: (tl.int8, 1),
}
_DTYPES = {
    "float32": tl.float32,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float8_e4m3fn": tl.float8e4nv,
}


def launch(
    source: str,
    target: str,
    unit_elements: int,
    scaled: bool,
    num_programs: int,
    *numbers: int,
) -> None:
    """Queues the kernel on the current stream. Compiles each variant on first use.

    Args:
        source, target, unit_elements, scaled: the fields of cuda_placer.KernelKind.
        num_programs: number of thread blocks.
        numbers: the kernel's arguments: the addresses of the source memory, of the
            target memory, of the parameters, of the piece offsets at the source, and of
            the piece offsets at the target; then the number of units.
    """
    if scaled or source != target:
        source_type = _DTYPES[source]
        target_type = _DTYPES[target]
        width = unit_elements
        tile = CONVERTED_TILE_UNITS
    else:
        source_type, width = _WORDS[unit_elements * ITEMSIZE[source]]
        target_type = source_type
        tile = TILE_UNITS
    _kernel[(num_programs,)](
        *numbers,
        SOURCE=source_type,
        TARGET=target_type,
        WIDTH=width,
        TILE=tile,
        SCALED=scaled,
        num_warps=NUM_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _divisor(p):  # type: ignore[no-untyped-def]
    """Loads the (d, magic, shift) at p; see cuda_placer.divisor."""
    return (
        tl.load(p).to(tl.int32),
        tl.load(p + 1).to(tl.uint64),
        tl.load(p + 2).to(tl.uint64),
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _axis(p):  # type: ignore[no-untyped-def]
    """Loads the three strides of an axis at p: source, target and scale factors."""
    return tl.load(p), tl.load(p + 1), tl.load(p + 2).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _divide(number, divisor):  # type: ignore[no-untyped-def]
    """Quotient and remainder of i32 numbers."""
    wide = number.to(tl.uint32).to(tl.uint64)
    quotient = ((wide * divisor[1]) >> divisor[2]).to(tl.int32)
    return quotient, number - quotient * divisor[0]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _step(number, source, target, factor, divisor, axis):  # type: ignore[no-untyped-def]
    """Separates the index on one axis from the unit numbers: one step of `_walk`.

    Adds index x stride to the source, target and scale factor offsets. The returned
    numbers contain the indices on all remaining axes.
    """
    number, index = _divide(number, divisor)
    source += index.to(tl.int64) * axis[0]
    target += index.to(tl.int64) * axis[1]
    factor += index * axis[2]
    return number, source, target, factor


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _walk(  # type: ignore[no-untyped-def]
    number, unit, size_0, axis_0, size_1, axis_1, size_2, axis_2, size_3, axis_3
):
    """Divides the unit numbers into piece numbers and indices on the four axes.

    Returns:
        The piece numbers; the offsets of the units in their pieces, at the source and
        at the target; and the indices of the units' scale factors.
    """
    source = unit.to(tl.int64)
    target = source
    factor = unit * 0
    number, source, target, factor = _step(
        number, source, target, factor, size_0, axis_0
    )
    number, source, target, factor = _step(
        number, source, target, factor, size_1, axis_1
    )
    number, source, target, factor = _step(
        number, source, target, factor, size_2, axis_2
    )
    number, source, target, factor = _step(
        number, source, target, factor, size_3, axis_3
    )
    return number, source, target, factor


@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=[
        "source_address",
        "target_address",
        "parameters",
        "sources",
        "targets",
        "num_units",
    ]
)
def _kernel(  # type: ignore[no-untyped-def]
    source_address: tl.int64,
    target_address: tl.int64,
    parameters: tl.int64,
    sources: tl.int64,
    targets: tl.int64,
    num_units: tl.int32,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Copies units into the pool and converts them if needed; see cuda_placer.py.

    p + k points to number k of cuda_placer.Units.parameters. The parameters are read
    before the loop, because reading them in the loop would take twice the registers.
    """
    p = parameters.to(tl.pointer_type(tl.int64))
    source_pieces = sources.to(tl.pointer_type(tl.int64))
    target_pieces = targets.to(tl.pointer_type(tl.int64))
    source_base = tl.multiple_of(source_address.to(tl.pointer_type(SOURCE)), 16)
    target_base = tl.multiple_of(target_address.to(tl.pointer_type(TARGET)), 16)
    row_units = _divisor(p)
    size_0 = _divisor(p + 3)
    axis_0 = _axis(p + 6)
    size_1 = _divisor(p + 9)
    axis_1 = _axis(p + 12)
    size_2 = _divisor(p + 15)
    axis_2 = _axis(p + 18)
    size_3 = _divisor(p + 21)
    axis_3 = _axis(p + 24)
    lanes = tl.arange(0, WIDTH)[None, :]
    for start in tl.range(
        tl.program_id(0) * TILE, num_units, tl.num_programs(0) * TILE, num_stages=1
    ):
        number = start + tl.arange(0, TILE)[:, None]
        in_range = number < num_units
        number, unit = _divide(number, row_units)
        piece, source, target, factor = _walk(
            number, unit, size_0, axis_0, size_1, axis_1, size_2, axis_2, size_3, axis_3
        )
        source += tl.load(source_pieces + piece, mask=in_range, other=0)
        target += tl.load(target_pieces + piece, mask=in_range, other=0)
        value = tl.load(source_base + (source * WIDTH + lanes), mask=in_range)
        if SCALED:
            bits = tl.load(p + 27 + factor, mask=in_range, other=0).to(tl.int32)
            value = (value.to(tl.float32) * bits.to(tl.float32, bitcast=True)).to(
                TARGET
            )
        elif SOURCE != TARGET:
            value = value.to(tl.float32).to(TARGET)
        tl.store(target_base + (target * WIDTH + lanes), value, mask=in_range)

"""Products with quantised weights.

A kernel is used only if it passes a self-test on this device, in which its results are
compared with products of the dequantised weight.
"""

import functools
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.quantization.quantized import FP8, Kind, Quantized, Weight, dequantised
from protocol.process.logging import get_logger

_log = get_logger(__name__)
_DTYPES: Final = (torch.bfloat16, torch.float16)
# Scaled products (torch._scaled_mm of FP8 rows) are used from this number of rows on.
# Fewer rows stay in 16 bits, because FP8 would be at most 8 % faster for them. This
# comparison includes the time to quantise the rows.
_MIN_SCALED_ROWS: Final = 9
# From this number of rows on, torch._scaled_mm itself applies the scale of each row.
# For fewer rows, torch._scaled_mm with one scale for all rows is 1.2 to 1.8 times as
# fast, so another kernel applies the scales of the rows afterwards.
_MIN_ROWS_SCALED_BY_ROW: Final = 129
# In a scaled product, the numbers of rows and of columns of the weight must be
# multiples of this number.
_ALIGNMENT: Final = 16
# Largest relative error in a self-test. Kernels round only the result, to a precision
# of 8 bits or more. Scaled products also round the input, to a precision of 4 bits,
# with a mean error of 2.6 %.
_MAX_DEVIATION: Final = 0.01
_MAX_SCALED_DEVIATION: Final = 0.06
# Rows of the products in a self-test; they use all tiles of the kernel.
_SELF_TEST_ROWS: Final = (1, 12, 45, 100, 200)
_SELF_TEST_OUT: Final = 80


@functools.cache
def _kernels() -> Any:
    """Returns the module model.quantization.kernels.

    The module is imported on first use, because it needs Triton, which only CUDA builds
    of torch have.
    """
    from model.quantization import kernels

    return kernels


class Variant(NamedTuple):
    """The properties of a weight that select the variant of a kernel.

    Some multiplication methods (see `_find_flaw`) also choose tiles by the weight's
    width. These methods are tested once per width.

    Attributes:
        depth: number of columns that can be multiplied at a time.
        has_groups: a row has several groups, each with its own scale.
        dtype: data type of products.
    """

    kind: Kind
    depth: int
    has_groups: bool
    has_zeros: bool
    scale_dtype: torch.dtype
    dtype: torch.dtype
    device: torch.device


def unsupported_reason(weight: Quantized) -> str | None:
    """Returns why no kernel can multiply by the weight on its device and in its dtype.

    Returns None if a kernel can multiply by the weight.
    """
    if weight.device.type != "cuda" or weight.dtype not in _DTYPES:
        return f"no kernel for {weight.dtype} on {weight.device.type}"
    variant = _variant_of(weight)
    min_depth = _kernels().MIN_DEPTH
    if variant.depth < min_depth:
        return (
            f"no kernel takes {weight.shape[-1]} columns in groups of {weight.group}: "
            f"both must be multiples of {min_depth}"
        )
    # This runs the self-test of scaled products now, not while a graph is captured.
    _can_use_scaled_mm(weight)
    return _find_flaw("kernel", variant) or _find_flaw("kernel for experts", variant)


def multiply(weight: Quantized, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Multiplies x [T, in] by a weight [out, in].

    On the CPU the weight is dequantised first.

    Args:
        residual: [T, out], to which the product is added in place.

    Returns:
        [T, out]: the residual if given, else a new tensor.
    """
    if x.device.type == "cpu":
        product = F.linear(x, weight.dequantise())
        return product if residual is None else residual.add_(product)
    if len(x) >= _MIN_SCALED_ROWS and _can_use_scaled_mm(weight):
        return _multiply_scaled(weight, x, residual)
    result: Tensor = _kernels().multiply(weight, x, residual=residual)
    return result


def multiply_groups(weight: Weight, x: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the rows of each expert in x [T, in] by the expert's matrix.

    Args:
        weight: [experts, out, in].
        ends: int32 [experts], the end of each expert's rows.

    Returns:
        [T, out]. Rows after the last group are undefined.
    """
    if isinstance(weight, Tensor) or x.device.type == "cpu":
        return F.grouped_mm(x, dequantised(weight).transpose(1, 2), offs=ends)
    return _kernels().multiply(weight, x, ends)  # type: ignore[no-any-return]


def has_one_row_kernel(weight: Weight, *, gated: bool = False) -> bool:
    """Returns whether `fused_kernels.one_row` can multiply one row by the weight [out,
    in].

    The kernel includes the norm before the product and the operation after it.
    """
    if not fused_ops.kernels().has_one_row_kernel(weight, gated=gated):
        return False
    if isinstance(weight, Tensor):
        return True
    method = "gated product of one row" if gated else "product of one row"
    return _find_flaw(method, _variant_of(weight), weight.shape[1]) is None


def _variant_of(weight: Quantized) -> Variant:
    # Positional arguments, because this runs for each product outside of CUDA graphs.
    return Variant(
        weight.kind,
        _kernels().depth_of(weight),
        weight.scales.shape[-1] > 1,
        weight.zeros is not None,
        weight.scales.dtype,
        weight.dtype,
        weight.device,
    )


def _can_use_scaled_mm(weight: Quantized) -> bool:
    """Returns whether torch._scaled_mm can multiply by this weight.

    The weight must be FP8 with one scale for each row, and the GPU must support the
    function, as Hopper does. The weight's dtype must be bfloat16, because sums of
    unscaled products may overflow float16.
    """
    *_, num_out, width = weight.shape
    has_row_scales = weight.scales.shape[-1] == 1
    if weight.kind != "fp8" or not has_row_scales or weight.dtype != torch.bfloat16:
        return False
    if width % _ALIGNMENT:
        return False
    flaw = _find_flaw("scaled product", _variant_of(weight), width)
    return flaw is None and num_out % _ALIGNMENT == 0


@functools.cache
def _scalar_one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _multiply_scaled(
    weight: Quantized, x: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Quantises x to FP8, with a scale for each row, and multiplies it by a weight."""
    codes, scales = _kernels().quantise_rows(x)
    weight_codes = weight.codes.view(FP8).t()
    if len(x) >= _MIN_ROWS_SCALED_BY_ROW:
        product = torch._scaled_mm(
            codes,
            weight_codes,
            scale_a=scales,
            scale_b=weight.scales.t(),
            out_dtype=weight.dtype,
            use_fast_accum=True,
        )
        return product if residual is None else residual.add_(product)
    one = _scalar_one(x.device)
    product = torch._scaled_mm(
        codes,
        weight_codes,
        scale_a=one,
        scale_b=one,
        out_dtype=weight.dtype,
        use_fast_accum=True,
    )
    rescaled: Tensor = _kernels().rescale(product, scales, weight.scales, residual)
    return rescaled


@functools.cache
def _find_flaw(method: str, variant: Variant, width: int = 0) -> str | None:
    """Runs the self-test of a method to multiply by weights of a variant.

    If another method can replace this method, the flaw is logged here, once. Otherwise
    the caller reports the flaw.

    Args:
        width: columns of the weight; 0: the method does not depend on the width.

    Returns:
        The flaw, or None if there is none.
    """

    def deviations() -> Tensor:
        weight = example_weight(variant, width)
        row_counts = (1,) if "one row" in method else _SELF_TEST_ROWS
        return torch.stack([_deviation(method, weight, rows) for rows in row_counts])

    max_deviation = _MAX_SCALED_DEVIATION if "scaled" in method else _MAX_DEVIATION
    flaw = fused_ops.find_flaw(deviations, max_deviation)
    if not flaw:
        return None
    if "kernel" not in method:
        _log.warning(
            "the %s for %s %s; another method is used", method, variant.kind, flaw
        )
    return f"the {method} for {variant.kind} {flaw}"


def _deviation(method: str, weight: Quantized, rows: int) -> Tensor:
    """Returns the relative error of a product.

    Most methods are tested with a residual: the second product is added to the first.
    The error is NaN if the result has a NaN.
    """
    width = weight.shape[1:]
    if "scaled" in method:
        rows = max(rows, _MIN_SCALED_ROWS)
    count = 4 * rows if "experts" in method else rows
    x = torch.randn(count, *width, device=weight.device)
    x = F.rms_norm(x, width).to(weight.dtype)
    expected = 2 * F.linear(x.float(), weight.dequantise().float())
    if method == "kernel":
        # This tests products without and with a split of the columns of x.
        product = _kernels().multiply(weight, x, splits=False)
        product = _kernels().multiply(weight, x, residual=product)
    elif method == "kernel for experts":
        experts = weight.map_parts(lambda part: part.expand(4, -1, -1))
        experts = experts.to(x.device, x.dtype)
        # The kernel chooses its tile by the mean number of rows per expert.
        ends = torch.tensor([rows, rows, 3 * rows, count], dtype=torch.int32)
        product = 2 * multiply_groups(experts, x, ends.to(x.device))
    elif "scaled" in method:
        product = _multiply_scaled(weight, x, _multiply_scaled(weight, x))
    else:
        one_row = fused_ops.kernels().one_row
        is_gated = "gated" in method
        product = one_row(4 * x, weight, norm=torch.ones_like(x[0]), gated=is_gated)
        if is_gated:
            gate, up = expected.div(2).chunk(2, dim=1)
            expected = F.silu(gate) * up
        else:
            product = one_row(x, weight, residual=product)
    deviation: Tensor = (product.float() - expected).norm() / expected.norm()
    return deviation


def example_weight(variant: Variant, width: int = 0) -> Quantized:
    """Returns a weight with random codes and with scales around 1.

    Args:
        width: number of columns of the weight; 0: a multiple of `variant.depth` for
            which `depth_of` returns `variant.depth`.
    """
    kind, depth, has_groups, has_zeros, scale_dtype, dtype, device = variant
    if not width:
        # Without groups, `depth_of` returns the greatest common divisor of the width
        # and MAX_DEPTH. The width is chosen so that the divisor is `depth`.
        is_max_depth = depth == _kernels().MAX_DEPTH
        width = depth * (4 if has_groups or is_max_depth else 5)
    generator = torch.Generator().manual_seed(0)
    num_groups = width // depth if has_groups else 1
    group_shape = (_SELF_TEST_OUT, num_groups)

    def random_bytes(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    code_columns = width if kind == "fp8" else width // 2
    codes = random_bytes(0, 256, (_SELF_TEST_OUT, code_columns))
    if kind == "fp8":
        # Clears a bit of the exponent: the largest codes would outweigh all others, and
        # some are NaN.
        codes &= 0xBF
    factors = 0.5 + torch.rand(group_shape, generator=generator)
    if scale_dtype == torch.uint8:
        scales = random_bytes(125, 130, group_shape)
    else:
        scales = factors.to(scale_dtype)
    zeros = random_bytes(0, 16, group_shape) if has_zeros else None
    group = depth if has_groups else width
    weight = Quantized(codes, scales, zeros, kind, group, dtype)
    return weight.to(device, dtype)

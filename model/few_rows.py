"""Products of few rows with a weight, which take as long as reading the weight.

One kernel multiplies a single row, another one 2 to 16 rows. Both kernels include the
norm before the product, and the gate or the residual after the product.
"""

from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.quantization import products
from model.quantization.quantized import Weight

_NO_ROWS: Final = range(0)
_SELF_TEST_ROWS: Final = (2, 13, 16)


class FewRowsProduct:
    """The product of few rows with a weight [out, in].

    Args:
        gated: whether the result is silu(first half of the product) * (second half).

    Attributes:
        row_counts: the numbers of rows for which there is a kernel; may be empty.
    """

    def __init__(self, weight: Weight, *, gated: bool = False) -> None:
        self._weight = weight
        self._gated = gated
        self.row_counts = _NO_ROWS
        if not fused_ops.is_supported(weight.device, weight.dtype):
            return
        has_one_row_kernel = products.has_one_row_kernel(weight, gated=gated)
        first = 1 if has_one_row_kernel else 2
        last = 1
        if isinstance(weight, Tensor) and _has_few_rows_kernel(weight, gated):
            last = fused_ops.few_rows().MAX_ROWS
        self.row_counts = range(first, last + 1)

    def __call__(
        self,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Multiplies x [T, in] by the weight, for T in `row_counts`.

        Args:
            bias: [out], added to the product. Not allowed if the product is gated.
            norm: weight of a root-mean-square norm that is applied to x first.
            residual: [T, out], contiguous, to which the product is added in place.

        Returns:
            [T, out], or [T, out / 2] if gated: the residual if given, else a new
            tensor.
        """
        if len(x) == 1:
            multiply = fused_ops.kernels().one_row
        else:
            multiply = fused_ops.few_rows().few_rows
        result: Tensor = multiply(
            x,
            self._weight,
            bias=bias,
            norm=norm,
            eps=eps,
            gated=self._gated,
            residual=residual,
        )
        return result


def _has_few_rows_kernel(weight: Tensor, gated: bool) -> bool:
    """Returns whether the kernel for 2 to 16 rows accepts the matrix, and passes a
    self-test of its tiles on this device."""
    kernels = fused_ops.few_rows()
    if not kernels.has_kernel(weight, gated=gated):
        return False
    num_out = weight.shape[0] >> gated
    width = weight.shape[1]
    normed_tile = kernels.tile_for(num_out, width, gated=gated, normed=True)
    plain_tile = kernels.tile_for(num_out, width, gated=gated, normed=False)
    compute_deviations = partial(
        _deviations, weight, gated, normed_tile=normed_tile, plain_tile=plain_tile
    )
    return fused_ops.passes_self_test(
        (
            "few rows",
            weight.dtype,
            weight.device,
            width,
            gated,
            normed_tile,
            plain_tile,
        ),
        "the kernel for products of 2 to 16 rows is not used, because it %s",
        compute_deviations,
    )


def _deviations(
    sample: Tensor, gated: bool, *, normed_tile: Any, plain_tile: Any
) -> Tensor:
    """Returns the relative errors of products with random rows, as wide as `sample`.

    Args:
        normed_tile: the tile of the products with a norm.
        plain_tile: the tile of the products without a norm. If these products are not
            gated, they are tested with a residual.
    """
    width = sample.shape[1]
    device = sample.device
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    num_out = 3 * max(normed_tile.columns, plain_tile.columns)
    weight = (random(num_out << gated, width) / width**0.5).to(sample.dtype)
    norm = (1 + random(width) / 8).to(sample.dtype)
    errors = []
    for num_rows in _SELF_TEST_ROWS:
        x = random(num_rows, width).to(sample.dtype)
        residual = random(num_rows, num_out).to(sample.dtype)
        multiply = partial(fused_ops.few_rows().few_rows, x, weight, gated=gated)
        normed = F.rms_norm(x.float(), (width,), norm.float(), 1e-5)
        expected = F.linear(normed, weight.float())
        plain = F.linear(x.float(), weight.float())
        actual = multiply(norm=norm, eps=1e-5, tile=normed_tile)
        if gated:
            expected = _gated(expected)
            plain = _gated(plain)
            actual_plain = multiply(tile=plain_tile)
        else:
            plain += residual
            actual_plain = multiply(residual=residual, tile=plain_tile)
        errors.append(_error(actual, expected))
        errors.append(_error(actual_plain, plain))
    return torch.stack(errors)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=1)
    return F.silu(gate) * up


def _error(actual: Tensor, expected: Tensor) -> Tensor:
    error: Tensor = (actual.float() - expected).norm() / expected.norm()
    return error

"""The layers that all architectures share.

Each layer holds only this rank's part of its weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.config import ModelConfig
from model.few_rows import FewRowsProduct
from model.parallel import Parallel
from model.quantization import products
from model.quantization.quantized import Quantized, Weight, concatenated, map_weight
from model.weights import WeightLoader

# oneDNN chooses the memory layout of a packed weight for this number of rows. The
# layout for many rows is equally good for few rows.
_PACKING_ROWS: Final = 512
# oneDNN compiles a kernel of up to 0.7 MB for each number of rows. The number of rows
# is therefore rounded up so that only this many of its leading bits may be 1. Rounding
# adds at most an eighth of the rows.
_SIGNIFICANT_ROW_BITS: Final = 4
_mkldnn: Any = torch.ops.mkldnn
# Activations by their names in ModelConfig. They may change their argument in place.
_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": partial(F.silu, inplace=True),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda gate: gate * torch.sigmoid(1.702 * gate),
    "relu": torch.relu_,
    "relu2": lambda gate: torch.relu_(gate).square_(),
}


def can_pack(weight: Weight) -> bool:
    """Returns whether oneDNN can pack this weight.

    The weight must be a float32 matrix on the CPU, and torch must have oneDNN.
    """
    return (
        isinstance(weight, Tensor)
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and weight.dim() == 2
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


class Linear:
    """Multiplies x [T, in] by this rank's rows of a weight, which gives [T, out].

    Args:
        pack: copy a float32 weight on the CPU into oneDNN's blocked order, which is
            faster to read. The mapped original is then no longer needed.
    """

    def __init__(
        self, weight: Weight, bias: Tensor | None = None, *, pack: bool = False
    ) -> None:
        self.is_packed = pack and can_pack(weight)
        self.weight: Weight = weight
        if self.is_packed:
            self.weight = _mkldnn._reorder_linear_weight(weight, _PACKING_ROWS)
        self.bias = bias
        self.few_rows = FewRowsProduct(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) in self.few_rows.row_counts:
            return self.few_rows(x, bias=self.bias)
        if self.is_packed:
            rows = x.shape[0]
            granularity = 1 << max(0, rows.bit_length() - _SIGNIFICANT_ROW_BITS)
            missing = -rows % granularity
            if missing:
                x = F.pad(x, (0, 0, 0, missing))
            out: Tensor = _mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return out[:rows] if missing else out
        if isinstance(self.weight, Quantized):
            out = products.multiply(self.weight, x)
            return out if self.bias is None else out.add_(self.bias)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear:
    """Multiplies x [T, this rank's columns] by a weight, and sums over all ranks.

    `join` adds the sum [T, out] to the residual in place.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        parallel: Parallel,
        *,
        pack: bool = False,
        join: "Join | None" = None,
    ) -> None:
        self._product = Linear(weight, pack=pack)
        self.weight = self._product.weight
        self._weight_t = None
        if isinstance(weight, Tensor) and not self._product.is_packed:
            self._weight_t = weight.t()
        self._bias = bias
        self._parallel = parallel
        self._join = join or Join()

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        if self._parallel.size == 1 and self._join.is_plain:
            return self._add(x, residual)
        out = self._parallel.all_reduce(self._product(x))
        return self._join(out if self._bias is None else out.add_(self._bias), residual)

    def _add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds the product and the bias to `residual` in place. Needs a single rank."""
        few_rows = self._product.few_rows
        if len(x) in few_rows.row_counts:
            return few_rows(x, bias=self._bias, residual=residual)
        self.add_share(x, residual)
        return residual if self._bias is None else residual.add_(self._bias)

    def add_share(self, x: Tensor, out: Tensor) -> None:
        """Adds this rank's product with x, without the bias, to `out` [T, out] in
        place."""
        if len(x) in self._product.few_rows.row_counts:
            self._product.few_rows(x, residual=out)
        elif self._weight_t is not None:
            out.addmm_(x, self._weight_t)
        elif isinstance(self.weight, Quantized):
            products.multiply(self.weight, x, residual=out)
        else:
            out += self._product(x)


class RMSNorm:
    """Root-mean-square norm over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._shape = tuple(weight.shape)
        self.eps = eps
        self._is_fused = fused_ops.is_supported(weight.device, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_fused:
            result: Tensor = fused_ops.kernels().rms_norm(x, self.weight, self.eps)
            return result
        if self.weight.dtype != x.dtype:  # see `load_norm`
            return F.rms_norm(x.float(), self._shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class Join:
    """Adds the output of attention or feed-forward to the residual.

    In some models, the output is first normalized or scaled.
    """

    def __init__(self, norm: RMSNorm | None = None, scale: float = 1.0) -> None:
        self._norm = norm
        self._scale = scale
        self.is_plain = norm is None and scale == 1.0

    def __call__(self, out: Tensor, residual: Tensor) -> Tensor:
        """Adds `out` [T, hidden], summed over all ranks, to `residual` in place.

        Returns:
            the residual.
        """
        if self._norm is not None:
            out = self._norm(out)
        return residual.add_(out, alpha=self._scale)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Returns activation(gate) * up. May change `gate` in place."""
    return _ACTIVATIONS[activation](gate).mul_(up)


class GatedMLP:
    """Computes down(activation(gate(x)) * up(x)). Ranks split the intermediate size.

    Args:
        width: the intermediate size; None: config.intermediate_size.
    """

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        config: ModelConfig,
        parallel: Parallel,
        join: Join | None = None,
        *,
        width: int | None = None,
    ) -> None:
        is_fused = "gate_up_proj" in config.traits.fused
        width = width or config.intermediate_size
        bias = config.mlp_bias
        self._activation = config.activation
        rows = even_share(parallel, width)
        shape = (width, config.hidden_size)
        parts = split_parts(
            fused_name=f"{prefix}.gate_up_proj" if is_fused else None,
            names=[f"{prefix}.gate_proj", f"{prefix}.up_proj"],
            shapes=[shape, shape],
            rows=[rows, rows],
        )
        self._gate_up = load_columns(loader, parts, bias=bias)
        self._down = load_rows(
            loader, f"{prefix}.down_proj", shape[::-1], rows, bias, parallel, join
        )

    def __call__(self, hidden: Tensor, norm: RMSNorm | None) -> Tensor:
        """Adds the output to hidden [T, hidden] in place, and returns hidden."""
        return self._down(self._gate_up.gated(hidden, norm, self._activation), hidden)

    def add_share(self, x: Tensor, out: Tensor, gate: Tensor | None) -> None:
        """Adds this rank's part of the output for x [T, hidden] to `out` in place.

        Args:
            gate: [T, 1], a factor for each token's output; None: all factors are 1.
        """
        inner = self._gate_up.gated(x, None, self._activation)
        if gate is not None:
            inner.mul_(gate)
        self._down.add_share(inner, out)


class Columns:
    """Several projections of the same input, in one matmul where that is faster."""

    def __init__(self, parts: list[Linear], *, pack: bool = False) -> None:
        self._parts = parts
        self._sizes = [part.weight.shape[0] for part in parts]
        first = parts[0].weight
        pack = pack and can_pack(first)
        self._joined = None
        # On the CPU, weights that are not packed stay mapped from their file. Joining
        # them would copy them.
        if pack or first.device.type != "cpu":
            self._joined = _concatenate(parts, pack=pack)
        self._is_fused = self._joined is not None and fused_ops.is_supported(
            first.device, first.dtype
        )
        # Gated kernels for the joined matrix. They cannot add a bias.
        self._gated_few_rows: FewRowsProduct | None = None
        self._has_gated_rows_kernel = False
        if self._is_fused and self._joined is not None and self._joined.bias is None:
            matrix = self._joined.weight
            if len(self._sizes) == 2:
                self._gated_few_rows = FewRowsProduct(matrix, gated=True)
            self._has_gated_rows_kernel = isinstance(
                matrix, Tensor
            ) and fused_ops.kernels().has_gated_rows_kernel(matrix)

    def gated(
        self, x: Tensor, norm: RMSNorm | None = None, activation: str = "silu"
    ) -> Tensor:
        """Applies `norm`, if any, to x [T, in]; returns activation(first) * second.

        There must be exactly two projections; `first` and `second` are their results.
        """
        if not self._is_fused or activation != "silu":
            gate, up = self(x, norm)
            return gated(gate, up, activation)
        assert self._joined is not None
        few_rows = self._gated_few_rows
        if norm is not None:
            if few_rows is not None and len(x) in few_rows.row_counts:
                return few_rows(x, norm=norm.weight, eps=norm.eps)
            x = norm(x)
        if (
            self._has_gated_rows_kernel
            and x.shape[0] >= fused_ops.kernels().GATED_MIN_ROWS
        ):
            out: Tensor = fused_ops.kernels().gated_rows(x, self._joined.weight)
            return out
        result: Tensor = fused_ops.kernels().silu_and_mul(self._joined(x))
        return result

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> tuple[Tensor, ...]:
        """Applies `norm`, if any, to x [T, in]; returns a [T, out] for each projection.

        The results may be views of one tensor.
        """
        if norm is not None:
            joined = self._joined
            if joined is not None and len(x) in joined.few_rows.row_counts:
                joined_out = joined.few_rows(
                    x, bias=joined.bias, norm=norm.weight, eps=norm.eps
                )
                return torch.split_with_sizes(joined_out, self._sizes, dim=-1)
            x = norm(x)
        if self._joined is None:
            return tuple(part(x) for part in self._parts)
        return torch.split_with_sizes(self._joined(x), self._sizes, dim=-1)


def _concatenate(parts: list[Linear], *, pack: bool) -> Linear | None:
    """Concatenates projections and clears `parts`.

    If their weights are quantised in different ways, returns None and leaves `parts`
    unchanged.
    """
    biases = [part.bias for part in parts if part.bias is not None]
    weight = concatenated([part.weight for part in parts])
    if weight is None:
        return None
    joined = Linear(weight, torch.cat(biases) if biases else None, pack=pack)
    parts.clear()  # frees their memory on the device, or their mapping
    return joined


def even_share(parallel: Parallel, total: int) -> range:
    """Returns this rank's part of `total` items.

    `total` must be a multiple of the number of ranks.
    """
    share = total // parallel.size
    return range(parallel.rank * share, (parallel.rank + 1) * share)


class Part(NamedTuple):
    """The rows of a stored weight that belong to one projection.

    Attributes:
        shape: the shape of the complete weight.
        order: the order of the elements of each head; None: that of the files.
    """

    name: str
    shape: tuple[int, int]
    rows: range
    order: list[int] | None = None

    def weight(self, loader: WeightLoader) -> Weight:
        """Loads the projection's rows of the weight."""
        weight = loader.matrix(f"{self.name}.weight", self.shape, rows=self.rows)
        return map_weight(weight, lambda tensor: reordered(tensor, self.order))

    def bias(self, loader: WeightLoader) -> Tensor:
        """Loads the projection's elements of the bias."""
        bias = loader.load(f"{self.name}.bias", self.shape[:1], rows=self.rows)
        return reordered(bias, self.order)


def reordered(weight: Tensor, order: list[int] | None) -> Tensor:
    """Returns [heads * dim, ...] with the elements of every head in another order."""
    if order is None:
        return weight
    heads = weight.view(-1, len(order), *weight.shape[1:])
    return heads[:, order].flatten(0, 1)


def split_parts(
    *,
    fused_name: str | None,
    names: list[str],
    shapes: list[tuple[int, int]],
    rows: list[range],
) -> list[Part]:
    """Returns the parts of projections that are stored separately or fused.

    Args:
        fused_name: name of the weight that contains the rows of all projections, one
            projection after the other; None: each projection has its own weight.
        shapes: the complete shape of each projection.
        rows: the rows of each projection that this rank loads.
    """
    if fused_name is None:
        return [
            Part(name, shape, part_rows)
            for name, shape, part_rows in zip(names, shapes, rows, strict=True)
        ]
    fused_shape = (sum(shape[0] for shape in shapes), shapes[0][1])
    parts = []
    start = 0
    for shape, part_rows in zip(shapes, rows, strict=True):
        fused_rows = range(start + part_rows.start, start + part_rows.stop)
        parts.append(Part(fused_name, fused_shape, fused_rows))
        start += shape[0]
    return parts


def load_columns(loader: WeightLoader, parts: list[Part], *, bias: bool) -> Columns:
    """Loads projections that ranks split along their output."""
    linears = [
        Linear(part.weight(loader), part.bias(loader) if bias else None)
        for part in parts
    ]
    return Columns(linears, pack=loader.pack)


def load_rows(
    loader: WeightLoader,
    name: str,
    shape: tuple[int, ...],
    cols: range,
    bias: bool,
    parallel: Parallel,
    join: Join | None = None,
) -> RowParallelLinear:
    """Loads a projection that ranks split along its input.

    Args:
        cols: the columns of this rank.
        bias: the projection has a bias.
    """
    is_complete = len(cols) == shape[1]
    weight = loader.matrix(f"{name}.weight", shape, cols=None if is_complete else cols)
    bias_weight = loader.load(f"{name}.bias", shape[:1]) if bias else None
    return RowParallelLinear(weight, bias_weight, parallel, pack=loader.pack, join=join)


def load_norm(
    loader: WeightLoader,
    name: str,
    size: int,
    config: ModelConfig,
    *,
    rows: range | None = None,
    eps: float | None = None,
) -> RMSNorm:
    """Loads a norm.

    Args:
        rows: the elements of the norm's weight to load; None: all.
        eps: the eps of this norm; None: config.rms_eps.
    """
    weight = loader.load(f"{name}.weight", (size,), rows=rows)
    offset = config.traits.norm_offset
    if offset:
        # Stored weights are small. A sum in 16 bits would lose most of their bits.
        weight = weight.float() + offset
    return RMSNorm(weight, eps or config.rms_eps)

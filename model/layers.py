"""The layers that every architecture shares, each holding only this rank's part of its weights."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.config import ModelConfig
from model.parallel import Parallel
from model.quantization import products
from model.quantization.quantized import Quantized, Weight, changed, concatenated
from model.weights import WeightLoader

# Rows for which oneDNN chooses the order of a packed weight: that for many is as good for few ones.
_ROWS_HINT: Final = 512
# oneDNN compiles a kernel for each number of rows, up to 0.7 MB of it: rows are rounded up to a
# number of so many leading bits, at most an eighth more.
_ROWS_BITS: Final = 4
_mkldnn: Any = torch.ops.mkldnn
# By the names of ModelConfig. Each may change its argument.
_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": partial(F.silu, inplace=True),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda gate: gate * torch.sigmoid(1.702 * gate),
    "relu": torch.relu_,
    "relu2": lambda gate: torch.relu_(gate).square_(),
}


def can_pack(weight: Weight) -> bool:
    """Whether `pack` takes this weight: a float32 matrix on the CPU, and torch has oneDNN."""
    return (
        isinstance(weight, Tensor)
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and weight.dim() == 2
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


class Linear:
    """x [T, in] -> [T, out] with this rank's rows of the weight.

    Args:
        pack: keeps a float32 weight on the CPU in oneDNN's own blocked order, a copy that is read
            faster; the mapped original is then no longer needed.
    """

    def __init__(
        self, weight: Weight, bias: Tensor | None = None, *, pack: bool = False
    ) -> None:
        self.is_packed = pack and can_pack(weight)
        self.weight: Weight = (
            _mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
            if self.is_packed
            else weight
        )
        self.bias = bias
        is_fused = bias is None and fused_ops.works(weight.device, weight.dtype)
        self.takes_one_row = is_fused and products.takes_one_row(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self.takes_one_row and len(x) == 1:
            return fused_ops.kernels().one_row(x, self.weight)  # type: ignore[no-any-return]
        if self.is_packed:
            rows = x.shape[0]
            if missing := -rows % (1 << max(0, rows.bit_length() - _ROWS_BITS)):
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
    """x [T, this rank's columns] -> [T, out], summed over ranks, joined to `residual` in place."""

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
            self.add_share(x, residual)
            return residual if self._bias is None else residual.add_(self._bias)
        out = self._parallel.all_reduce(self._product(x))
        return self._join(out if self._bias is None else out.add_(self._bias), residual)

    def add_share(self, x: Tensor, out: Tensor) -> None:
        """Adds this rank's part of the sum, without the bias, to `out` [T, out] in place."""
        if self._product.takes_one_row and len(x) == 1:
            fused_ops.kernels().one_row(x, self.weight, residual=out)
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
        self._is_fused = fused_ops.works(weight.device, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_fused:
            return fused_ops.kernels().rms_norm(x, self.weight, self.eps)  # type: ignore[no-any-return]
        if self.weight.dtype != x.dtype:  # see `load_norm`
            return F.rms_norm(x.float(), self._shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class Join:
    """How a layer adds the output of its attention or feed-forward to the residual."""

    def __init__(self, norm: RMSNorm | None = None, scale: float = 1.0) -> None:
        self._norm, self._scale = norm, scale
        self.is_plain = norm is None and scale == 1.0

    def __call__(self, out: Tensor, residual: Tensor) -> Tensor:
        """out [T, hidden], complete; changes residual [T, hidden] in place and returns it."""
        return residual.add_(
            out if self._norm is None else self._norm(out), alpha=self._scale
        )


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation of `gate`, which may be changed in place, times `up`."""
    return _ACTIVATIONS[activation](gate).mul_(up)


class GatedMLP:
    """down(activation(gate(x)) * up(x)), its width split over the ranks."""

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
        """`width`: of the intermediate; the config's where not given."""
        fused = "gate_up_proj" in config.declared.fused
        width, bias = width or config.intermediate_size, config.mlp_bias
        self._activation = config.activation
        rows, shape = even_share(parallel, width), (width, config.hidden_size)
        names = [f"{prefix}.{name}_proj" for name in ("gate", "up")]
        parts = joined(
            f"{prefix}.gate_up_proj" if fused else None, names, [shape] * 2, [rows] * 2
        )
        self._gate_up = load_columns(loader, parts, bias=bias)
        self._down = load_rows(
            loader, f"{prefix}.down_proj", shape[::-1], rows, bias, parallel, join
        )

    def __call__(self, hidden: Tensor, norm: RMSNorm | None) -> Tensor:
        """hidden [T, hidden], changed in place and returned."""
        return self._down(self._gate_up.gated(hidden, norm, self._activation), hidden)

    def add_share(self, x: Tensor, out: Tensor, gate: Tensor | None) -> None:
        """Adds what this rank makes of x [T, hidden], times gate [T, 1], to `out` in place."""
        inner = self._gate_up.gated(x, None, self._activation)
        self._down.add_share(inner if gate is None else inner.mul_(gate), out)


class Columns:
    """Several projections of the same input, one matmul where that pays."""

    def __init__(self, parts: list[Linear], *, pack: bool = False) -> None:
        self._parts = parts
        self._sizes = [part.weight.shape[0] for part in parts]
        # On the CPU weights that are not packed stay where the file is mapped; joining copies.
        first = parts[0].weight
        pack = pack and can_pack(first)
        self._joined = (
            _join(parts, pack=pack) if pack or first.device.type != "cpu" else None
        )
        self._is_fused = self._joined is not None and fused_ops.works(
            first.device, first.dtype
        )
        # Of kernels that take the matrix alone: of one row, of one row gated, of many gated.
        self._takes = (False, False, False)
        if self._is_fused and self._joined is not None and self._joined.bias is None:
            matrix, kernels = self._joined.weight, fused_ops.kernels()
            of_one = (
                self._joined.takes_one_row,
                products.takes_one_row(matrix, gated=True),
            )
            self._takes = (
                *of_one,
                isinstance(matrix, Tensor) and kernels.gated_rows_work(matrix),
            )

    def gated(
        self, x: Tensor, norm: RMSNorm | None = None, activation: str = "silu"
    ) -> Tensor:
        """x [T, in], normed first -> `activation` of the first of two projections times the
        second."""
        if not self._is_fused or activation != "silu":
            gate, up = self(x, norm)
            return gated(gate, up, activation)
        assert self._joined is not None
        _, takes_one, takes_many = self._takes
        if norm is not None:
            if takes_one and x.shape[0] == 1:
                return self._one_row(x, norm, gated=True)
            x = norm(x)
        if takes_many and x.shape[0] >= fused_ops.kernels().GATED_MIN_ROWS:
            out: Tensor = fused_ops.kernels().gated_rows(x, self._joined.weight)
            return out
        return fused_ops.kernels().silu_and_mul(self._joined(x))  # type: ignore[no-any-return]

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> tuple[Tensor, ...]:
        """x [T, in], normed first -> one [T, out] per projection, perhaps views of one tensor."""
        if norm is not None:
            if self._takes[0] and x.shape[0] == 1:
                return torch.split_with_sizes(
                    self._one_row(x, norm), self._sizes, dim=-1
                )
            x = norm(x)
        if self._joined is None:
            return tuple(part(x) for part in self._parts)
        return torch.split_with_sizes(self._joined(x), self._sizes, dim=-1)

    def _one_row(self, x: Tensor, norm: RMSNorm, *, gated: bool = False) -> Tensor:
        assert self._joined is not None
        out: Tensor = fused_ops.kernels().one_row(
            x, self._joined.weight, norm=norm.weight, eps=norm.eps, gated=gated
        )
        return out


def _join(parts: list[Linear], *, pack: bool) -> Linear | None:
    """None: they are quantised in different ways, and stay apart."""
    biases = [part.bias for part in parts if part.bias is not None]
    if (weight := concatenated([part.weight for part in parts])) is None:
        return None
    joined = Linear(weight, torch.cat(biases) if biases else None, pack=pack)
    parts.clear()  # their memory is the device's, or mapped: let go of it
    return joined


def even_share(parallel: Parallel, total: int) -> range:
    """This rank's part of `total` items that the group's size divides."""
    share = total // parallel.size
    return range(parallel.rank * share, (parallel.rank + 1) * share)


class Part(NamedTuple):
    """A projection's part of a weight.

    Attributes:
        shape: of the whole weight.
        order: of the elements of each head, where it is not that of the files.
    """

    name: str
    shape: tuple[int, int]
    rows: range
    order: list[int] | None = None

    def weight(self, loader: WeightLoader) -> Weight:
        """Its rows."""
        found = loader.matrix(f"{self.name}.weight", self.shape, rows=self.rows)
        return changed(found, lambda each: reordered(each, self.order))

    def bias(self, loader: WeightLoader) -> Tensor:
        found = loader.load(f"{self.name}.bias", self.shape[:1], rows=self.rows)
        return reordered(found, self.order)


def reordered(weight: Tensor, order: list[int] | None) -> Tensor:
    """[heads * dim, ...] with the elements of every head in another order."""
    if order is None:
        return weight
    heads = weight.view(-1, len(order), *weight.shape[1:])
    return heads[:, order].flatten(0, 1)


def joined(
    fused: str | None,
    names: list[str],
    shapes: list[tuple[int, int]],
    rows: list[range],
) -> list[Part]:
    """Projections by name, or where they lie in the weight `fused`, one below the other."""
    if fused is None:
        return [Part(*each) for each in zip(names, shapes, rows, strict=True)]
    whole = (sum(shape[0] for shape in shapes), shapes[0][1])
    starts = itertools.accumulate((shape[0] for shape in shapes), initial=0)
    return [
        Part(fused, whole, range(start + own.start, start + own.stop))
        for start, own in zip(starts, rows, strict=False)
    ]


def load_columns(loader: WeightLoader, parts: list[Part], *, bias: bool) -> Columns:
    """Projections split along their output."""
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
    """A projection split along its input, of which this rank has `cols`."""
    whole = len(cols) == shape[1]
    weight = loader.matrix(f"{name}.weight", shape, cols=None if whole else cols)
    offset = loader.load(f"{name}.bias", shape[:1]) if bias else None
    return RowParallelLinear(weight, offset, parallel, pack=loader.pack, join=join)


def load_norm(
    loader: WeightLoader,
    name: str,
    size: int,
    config: ModelConfig,
    *,
    rows: range | None = None,
    eps: float | None = None,
) -> RMSNorm:
    """`rows`: of its weight, `eps`: its own; all, and the config's, where not given."""
    weight, eps = (
        loader.load(f"{name}.weight", (size,), rows=rows),
        eps or config.rms_eps,
    )
    offset = config.declared.norm_offset  # in 16 bits the sum would lose what is added
    return RMSNorm(weight.float() + offset if offset else weight, eps)


class Vocabulary:
    """The embedding and the head of one rank: rows of the vocabulary, padded to equal shares."""

    def __init__(
        self, loader: WeightLoader, config: ModelConfig, parallel: Parallel
    ) -> None:
        self._parallel, self._size = parallel, config.vocab_size
        # Multiplied in the model's dtype, as the models were trained.
        self._scale = torch.tensor(config.embedding_scale).to(loader.dtype).item()
        self._divisor, self._cap = config.logit_divisor, config.logit_cap
        self._share = -(-config.vocab_size // parallel.size)
        self._start = min(parallel.rank * self._share, config.vocab_size)
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = head = self._load(loader, "model.embed_tokens.weight", shape)
        if not config.tie_embeddings or loader.has(
            "lm_head.weight"
        ):  # it may differ, and counts
            head = self._load(loader, "lm_head.weight", shape)
            head = self._embedding if torch.equal(head, self._embedding) else head
        # The embedding needs its rows as they are, so a head that shares its weight with it takes
        # memory of its own when it is packed.
        self._head = Columns([Linear(head)], pack=loader.pack)

    def _load(self, loader: WeightLoader, name: str, shape: tuple[int, int]) -> Tensor:
        rows = range(self._start, min(self._start + self._share, self._size))
        weight = loader.load(name, shape, rows=rows)
        missing = self._share - len(rows)
        return F.pad(weight, (0, 0, 0, missing)) if missing else weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden], a tensor of the caller's own."""
        if self._parallel.size == 1:
            rows = F.embedding(token_ids, self._embedding)
        else:
            local = token_ids - self._start
            foreign = (local < 0) | (local >= self._share)
            rows = F.embedding(local.masked_fill_(foreign, 0), self._embedding)
            rows = self._parallel.all_reduce(rows.masked_fill_(foreign[:, None], 0))
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def logits(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """[S, hidden], normed first -> [S, vocab], perhaps in 16 bits; all of it on every rank."""
        logits = self._parallel.all_gather_last_dim(*self._head(hidden, norm))[
            :, : self._size
        ]
        if self._divisor != 1.0:
            logits = logits / self._divisor
        return (
            logits if not self._cap else logits.div(self._cap).tanh_().mul_(self._cap)
        )

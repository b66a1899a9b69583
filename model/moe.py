"""Mixture of experts: the router, experts split over the ranks, shared experts."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.config import ModelConfig
from model.errors import ModelLoadError
from model.layers import GatedMLP, Join, Linear, RMSNorm, gated
from model.parallel import Parallel
from model.quantization import products
from model.quantization.quantized import (
    Quantized,
    Weight,
    changed,
    concatenated,
    plain,
    stacked,
)
from model.weights import WeightLoader
from protocol.process.logging import get_logger

_log = get_logger(__name__)

# Tokens that the experts take at a time: each has copies of its own for every expert it goes to.
_MAX_TOKENS = 4096
_PROVED_TOKENS = 24
_TOLERANCE = 0.02  # of a proof: twice the norm of what 16 bits make of both sides
_NEARLY_EQUAL = 1e-3  # times the tolerance: of what experts are chosen by
_NOT_ZERO = 1e-20  # sums of weights are divided by
_ALIGNMENT_BYTES = 16  # of the rows that a grouped product reads
_PROVED: dict[
    tuple[object, ...], bool
] = {}  # whether kernels of ours take experts of a kind


class MoELayer:
    """Routed plus shared experts, summed over ranks, joined to the residual."""

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        config: ModelConfig,
        parallel: Parallel,
        join: Join | None = None,
    ) -> None:
        moe, declared = config.moe, config.declared.mixture
        assert moe is not None and declared is not None
        self._parallel, self._join = parallel, join or Join()
        self._router = Router(loader, prefix, config)
        share = moe.num_experts // parallel.ep
        first = parallel.rank * parallel.ep // parallel.size * share
        own = range(first, first + share)  # experts that this rank has a part of
        gate_up, down, biases = load_experts(loader, prefix, config, parallel, own)
        which = config.activation, own.start, moe.num_experts
        self._experts = Experts(
            gate_up,
            down,
            *which,
            biases=biases,
            clamps=moe.clamps,
            chosen=moe.experts_per_token,
        )
        self._shared, self._shared_gate = None, None
        if moe.num_shared_experts:
            width, name = (
                moe.shared_intermediate_size * moe.num_shared_experts,
                declared.shared,
            )
            self._shared = GatedMLP(
                loader, f"{prefix}.{name}", config, parallel, width=width
            )
        if declared.shared_gate:
            gate = loader.load(
                f"{prefix}.{declared.shared_gate}.weight", (1, config.hidden_size)
            )
            self._shared_gate = Linear(gate)

        self._takes_one = (
            self._experts.takes_one and self._shared is None and parallel.size == 1
            and self._join.is_plain and fused_ops.kernels().one_row_works(self._router.weight)
        )  # fmt: skip

    def __call__(self, hidden: Tensor, norm: RMSNorm | None) -> Tensor:
        """hidden [T, hidden], changed in place and returned."""
        if self._takes_one and len(hidden) == 1 and norm is not None:
            return self._experts.of_one(hidden, norm, self._router)
        x = hidden if norm is None else norm(hidden)
        out = self._experts(x, *self._router(x))
        if self._shared is not None:
            gate = self._shared_gate(x).sigmoid_() if self._shared_gate else None
            self._shared.add_share(x, out, gate)
        return self._join(self._parallel.all_reduce(out), hidden)


class Router:
    """Chooses the experts that a token goes through, and weighs them."""

    def __init__(self, loader: WeightLoader, prefix: str, config: ModelConfig) -> None:
        moe, declared = config.moe, config.declared.mixture
        assert moe is not None and declared is not None
        self._moe, self._group_best = moe, declared.group_best
        name, shape = (
            f"{prefix}.{declared.router}.weight",
            (moe.num_experts, config.hidden_size),
        )
        self.weight = loader.load(name, shape)
        self._bias = self._correction = None
        if declared.biased:
            name = f"{prefix}.{declared.router}.bias"
            self._bias = loader.load(name, shape[:1], dtype=torch.float32)
        if declared.correction:
            name = f"{prefix}.{declared.correction}"
            self._correction = loader.load(name, shape[:1], dtype=torch.float32)
        self._is_fused = fused_ops.works(self.weight.device, self.weight.dtype)
        self._has_kernel = self._is_fused and self._is_proved()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of x [T, hidden]; see `choose`."""
        if self._is_fused:  # sums in float32 of what is exact in it
            logits = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
            logits = logits if self._bias is None else logits.add_(self._bias)
        else:
            logits = F.linear(x.float(), self.weight.float(), self._bias)
        return self.choose(logits)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 and expert ids int64, both [T, experts_per_token], of [T, experts]."""
        return self._by_kernel(logits) if self._has_kernel else self._choose(logits)

    def _by_kernel(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        which = logits, self._correction, self._moe, self._group_best
        return fused_ops.experts().choose(*which)  # type: ignore[no-any-return]

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        config, num, correction = (
            self._moe,
            self._moe.experts_per_token,
            self._correction,
        )
        scores = (
            logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(dim=-1)
        )
        choice = scores if correction is None else scores + correction
        if choice is scores and config.scoring == "softmax" and config.num_groups == 1:
            choice = (
                logits  # the same order, without scores that are too small to differ
            )
        if config.num_groups > 1:
            groups = choice.view(len(logits), config.num_groups, -1)
            of_group = groups.topk(self._group_best, dim=-1).values.sum(-1)
            best = of_group.topk(config.topk_groups, dim=-1).indices
            outside = torch.ones_like(of_group, dtype=torch.bool).scatter_(
                1, best, False
            )
            choice = groups.masked_fill(outside[..., None], float("-inf")).view_as(
                scores
            )
        experts = choice.topk(num, dim=-1).indices
        weights = scores.gather(1, experts)
        if config.is_normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + _NOT_ZERO)
        return weights * config.routed_scaling_factor, experts

    def _is_proved(self) -> bool:
        """Whether a kernel of ours chooses as it should: see `_proved`."""
        kind = (
            self._moe,
            self._group_best,
            self._correction is None,
            self.weight.device,
        )
        return _proved(
            kind, "the kernel that chooses experts %s: another is used", self._deviation
        )

    def _deviation(self) -> Tensor:
        """By unlike logits: of the kernel's weights, and of what is chosen by, where others are."""
        total, turns = self._moe.num_experts, torch.Generator().manual_seed(0)
        each = (torch.randperm(total, generator=turns) for _ in range(_PROVED_TOKENS))
        logits = (torch.stack([*each]).to(self.weight.device) - total / 2) * (8 / total)
        (weights, experts), (right, best) = (
            self._by_kernel(logits),
            self._choose(logits),
        )
        choice = (
            logits.sigmoid()
            if self._correction is None
            else logits.sigmoid() + self._correction
        )
        apart = choice.gather(1, experts) - choice.gather(
            1, best
        )  # 0, but for ties that round
        error: Tensor = (
            weights - right
        ).norm() / right.norm() + apart.norm() / _NEARLY_EQUAL
        return error


class Experts:
    """Gated feed-forwards of which every token goes through a few, weighted and summed.

    No shape depends on the routing and nothing waits for the device: on a GPU, steps of any size
    can be captured in a graph.

    Args:
        gate_up: [experts, 2 width, hidden], each gate above its up projection.
        down: [experts, hidden, width].
        first: id of the first of these, of the `total` that tokens are sent to; None: of them all.
        biases: of gate_up [experts, 2 width] and of down [experts, hidden].
        clamps: see MoEConfig.
        chosen: how many every token goes through, where kernels are proved.
    """

    def __init__(
        self,
        gate_up: Weight,
        down: Weight,
        activation: str = "silu",
        first: int = 0,
        total: int | None = None,
        *,
        biases: tuple[Tensor, Tensor] | None = None,
        clamps: tuple[float, float] | None = None,
        chosen: int = 2,
    ) -> None:
        self._biases, self._clamps = biases, clamps
        are_grouped = _can_group(gate_up) and _can_group(down)
        self._gate_up, self._down = (
            w if are_grouped else plain(w) for w in (gate_up, down)
        )
        self._activation, self._first = activation, first
        count = down.shape[0]
        self._total, self._num = None if total == count else total, total or count
        self._ids = torch.arange(count, device=down.device)
        self._are_codes = any(
            isinstance(w, Quantized) for w in (self._gate_up, self._down)
        )
        is_plain = activation == "silu" and clamps is None
        self._is_fused = is_plain and fused_ops.works(down.device, down.dtype)
        self._sum, self._most = (
            self._grouped if are_grouped else self._each,
            _MAX_TOKENS,
        )
        self.takes_one = self._is_fused and biases is None and self._are_proved(chosen)
        if self.takes_one and not self._are_codes:
            self._sum, self._most = self._by_kernels, 2 * _MAX_TOKENS  # which copy less

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, hidden], float32 weights and int64 expert ids [T, k] -> [T, hidden], new."""
        if self.takes_one and len(x) == 1:
            return self._of_one(x, weights, experts)
        parts = zip(
            *(torch.split(each, self._most) for each in (x, weights, experts)),
            strict=True,
        )
        found = [self._sum(*part) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _are_proved(self, chosen: int) -> bool:
        """Whether kernels of ours take its matrices, with each tile, as the other way does: see
        `_proved`."""
        gate_up, down, kernels = self._gate_up, self._down, fused_ops.experts()
        works = (kernels.takes_one if self._are_codes else kernels.works)(gate_up, down)
        groups = [w.group for w in (gate_up, down) if isinstance(w, Quantized)]
        kind = (
            gate_up.shape,
            down.shape,
            down.dtype,
            down.device,
            self._num,
            chosen,
            *groups,
        )
        told = "the kernels for mixtures of experts: one %s: others are used"
        return works and _proved(kind, told, lambda: self._deviations(chosen))

    def _deviations(self, chosen: int) -> Tensor:
        """Of each tile's sums: norms of differences by those of results."""
        (count, width, _), kernels, like = (
            self._down.shape,
            fused_ops.experts(),
            self._down,
        )
        logits = torch.randn(_PROVED_TOKENS, self._num, device=like.device)
        logits[::2, self._first : self._first + count] += (
            9  # as many as can be are this rank's
        )
        weights, experts = logits.topk(chosen)
        x = torch.randn(_PROVED_TOKENS, width, device=like.device)
        x = F.rms_norm(x, (width,)).to(like.dtype)
        routed = x, 2 * weights.softmax(-1), experts
        right, each_tiles = self._sum(*routed), [] if self._are_codes else kernels.TILES
        found = [(self._by_kernels(*routed, tiles), right) for _, tiles in each_tiles]
        few = [*zip(*(torch.split(part[:2], 1) for part in routed), strict=True)]
        alone = [self._of_one(*one) for one in few]
        added = [
            self._of_one(*one, norm=torch.ones_like(x[0]), residual=0 * one[0])
            for one in few
        ]
        found += [(torch.cat(each), right[:2]) for each in (alone, added)]
        errors: list[Tensor] = [
            (ours.float() - sums.float()).norm() / sums.float().norm()
            for ours, sums in found
        ]
        return torch.stack(errors)

    def of_one(self, x: Tensor, norm: RMSNorm, router: Router) -> Tensor:
        """Adds to one token what these make of it, normed: all there are, without biases."""
        which: dict[str, Any] = {"norm": norm.weight, "eps": norm.eps}
        logits = fused_ops.kernels().one_row(
            x, router.weight, dtype=torch.float32, **which
        )
        return self._of_one(x, *router.choose(logits), residual=x, **which)

    def _of_one(
        self, x: Tensor, weights: Tensor, experts: Tensor, **which: Any
    ) -> Tensor:
        """See `mixture_of_one`."""
        routed = weights, self._ids_here(experts)
        return fused_ops.experts().mixture_of_one(
            x, self._gate_up, self._down, *routed, **which
        )  # type: ignore[no-any-return]

    def _by_kernels(
        self, x: Tensor, weights: Tensor, experts: Tensor, tiles: Any = None
    ) -> Tensor:
        """As `_grouped`, of which the kernels gather, multiply and scatter at once."""
        matrices, chosen = (self._gate_up, self._down), self._ids_here(experts)
        return fused_ops.experts().mixture(
            x, *matrices, weights, chosen, self._num, tiles
        )  # type: ignore[no-any-return]

    def _grouped(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """One product for all experts, over rows in the order of their experts. Rows of another
        rank's experts come last, where no product writes."""
        found, order = self._ids_here(experts).flatten().sort(stable=True)
        ends = torch.searchsorted(found, self._ids, right=True, out_int32=True)
        rows = x[order // experts.shape[1]]
        inner = products.multiply_groups(self._gate_up, rows, ends)
        shares = weights.flatten()[order, None]
        own = None if self._biases is None else found.clamp(max=len(self._ids) - 1)
        if self._biases is not None:
            inner += self._biases[0][own]
        inner = self._gated(inner)
        inner *= shares
        down = products.multiply_groups(self._down, inner, ends)
        if self._biases is not None:
            down += self._biases[1][own] * shares
        if self._total is not None:
            down.masked_fill_(found[:, None] >= len(self._ids), 0)
        back = torch.empty_like(down).index_copy_(0, order, down)
        return back.view(*experts.shape, -1).sum(1)

    def _each(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Every expert on every token, weighted by 0 where it was not chosen."""
        spread = weights.new_zeros(len(x), self._num)
        spread.scatter_(1, self._ids_here(experts), weights)
        out = torch.zeros_like(x)
        experts_here = zip(
            plain(self._gate_up), plain(self._down), spread.t(), strict=False
        )
        for index, (gate_up, down, weight) in enumerate(experts_here):
            inner = x @ gate_up.t()
            if self._biases is not None:
                inner += self._biases[0][index]
                out += self._biases[1][index] * weight[:, None]
            out.addmm_(self._gated(inner).mul_(weight[:, None]), down.t())
        return out

    def _ids_here(self, experts: Tensor) -> Tensor:
        """Ids of which this rank's are the first, from 0."""
        return experts if self._total is None else (experts - self._first) % self._total

    def _gated(self, gate_up: Tensor) -> Tensor:
        """[T, 2 width] -> the activation of the first half times the second."""
        if self._is_fused:
            return fused_ops.kernels().silu_and_mul(gate_up)  # type: ignore[no-any-return]
        gate, up = gate_up.chunk(2, dim=1)
        if self._clamps is not None:
            alpha, limit = self._clamps
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1))
        return gated(gate, up, self._activation)


def _proved(
    kind: tuple[object, ...], told: str, deviations: Callable[[], Tensor]
) -> bool:
    """Whether kernels of ours proved themselves, by the first layer of a kind; what is wrong with
    them is told in the log."""
    if kind not in _PROVED:
        flaw = fused_ops.flaw(deviations, _TOLERANCE)
        _PROVED[kind] = not flaw
        if flaw:
            _log.warning(told, flaw)
    return _PROVED[kind]


def _can_group(weight: Weight) -> bool:
    """Whether a grouped product takes [experts, out, in]. On other GPUs and in other dtypes torch
    has one that reads the groups' sizes back from the device, which no graph can hold."""
    if isinstance(weight, Quantized):
        return True
    if weight.shape[2] * weight.element_size() % _ALIGNMENT_BYTES:
        return False
    if weight.device.type != "cuda":
        return True
    is_fast = torch.cuda.get_device_capability(weight.device) in ((9, 0), (10, 0))
    return is_fast and weight.dtype == torch.bfloat16


def load_experts(
    loader: WeightLoader,
    prefix: str,
    config: ModelConfig,
    parallel: Parallel,
    own: range,
) -> tuple[Weight, Weight, tuple[Tensor, Tensor] | None]:
    """What Experts takes, and its biases: of each of this rank's experts, its part of the width.
    Of the ranks that share an expert the first has the bias of its output, which is added once."""
    moe, names = config.moe, config.declared.mixture
    assert moe is not None and names is not None
    width, count, hidden = (
        moe.expert_intermediate_size,
        moe.num_experts,
        config.hidden_size,
    )
    ranks = parallel.size // parallel.ep  # that share an expert
    start = parallel.rank % ranks * (width // ranks)
    share = range(start, start + width // ranks)
    each = [
        [f"{prefix}.experts.{n}.{name}.weight" for name in names.each]
        for n in range(count)
    ]
    loader.ignore(*(name for n in range(count) if n not in own for name in each[n]))
    wide, narrow = (width, hidden), (hidden, width)
    turns = torch.arange(2 * width)  # rows of a tensor of all gates and ups
    halves = turns.view(width, 2).t() if names.transposed else turns.view(2, width)
    of_rank = halves[:, share.start : share.stop].flatten()

    def of_stack(
        which: int, shape: tuple[int, int], expert: int, cols: range | None
    ) -> Weight:
        name, one = (
            f"{prefix}.{names.stacked_weights[which]}",
            range(expert, expert + 1),
        )
        matrix = partial(
            loader.matrix, rows=one, cols=cols, transposed=names.transposed
        )
        return changed(matrix(name, (count, *shape)), operator.itemgetter(0))

    def gate_up(expert: int) -> Weight:
        if names.stacked:
            both = of_stack(0, (2 * width, hidden), expert, None)
            return changed(both, operator.itemgetter(of_rank))
        parts = [loader.matrix(name, wide, rows=share) for name in each[expert][:2]]
        if (joined := concatenated(parts)) is None:
            raise ModelLoadError(
                f"gates and ups of {prefix}.experts are quantised unlike"
            )
        return joined

    def down(expert: int) -> Weight:
        if names.stacked:
            return of_stack(1, narrow, expert, share)
        return loader.matrix(each[expert][2], narrow, cols=share)

    biases = None
    if names.biased and names.stacked:
        both, last = (f"{prefix}.{name}_bias" for name in names.stacked)
        inner = loader.load(both, (count, 2 * width), rows=own)[:, of_rank]
        outer = loader.load(last, (count, hidden), rows=own)
        biases = inner, outer if start == 0 else torch.zeros_like(outer)
    return (
        stacked(len(own), map(gate_up, own)),
        stacked(len(own), map(down, own)),
        biases,
    )

"""The routed experts of a layer. Each token goes through a few of these gated
feed-forward networks."""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.layers import RMSNorm, gated
from model.mixture.router import Router
from model.quantization import products
from model.quantization.quantized import Quantized, Weight, dequantised

# Maximum number of tokens that go through the experts at a time. Each token is copied
# for each of its experts, so this limit bounds the memory of a step.
_MAX_TOKENS = 4096
SELF_TEST_TOKENS: Final = 24
# The rows that a grouped product reads must be aligned.
_ALIGNMENT_BYTES: Final = 16


class Experts:
    """Gated feed-forward layers. Each token goes through a few of them, and their
    outputs are summed with weights.

    No shape depends on the routing, and the host never waits for the device. On a GPU,
    steps of any size can therefore be captured in a graph.

    Args:
        gate_up: [experts, 2 width, hidden]: for each expert, all gate rows and then all
            up rows.
        down: [experts, hidden, width].
        first: id of the first of these experts.
        total: number of experts on all ranks; None: all experts are on this rank.
        biases: the biases of gate_up [experts, 2 width] and of down [experts, hidden].
        clamps: see MoEConfig.
        num_chosen: experts per token in the self-test of kernels.
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
        num_chosen: int = 2,
    ) -> None:
        self._biases = biases
        self._clamps = clamps
        can_group = _can_group(gate_up) and _can_group(down)
        self._gate_up = gate_up if can_group else dequantised(gate_up)
        self._down = down if can_group else dequantised(down)
        self._activation = activation
        self._first = first
        count = down.shape[0]
        self._num_experts = total or count
        self._has_all_experts = self._num_experts == count
        self._ids = torch.arange(count, device=down.device)
        self._is_quantised = isinstance(self._gate_up, Quantized) or isinstance(
            self._down, Quantized
        )
        is_silu = activation == "silu" and clamps is None
        self._is_fused = is_silu and fused_ops.is_supported(down.device, down.dtype)
        self._sum_experts: Callable[..., Tensor] = (
            self._sum_by_groups if can_group else self._sum_each_expert
        )
        self._max_tokens = _MAX_TOKENS
        self.has_one_token_kernel = (
            self._is_fused and biases is None and self._passes_self_test(num_chosen)
        )
        if self.has_one_token_kernel and not self._is_quantised:
            self._sum_experts = self._sum_by_kernels
            self._max_tokens = 2 * _MAX_TOKENS  # the kernels copy less for each token

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Sends tokens through their experts.

        Args:
            x: [T, hidden].
            weights: float32 [T, k].
            experts: int64 [T, k], ids of experts.

        Returns:
            [T, hidden], a new tensor.
        """
        if self.has_one_token_kernel and len(x) == 1:
            return self._sum_one_token(x, weights, experts)
        chunks = zip(
            torch.split(x, self._max_tokens),
            torch.split(weights, self._max_tokens),
            torch.split(experts, self._max_tokens),
            strict=True,
        )
        sums = [self._sum_experts(*chunk) for chunk in chunks]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _passes_self_test(self, num_chosen: int) -> bool:
        """Returns whether kernels accept the matrices and compute correctly.

        See `fused_ops.passes_self_test`.
        """
        kernels = fused_ops.experts()
        if self._is_quantised:
            is_supported = kernels.has_one_token_kernel(self._gate_up, self._down)
        else:
            is_supported = kernels.is_supported(self._gate_up, self._down)
        if not is_supported:
            return False
        groups = [
            weight.group
            for weight in (self._gate_up, self._down)
            if isinstance(weight, Quantized)
        ]
        kind = (
            self._gate_up.shape,
            self._down.shape,
            self._down.dtype,
            self._down.device,
            self._num_experts,
            num_chosen,
            *groups,
        )
        return fused_ops.passes_self_test(
            kind,
            "a kernel for mixtures of experts %s; torch computes mixtures instead",
            lambda: self._deviations(num_chosen),
        )

    def _deviations(self, num_chosen: int) -> Tensor:
        """Returns the relative errors of the grouped kernels, with each item of TILES,
        and of the kernels for one token."""
        x, weights, experts = self.example(num_chosen)
        expected = self._sum_experts(x, weights, experts)
        pairs = []
        if not self._is_quantised:
            for _, tiles in fused_ops.experts().TILES:
                pairs.append(
                    (self._sum_by_kernels(x, weights, experts, tiles), expected)
                )
        plain_sums = []
        residual_sums = []
        for token in range(2):
            one = slice(token, token + 1)
            plain_sums.append(self._sum_one_token(x[one], weights[one], experts[one]))
            residual_sums.append(
                self._sum_one_token(
                    x[one],
                    weights[one],
                    experts[one],
                    norm=torch.ones_like(x[0]),
                    residual=torch.zeros_like(x[one]),
                )
            )
        pairs.append((torch.cat(plain_sums), expected[:2]))
        pairs.append((torch.cat(residual_sums), expected[:2]))
        return torch.stack([relative_error(*pair) for pair in pairs])

    def example(
        self, num_chosen: int, num_tokens: int = SELF_TEST_TOKENS
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns random arguments of a call, for self-tests of kernels."""
        count, hidden, _ = self._down.shape
        device = self._down.device
        logits = torch.randn(num_tokens, self._num_experts, device=device)
        # Half of the tokens go through as many experts of this rank as possible.
        logits[::2, self._first : self._first + count] += 9
        weights, experts = logits.topk(num_chosen)
        weights = 2 * weights.softmax(-1)
        x = torch.randn(num_tokens, hidden, device=device)
        x = F.rms_norm(x, (hidden,)).to(self._down.dtype)
        return x, weights, experts

    def add_one_token(self, x: Tensor, norm: RMSNorm, router: Router) -> Tensor:
        """Normalizes one token, sends it through its experts, and adds the result to x.

        All experts must be on this rank, without biases.
        """
        logits = fused_ops.kernels().one_row(
            x, router.weight, dtype=torch.float32, norm=norm.weight, eps=norm.eps
        )
        weights, experts = router.choose(logits)
        return self._sum_one_token(
            x, weights, experts, residual=x, norm=norm.weight, eps=norm.eps
        )

    def _sum_one_token(
        self, x: Tensor, weights: Tensor, experts: Tensor, **options: Any
    ) -> Tensor:
        """Calls the kernel `mixture_of_one`, which takes the same options."""
        return fused_ops.experts().mixture_of_one(  # type: ignore[no-any-return]
            x,
            self._gate_up,
            self._down,
            weights,
            self._local_ids(experts),
            **options,
        )

    def _sum_by_kernels(
        self, x: Tensor, weights: Tensor, experts: Tensor, tiles: Any = None
    ) -> Tensor:
        """Computes the same as `_sum_by_groups`.

        The kernels gather, multiply and scatter at once.
        """
        return fused_ops.experts().mixture(  # type: ignore[no-any-return]
            x,
            self._gate_up,
            self._down,
            weights,
            self._local_ids(experts),
            self._num_experts,
            tiles,
        )

    def _sum_by_groups(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Multiplies by all experts in one product, over rows sorted by their experts.

        Rows for experts of other ranks come last, and are not multiplied.
        """
        sorted_ids, order = self._local_ids(experts).flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_ids, self._ids, right=True, out_int32=True)
        rows = x[order // experts.shape[1]]
        inner = products.multiply_groups(self._gate_up, rows, ends)
        row_weights = weights.flatten()[order, None]
        if self._biases is not None:
            bias_ids = sorted_ids.clamp(max=len(self._ids) - 1)
            inner += self._biases[0][bias_ids]
        inner = self._activate(inner)
        inner *= row_weights
        down = products.multiply_groups(self._down, inner, ends)
        if self._biases is not None:
            down += self._biases[1][bias_ids] * row_weights
        if not self._has_all_experts:
            down.masked_fill_(sorted_ids[:, None] >= len(self._ids), 0)
        unsorted = torch.empty_like(down).index_copy_(0, order, down)
        return unsorted.view(*experts.shape, -1).sum(1)

    def _sum_each_expert(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Sends every token through every expert.

        The weight is 0 for an expert that was not chosen.
        """
        expert_weights = weights.new_zeros(len(x), self._num_experts)
        expert_weights.scatter_(1, self._local_ids(experts), weights)
        out = torch.zeros_like(x)
        local_experts = zip(
            dequantised(self._gate_up),
            dequantised(self._down),
            expert_weights.t(),
            strict=False,
        )
        for index, (gate_up, down, weight) in enumerate(local_experts):
            inner = x @ gate_up.t()
            if self._biases is not None:
                inner += self._biases[0][index]
                out += self._biases[1][index] * weight[:, None]
            out.addmm_(self._activate(inner).mul_(weight[:, None]), down.t())
        return out

    def _local_ids(self, experts: Tensor) -> Tensor:
        """Returns ids in which the experts of this rank have the numbers from 0 on, and
        the experts of other ranks have higher numbers."""
        if self._has_all_experts:
            return experts
        return (experts - self._first) % self._num_experts

    def _activate(self, gate_up: Tensor) -> Tensor:
        """Returns activation(gate) * up, or the clamped SwiGLU of MoEConfig. `gate` and
        `up` are the halves of `gate_up` [T, 2 width]."""
        if self._is_fused:
            result: Tensor = fused_ops.kernels().silu_and_mul(gate_up)
            return result
        gate, up = gate_up.chunk(2, dim=1)
        if self._clamps is not None:
            alpha, limit = self._clamps
            gate = gate.clamp(max=limit)
            up = up.clamp(-limit, limit)
            return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1))
        return gated(gate, up, self._activation)


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """Returns the norm of the error, divided by the norm of `expected`."""
    expected = expected.float()
    error: Tensor = (actual.float() - expected).norm() / expected.norm()
    return error


def _can_group(weight: Weight) -> bool:
    """Returns whether rows can be multiplied by a weight [experts, out, in] in groups,
    without waiting for the device.

    torch has such a product for bfloat16 on some GPUs. In other data types and on other
    GPUs, torch's product reads the sizes of the groups back from the device, which a
    graph cannot capture.
    """
    if isinstance(weight, Quantized):
        return True
    if weight.shape[2] * weight.element_size() % _ALIGNMENT_BYTES:
        return False
    if weight.device.type != "cuda":
        return True
    is_fast = torch.cuda.get_device_capability(weight.device) in ((9, 0), (10, 0))
    return is_fast and weight.dtype == torch.bfloat16

"""Mixture of experts: a softmax router, experts split over the ranks by width, shared experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model import fused_ops
from model.config import ModelConfig, MoEConfig
from model.layers import GatedMLP, RMSNorm, even_share
from model.parallel import Parallel
from model.weights import WeightLoader

# Tokens that the experts take at a time: each has copies of its own for every expert it goes to.
_MAX_TOKENS = 4096
_ALIGNMENT_BYTES = 16  # of the rows that a grouped product reads


class MoELayer:
    """Routed plus shared experts, summed over ranks, added to the residual."""

    def __init__(
        self, loader: WeightLoader, prefix: str, config: ModelConfig, parallel: Parallel
    ) -> None:
        assert config.moe is not None
        self._config, hidden_size = config.moe, config.hidden_size
        self._parallel = parallel
        shape = (config.moe.num_experts, hidden_size)
        self._router = loader.load(f"{prefix}.gate.weight", shape).float()
        self._experts = Experts(
            *load_experts(loader, f"{prefix}.experts", config.moe, hidden_size, parallel)
        )
        width = config.moe.expert_intermediate_size * config.moe.num_shared_experts
        self._shared = GatedMLP(loader, f"{prefix}.shared_experts", config, parallel, width)

    def __call__(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden [T, hidden], changed in place and returned."""
        x = norm(hidden)
        routed = self._experts(x, *route(x, self._router, self._config))
        hidden += self._parallel.all_reduce(routed)
        return self._shared.add(x, hidden)


class Experts:
    """Gated feed-forwards of which every token goes through a few, weighted and summed.

    No shape depends on the routing and nothing waits for the device: on a GPU, steps of any size
    can be captured in a graph.

    Args:
        gate_up: [experts, 2 width, hidden], each gate above its up projection.
        down: [experts, hidden, width].
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self._gate_up = gate_up
        self._down = down
        self._ids = torch.arange(len(down), device=down.device)
        self._is_fused = fused_ops.works(down.device, down.dtype)
        self._sum = self._grouped if _can_group(gate_up) and _can_group(down) else self._each

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, hidden], float32 weights and int64 expert ids [T, k] -> [T, hidden], new."""
        out = torch.empty_like(x)
        for start in range(0, len(x), _MAX_TOKENS):
            part = slice(start, start + _MAX_TOKENS)
            out[part] = self._sum(x[part], weights[part], experts[part])
        return out

    def _grouped(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """One product for all experts, over rows in the order of their experts."""
        found, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(found, self._ids, right=True, out_int32=True)
        rows = x[order // experts.shape[1]]
        inner = self._gated(F.grouped_mm(rows, self._gate_up.transpose(1, 2), offs=ends))
        inner *= weights.flatten()[order, None]
        down = F.grouped_mm(inner, self._down.transpose(1, 2), offs=ends)
        back = torch.empty_like(down).index_copy_(0, order, down)
        return back.view(*experts.shape, -1).sum(1)

    def _each(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Every expert on every token, weighted by 0 where it was not chosen."""
        spread = weights.new_zeros(len(x), len(self._down)).scatter_(1, experts, weights)
        out = torch.zeros_like(x)
        for gate_up, down, weight in zip(self._gate_up, self._down, spread.t(), strict=True):
            out.addmm_(self._gated(x @ gate_up.t()).mul_(weight[:, None]), down.t())
        return out

    def _gated(self, gate_up: Tensor) -> Tensor:
        """[T, 2 width] -> silu of the first half times the second."""
        if self._is_fused:
            return fused_ops.kernels().silu_and_mul(gate_up)  # type: ignore[no-any-return]
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate).mul_(up)


def _can_group(weight: Tensor) -> bool:
    """Whether a grouped product takes [experts, out, in]. On other GPUs and in other dtypes torch
    has one that reads the groups' sizes back from the device, which no graph can hold."""
    if weight.shape[2] * weight.element_size() % _ALIGNMENT_BYTES:
        return False
    if weight.device.type != "cuda":
        return True
    is_fast = torch.cuda.get_device_capability(weight.device) in ((9, 0), (10, 0))
    return is_fast and weight.dtype == torch.bfloat16


def route(x: Tensor, router: Tensor, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Weights float32 and expert ids int64, both [T, experts_per_token], of x [T, hidden]."""
    scores = F.linear(x.float(), router).softmax(dim=-1)
    if config.topk_method == "group_limited_greedy":
        groups = scores.view(x.shape[0], config.num_groups, -1)
        best = groups.max(dim=-1).values.topk(config.topk_groups, dim=-1).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        scores = groups.masked_fill(outside[..., None], 0.0).view_as(scores)
    weights, experts = scores.topk(config.experts_per_token, dim=-1)
    return weights * config.routed_scaling_factor, experts


def load_experts(
    loader: WeightLoader, prefix: str, config: MoEConfig, hidden_size: int, parallel: Parallel
) -> tuple[Tensor, Tensor]:
    """What Experts takes: this rank's part of each expert's width."""
    shape = (config.expert_intermediate_size, hidden_size)
    share = even_share(parallel, config.expert_intermediate_size)
    gate_up = loader.empty(config.num_experts, 2, len(share), hidden_size)
    down = loader.empty(config.num_experts, hidden_size, len(share))
    for expert in range(config.num_experts):
        each = f"{prefix}.{expert}"
        for half, name in enumerate(("gate_proj", "up_proj")):
            gate_up[expert, half] = loader.load(f"{each}.{name}.weight", shape, rows=share)
        down[expert] = loader.load(f"{each}.down_proj.weight", shape[::-1], cols=share)
    return gate_up.flatten(1, 2), down

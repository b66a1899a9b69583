"""Mixture of experts: a softmax router, experts split over the ranks by width, shared experts."""

import torch
import torch.nn.functional as F

from model.config import MoEConfig
from model.layers import GatedMLP, RMSNorm, even_share
from model.parallel import Parallel
from model.weights import WeightLoader

# On a GPU, up to this many tokens run through every expert at once: batches of that size read most
# experts anyway, and shapes that do not depend on the routing can be captured in a CUDA graph.
_MAX_DENSE_TOKENS = 128


class MoELayer:
    """Routed plus shared experts, summed over ranks, added to the residual."""

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        config: MoEConfig,
        *,
        hidden_size: int,
        bias: bool,
        parallel: Parallel,
    ) -> None:
        self._config = config
        self._parallel = parallel
        shape = (config.num_experts, hidden_size)
        self._router = loader.load(f"{prefix}.gate.weight", shape).float()
        self._gates, self._ups, self._downs = load_experts(
            loader, f"{prefix}.experts", config, hidden_size, parallel
        )
        self._shared = GatedMLP(
            loader,
            f"{prefix}.shared_experts",
            hidden_size=hidden_size,
            intermediate_size=config.expert_intermediate_size * config.num_shared_experts,
            bias=bias,
            parallel=parallel,
        )

    def __call__(self, hidden: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """hidden [T, hidden], changed in place and returned."""
        x = norm(hidden)
        weights, experts = route(x, self._router, self._config)
        dense = x.device.type != "cpu" and x.shape[0] <= _MAX_DENSE_TOKENS
        routed = self._all_experts if dense else self._chosen_experts
        hidden += self._parallel.all_reduce(routed(x, weights, experts))
        return self._shared.add(x, hidden)

    def _chosen_experts(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in torch.unique(experts).tolist():
            rows, choice = torch.where(experts == expert)
            picked = x[rows]
            gate = F.silu(F.linear(picked, self._gates[expert]), inplace=True)
            down = F.linear(gate.mul_(F.linear(picked, self._ups[expert])), self._downs[expert])
            out.index_add_(0, rows, (down * weights[rows, choice, None]).to(x.dtype))
        return out

    def _all_experts(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        spread = weights.new_zeros(x.shape[0], self._config.num_experts)
        spread.scatter_(1, experts, weights)  # [T, E], 0 for experts not chosen
        each = x.expand(self._config.num_experts, *x.shape)
        gate = F.silu(torch.bmm(each, self._gates.transpose(1, 2)), inplace=True)
        hidden = gate.mul_(torch.bmm(each, self._ups.transpose(1, 2)))
        down = torch.bmm(hidden, self._downs.transpose(1, 2))  # [E, T, hidden]
        return (down * spread.t()[:, :, None]).sum(0).to(x.dtype)


def route(
    x: torch.Tensor, router: torch.Tensor, config: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate, up and down of all experts, stacked, this rank's part of each expert's width.

    Files hold one matrix per expert and projection, or all experts stacked with gate above up.
    """
    width = config.expert_intermediate_size
    share = even_share(parallel, width)
    if loader.has(f"{prefix}.0.gate_proj.weight"):
        shape = (width, hidden_size)
        names = [f"{prefix}.{expert}" for expert in range(config.num_experts)]
        gate, up = (
            torch.stack([loader.load(f"{name}.{part}.weight", shape, rows=share) for name in names])
            for part in ("gate_proj", "up_proj")
        )
        downs = [loader.load(f"{name}.down_proj.weight", shape[::-1], cols=share) for name in names]
        return gate, up, torch.stack(downs)
    stacked = (config.num_experts, 2 * width, hidden_size)
    gate_up = loader.load(f"{prefix}.gate_up_proj", stacked)
    down = loader.load(f"{prefix}.down_proj", (config.num_experts, hidden_size, width))
    part = slice(share.start, share.stop)
    return (
        gate_up[:, :width][:, part].contiguous(),
        gate_up[:, width:][:, part].contiguous(),
        down[:, :, part].contiguous(),
    )

"""Mixture of experts: routed experts, which ranks split, and shared experts."""

from torch import Tensor

from model import fused_ops
from model.config import ModelConfig
from model.layers import GatedMLP, Join, Linear, RMSNorm
from model.mixture.expert_weights import load_experts
from model.mixture.experts import Experts
from model.mixture.packed_experts import PackedExperts, make_experts
from model.mixture.router import Router
from model.parallel import Parallel
from model.weights import WeightLoader


class MoELayer:
    """Routed and shared experts, summed over ranks and added to the residual."""

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        config: ModelConfig,
        parallel: Parallel,
        join: Join | None = None,
    ) -> None:
        moe = config.moe
        mixture = config.traits.mixture
        assert moe is not None and mixture is not None
        self._parallel = parallel
        self._join = join or Join()
        self._router = Router(loader, prefix, config)
        share = moe.num_experts // parallel.ep
        first = parallel.rank * parallel.ep // parallel.size * share
        local_experts = range(first, first + share)
        gate_up, down, biases = load_experts(
            loader, prefix, config, parallel, local_experts
        )
        self._experts = make_experts(
            gate_up,
            down,
            config.activation,
            first=first,
            total=moe.num_experts,
            biases=biases,
            clamps=moe.clamps,
            num_chosen=moe.experts_per_token,
        )
        self._shared = None
        if moe.num_shared_experts:
            self._shared = GatedMLP(
                loader,
                f"{prefix}.{mixture.shared}",
                config,
                parallel,
                width=moe.shared_intermediate_size * moe.num_shared_experts,
            )
        self._shared_gate = None
        if mixture.shared_gate:
            name = f"{prefix}.{mixture.shared_gate}.weight"
            self._shared_gate = Linear(loader.load(name, (1, config.hidden_size)))
        can_add = self._shared is None and parallel.size == 1 and self._join.is_plain
        self._packed_experts = None
        if can_add and isinstance(self._experts, PackedExperts):
            self._packed_experts = self._experts
        self._one_token_experts = None
        if (
            can_add
            and isinstance(self._experts, Experts)
            and self._experts.has_one_token_kernel
            and fused_ops.kernels().has_one_row_kernel(self._router.weight)
        ):
            self._one_token_experts = self._experts

    def __call__(self, hidden: Tensor, norm: RMSNorm | None) -> Tensor:
        """Adds the output to hidden [T, hidden] in place, and returns hidden."""
        if self._one_token_experts and len(hidden) == 1 and norm is not None:
            return self._one_token_experts.add_one_token(hidden, norm, self._router)
        x = hidden if norm is None else norm(hidden)
        weights, experts = self._router(x)
        if self._packed_experts:
            return self._packed_experts(x, weights, experts, residual=hidden)
        out = self._experts(x, weights, experts)
        if self._shared is not None:
            gate = self._shared_gate(x).sigmoid_() if self._shared_gate else None
            self._shared.add_share(x, out, gate)
        return self._join(self._parallel.all_reduce(out), hidden)

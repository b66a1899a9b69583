"""Llama, Mistral, Qwen2 and Qwen3: one decoder with or without biases and q/k norms."""

import torch

from attention.base import AttentionBackend
from model.base import AttentionLayer, AttentionSpec, CausalLM, FeedForward
from model.config import ModelConfig
from model.layers import GatedMLP, RMSNorm, even_share, load_columns, load_norm, load_rows
from model.parallel import Parallel
from model.rope import Angles, Rope
from model.weights import WeightLoader


class LlamaAttention:
    """Grouped-query attention over this rank's heads."""

    def __init__(
        self, loader: WeightLoader, config: ModelConfig, layer: int, parallel: Parallel, rope: Rope
    ) -> None:
        self._layer = layer
        self._rope = rope
        self._head_dim = config.head_dim
        prefix = f"model.layers.{layer}.self_attn"
        q_rows = self._element_rows(even_share(parallel, config.num_heads))
        kv_rows = self._element_rows(parallel.kv_heads(config.num_kv_heads))
        q_shape = (config.num_heads * config.head_dim, config.hidden_size)
        kv_shape = (config.num_kv_heads * config.head_dim, config.hidden_size)
        self._qkv = load_columns(
            loader,
            [
                (f"{prefix}.q_proj", q_shape, q_rows),
                *((f"{prefix}.{name}_proj", kv_shape, kv_rows) for name in "kv"),
            ],
            bias=config.attention_bias,
        )
        self._out = load_rows(
            loader, f"{prefix}.o_proj", q_shape[::-1], q_rows, config.output_bias, parallel
        )
        self._head_norms = [
            load_norm(loader, f"{prefix}.{name}", config.head_dim, config.rms_eps)
            for name in ("q_norm", "k_norm")
            if config.qk_norm
        ]

    def _element_rows(self, heads: range) -> range:
        return range(heads.start * self._head_dim, heads.stop * self._head_dim)

    def __call__(
        self,
        hidden: torch.Tensor,
        norm: RMSNorm,
        angles: Angles,
        attention: AttentionBackend,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """See AttentionLayer."""
        num_tokens = hidden.shape[0]
        q, k, v = (part.view(num_tokens, -1, self._head_dim) for part in self._qkv(hidden, norm))
        if self._head_norms:
            q, k = (norm(x) for norm, x in zip(self._head_norms, (q, k), strict=True))
        cos_sin = self._rope.cos_sin(angles)
        if cos_sin is None or not attention.rotates:
            (q, k), cos_sin = self._rope.rotate_pair(q, k, angles), None
        attended = attention.forward(self._layer, q, k, v, cos_sin=cos_sin).flatten(1)
        if rows is not None:
            attended, hidden = attended[rows], hidden[rows]
        return self._out(attended, hidden)


class LlamaForCausalLM(CausalLM):
    """See CausalLM."""

    def make_attention(self, loader: WeightLoader, layer: int, rope: Rope) -> AttentionLayer:
        return LlamaAttention(loader, self.config, layer, self.parallel, rope)

    def make_feed_forward(self, loader: WeightLoader, layer: int) -> FeedForward:
        return GatedMLP(loader, f"model.layers.{layer}.mlp", self.config, self.parallel)

    @property
    def attention_spec(self) -> AttentionSpec:
        config, parallel = self.config, self.parallel
        return AttentionSpec(
            num_q_heads=config.num_heads // parallel.size,
            num_kv_heads=len(parallel.kv_heads(config.num_kv_heads)),
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            mla=False,
        )

"""DeepSeek-V2: multi-head latent attention, with feed-forward layers that may mix experts.

The cache holds one latent per token, shared by all heads: the normed compressed KV beside the
roped key. The up-projections of keys and values are absorbed into the query and the output, so
that attention reads latents as they lie and every rank keeps the same, whole cache.
"""

from typing import Final

import torch
from torch import Tensor

from attention.base import AttentionBackend
from model.base import AttentionLayer, AttentionSpec, CausalLM, FeedForward
from model.config import ModelConfig
from model.layers import GatedMLP, Linear, RMSNorm, even_share, load_norm, load_rows
from model.moe import MoELayer
from model.parallel import Parallel
from model.rope import Angles, Rope, mscale_of_scores
from model.weights import WeightLoader

_LATENT_NORM_EPS: Final = 1e-6  # the architecture's own, whatever the config says of the others


def _load_linear(loader: WeightLoader, name: str, shape: tuple[int, int], *, bias: bool) -> Linear:
    weight = loader.load(f"{name}.weight", shape)
    return Linear(weight, loader.load(f"{name}.bias", shape[:1]) if bias else None)


class LatentAttention:
    """Absorbed multi-head latent attention over this rank's query heads."""

    def __init__(
        self, loader: WeightLoader, config: ModelConfig, layer: int, parallel: Parallel, rope: Rope
    ) -> None:
        mla = config.mla
        assert mla is not None
        self._layer, self._rope, self._mla = layer, rope, mla
        prefix = f"model.layers.{layer}.self_attn"
        heads = even_share(parallel, config.num_heads)
        self._load_query(loader, config, prefix, heads)
        latent_shape = (mla.kv_lora_rank + mla.qk_rope_head_dim, config.hidden_size)
        self._latent = _load_linear(
            loader, f"{prefix}.kv_a_proj_with_mqa", latent_shape, bias=config.attention_bias
        )
        self._latent_norm = load_norm(
            loader, f"{prefix}.kv_a_layernorm", mla.kv_lora_rank, _LATENT_NORM_EPS
        )
        width = mla.qk_nope_head_dim + mla.v_head_dim
        up = loader.load(
            f"{prefix}.kv_b_proj.weight",
            (config.num_heads * width, mla.kv_lora_rank),
            rows=range(heads.start * width, heads.stop * width),
        ).view(len(heads), width, mla.kv_lora_rank)
        self._key_up = up[:, : mla.qk_nope_head_dim]  # [heads, nope, rank]
        self._value_up = up[:, mla.qk_nope_head_dim :].transpose(1, 2)  # [heads, rank, v]
        self._out = load_rows(
            loader,
            f"{prefix}.o_proj",
            (config.hidden_size, config.num_heads * mla.v_head_dim),
            range(heads.start * mla.v_head_dim, heads.stop * mla.v_head_dim),
            config.output_bias,
            parallel,
        )

    def _load_query(
        self, loader: WeightLoader, config: ModelConfig, prefix: str, heads: range
    ) -> None:
        """x [T, hidden] to this rank's queries [T, heads, nope + rope], perhaps by a low rank."""
        dim = self._mla.qk_nope_head_dim + self._mla.qk_rope_head_dim
        rank, inputs, name = self._mla.q_lora_rank, config.hidden_size, "q_proj"
        self._query_down: Linear | None = None
        if rank is not None:
            shape, bias = (rank, inputs), config.attention_bias
            self._query_down = _load_linear(loader, f"{prefix}.q_a_proj", shape, bias=bias)
            self._query_norm = load_norm(loader, f"{prefix}.q_a_layernorm", rank, _LATENT_NORM_EPS)
            inputs, name = rank, "q_b_proj"
        rows = range(heads.start * dim, heads.stop * dim)
        shape = (config.num_heads * dim, inputs)
        self._query_up = Linear(loader.load(f"{prefix}.{name}.weight", shape, rows=rows))

    def __call__(
        self,
        hidden: Tensor,
        norm: RMSNorm,
        angles: Angles,
        attention: AttentionBackend,
        rows: Tensor | None,
    ) -> Tensor:
        """See AttentionLayer."""
        mla, x = self._mla, norm(hidden)
        low = x if self._query_down is None else self._query_norm(self._query_down(x))
        q = self._query_up(low).view(x.shape[0], -1, mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        q_nope, q_rope = q[..., : mla.qk_nope_head_dim], q[..., mla.qk_nope_head_dim :]
        q_latent = torch.bmm(q_nope.transpose(0, 1), self._key_up).transpose(0, 1)
        compressed = self._latent(x)
        key_rope = compressed[:, None, mla.kv_lora_rank :]
        latent = torch.cat(
            (
                self._latent_norm(compressed[:, : mla.kv_lora_rank]),
                self._rope.rotate(key_rope, angles)[:, 0],
            ),
            dim=-1,
        )
        attended = attention.forward_latent(
            self._layer, q_latent, self._rope.rotate(q_rope, angles), latent
        )
        if rows is not None:
            attended, hidden = attended[rows], hidden[rows]
        values = torch.bmm(attended.transpose(0, 1), self._value_up)  # [heads, T or R, v]
        return self._out(values.transpose(0, 1).reshape(hidden.shape[0], -1), hidden)


class DeepseekV2ForCausalLM(CausalLM):
    """See CausalLM. Calls AttentionBackend.forward_latent."""

    def make_attention(self, loader: WeightLoader, layer: int, rope: Rope) -> AttentionLayer:
        return LatentAttention(loader, self.config, layer, self.parallel, rope)

    def make_feed_forward(self, loader: WeightLoader, layer: int) -> FeedForward:
        moe = self.config.moe
        is_mixed = moe is not None and layer >= moe.first_dense_layers
        make = MoELayer if is_mixed else GatedMLP
        return make(loader, f"model.layers.{layer}.mlp", self.config, self.parallel)

    @property
    def attention_spec(self) -> AttentionSpec:
        mla = self.config.mla
        assert mla is not None
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        return AttentionSpec(
            num_q_heads=self.config.num_heads // self.parallel.size,
            num_kv_heads=1,
            head_dim=mla.kv_lora_rank + mla.qk_rope_head_dim,
            scale=head_dim**-0.5 * mscale_of_scores(self.config.rope),
            mla=True,
        )

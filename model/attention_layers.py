"""The two kinds of attention layer: grouped-query and multi-head latent (MLA)."""

from collections.abc import Generator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from attention.base import AttentionBackend, AttentionKind, LayerAttention, RopeNormArgs
from model.config import ModelConfig
from model.layers import (
    Join,
    Part,
    RMSNorm,
    even_share,
    load_columns,
    load_norm,
    load_rows,
    reordered,
    split_parts,
)
from model.parallel import Parallel
from model.rope import Angles, Rope, rotate_half_order
from model.weights import WeightLoader

# DeepSeek uses this eps for the norms of latents, regardless of rms_norm_eps.
_LATENT_NORM_EPS: Final = 1e-6


class AttentionSpec(NamedTuple):
    """The properties that an attention backend of this rank must have.

    Attributes:
        num_q_heads, num_kv_heads: heads of this rank.
        scale: factor of the scores before the softmax.
        layers: the attention of each layer.
    """

    num_q_heads: int
    num_kv_heads: int
    scale: float
    layers: tuple[LayerAttention, ...]


class Step(NamedTuple):
    """The inputs of a step's attention layers, except the hidden states.

    Attributes:
        angles: the angles of each of the model's ropes.
        backend_rotates: whether the attention backend applies norms and rotation.
        rows: int64 [R], the rows that the layer must return; None: all.
    """

    angles: tuple[Angles, ...]
    backend_rotates: bool
    rows: Tensor | None = None


class AttentionQuery(NamedTuple):
    """The arguments of one layer's call of the attention backend.

    Attributes:
        inputs: the tensors [T, ...] of the call: q, k and v of `forward`, or q_latent,
            q_rope and latent of `forward_latent`.
        rope_norm: the norms and rotation that the backend must apply, if any.
        is_latent: whether to call `forward_latent`.
    """

    layer: int
    inputs: tuple[Tensor, ...]
    rope_norm: RopeNormArgs | None = None
    is_latent: bool = False

    def run_on(self, backend: AttentionBackend) -> Tensor:
        """Calls the backend's `forward` or `forward_latent`.

        Returns:
            [T, heads, dim].
        """
        if self.is_latent:
            return backend.forward_latent(self.layer, *self.inputs)
        return backend.forward(self.layer, *self.inputs, rope_norm=self.rope_norm)

    def truncated(self, num_tokens: int) -> "AttentionQuery":
        """Returns the query for the first `num_tokens` tokens."""
        rope_norm = self.rope_norm and self.rope_norm._replace(
            cos_sin=self.rope_norm.cos_sin[:num_tokens]
        )
        return self._replace(
            inputs=tuple(x[:num_tokens] for x in self.inputs), rope_norm=rope_norm
        )


# A generator that yields the query of each layer, receives the output of attention, and
# returns the hidden states.
AttentionQueries = Generator[AttentionQuery, Tensor, Tensor]


def _rows_of_heads(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


class HeadAttention:
    """Grouped-query attention over this rank's heads.

    Queries, keys and values may have biases. Queries and keys may have norms.

    Args:
        prefix: prefix of the names of the weights.
        layer: index of the layer in the KV cache.
        num_inputs: number of elements in an input row of the projections; None: the
            hidden size.
    """

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        config: ModelConfig,
        layer: int,
        parallel: Parallel,
        ropes: list[Rope],
        join: Join,
        *,
        num_inputs: int | None = None,
    ) -> None:
        self._layer = layer
        self._head_dim = config.head_dim
        rope_index = config.rope_index(layer)
        self._rope = None if rope_index is None else ropes[rope_index]
        self._angles_index = rope_index or 0
        dim = config.head_dim
        num_inputs = num_inputs or config.hidden_size
        q_rows = _rows_of_heads(even_share(parallel, config.num_heads), dim)
        kv_rows = _rows_of_heads(parallel.kv_heads(config.num_kv_heads), dim)
        q_shape = (config.num_heads * dim, num_inputs)
        kv_shape = (config.num_kv_heads * dim, num_inputs)
        is_fused = "qkv_proj" in config.traits.fused
        *query_key_parts, value_part = split_parts(
            fused_name=f"{prefix}.qkv_proj" if is_fused else None,
            names=[f"{prefix}.{name}_proj" for name in "qkv"],
            shapes=[q_shape, kv_shape, kv_shape],
            rows=[q_rows, kv_rows, kv_rows],
        )
        order = rotate_half_order(config.ropes[self._angles_index], dim)
        query_key_parts = [part._replace(order=order) for part in query_key_parts]
        self._qkv = load_columns(
            loader, [*query_key_parts, value_part], bias=config.attention_bias
        )
        self._out = load_rows(
            loader,
            f"{prefix}.o_proj",
            (config.hidden_size, config.num_heads * dim),
            q_rows,
            config.output_bias,
            parallel,
            join,
        )
        self._norms = _load_head_norms(loader, prefix, config, query_key_parts)
        self._parallel = parallel if config.qk_norm == "row" else None
        sinks = None
        if config.traits.sinks:
            sinks = loader.load(
                f"{prefix}.sinks",
                (config.num_heads,),
                rows=even_share(parallel, config.num_heads),
                dtype=torch.float32,
            )
        kind = AttentionKind(config.window_of(layer), config.score_cap)
        self.layer_attention = LayerAttention(kind, sinks)

    def __call__(
        self,
        hidden: Tensor,
        norm: RMSNorm | None,
        step: Step,
        inputs: Tensor | None = None,
    ) -> AttentionQueries:
        """Adds the output of attention to `hidden` [T, hidden].

        This changes `hidden` in place, unless `step.rows` selects rows.

        Args:
            norm: the norm of the layer's input, if any.
            inputs: [T, num_inputs], the input of the projections before the norm; None:
                `hidden`.

        Returns:
            The sum [T, hidden], or only its rows [R, hidden] that `step.rows` selects.
        """
        num_tokens = hidden.shape[0]
        q, k, v = self._qkv(hidden if inputs is None else inputs, norm)
        norms = self._norms
        if norms and self._parallel is not None:
            q, k = _norm_rows(norms, (q, k), self._parallel)
            norms = []
        q = q.view(num_tokens, -1, self._head_dim)
        k = k.view(num_tokens, -1, self._head_dim)
        v = v.view(num_tokens, -1, self._head_dim)
        rope = self._rope
        angles = step.angles[self._angles_index]
        cos_sin = None
        if rope is not None and step.backend_rotates:
            cos_sin = rope.cos_sin(angles)
        rope_norm = None
        if cos_sin is not None:
            weights = (norms[0].weight, norms[1].weight) if norms else None
            rope_norm = RopeNormArgs(cos_sin, weights, norms[0].eps if norms else 0.0)
        else:
            if norms:
                q = norms[0](q)
                k = norms[1](k)
            if rope is not None:
                q, k = rope.rotate_pair(q, k, angles)
        attended = (yield AttentionQuery(self._layer, (q, k, v), rope_norm)).flatten(1)
        if step.rows is not None:
            attended = attended[step.rows]
            hidden = hidden[step.rows]
        return self._out(attended, hidden)


def _load_head_norms(
    loader: WeightLoader, prefix: str, config: ModelConfig, parts: list[Part]
) -> list[RMSNorm]:
    """Returns the norms of queries and keys, or [] if the model has none.

    A norm is over each head (qk_norm "head") or over all heads together ("row"). For a
    norm over all heads, the rank loads the weights for its own heads.

    Args:
        parts: the parts of the projection that make queries and keys.
    """
    norms: list[RMSNorm] = []
    if not config.qk_norm:
        return norms
    for part, name in zip(parts, ("q_norm", "k_norm"), strict=True):
        width = config.head_dim
        rows = None
        if config.qk_norm == "row":
            width = part.shape[0]
            rows = part.rows
        norm = load_norm(loader, f"{prefix}.{name}", width, config, rows=rows)
        norms.append(RMSNorm(reordered(norm.weight, part.order), norm.eps))
    return norms


def _norm_rows(
    norms: list[RMSNorm], parts: tuple[Tensor, ...], parallel: Parallel
) -> tuple[Tensor, ...]:
    """Normalizes queries and keys [T, n], each over the heads of all ranks together.

    The mean square over all heads is the mean of the ranks' mean squares. This holds
    even if several ranks store the same KV heads, because each KV head is on the same
    number of ranks.
    """
    if parallel.size == 1:
        return tuple(norm(x) for norm, x in zip(norms, parts, strict=True))
    wide = [x.float() for x in parts]
    means = torch.stack([x.square().mean(-1) for x in wide], dim=-1)
    means = parallel.all_reduce(means).div_(parallel.size)  # [T, 2]
    return tuple(
        (x * (means[:, i, None] + norm.eps).rsqrt() * norm.weight).to(parts[i].dtype)
        for i, (x, norm) in enumerate(zip(wide, norms, strict=True))
    )


class LatentAttention:
    """Multi-head latent attention over this rank's query heads.

    The cache holds one latent per token, which all heads share: the normed compressed
    KV followed by the rotated key. The up-projections of keys and values are absorbed
    into the query and the output, so that attention reads latents as they are stored.
    Every rank stores the same, complete cache. For the arguments see HeadAttention.
    """

    layer_attention = LayerAttention()

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        config: ModelConfig,
        layer: int,
        parallel: Parallel,
        ropes: list[Rope],
        join: Join,
    ) -> None:
        mla = config.mla
        assert mla is not None
        self._layer = layer
        self._rope = ropes[0]
        self._mla = mla
        heads = even_share(parallel, config.num_heads)
        latent_dim = mla.kv_lora_rank + mla.qk_rope_head_dim
        kv_shape = (latent_dim, config.hidden_size)
        kv_name = f"{prefix}.kv_a_proj_with_mqa"
        down_parts = [Part(kv_name, kv_shape, range(latent_dim))]
        query_inputs = config.hidden_size
        query_name = "q_proj"
        self._query_norm = None
        if mla.q_lora_rank is not None:  # queries have a down- and an up-projection
            query_inputs = mla.q_lora_rank
            query_name = "q_b_proj"
            query_shape = (query_inputs, config.hidden_size)
            query_rows = range(query_inputs)
            down_parts.append(Part(f"{prefix}.q_a_proj", query_shape, query_rows))
            norm_name = f"{prefix}.q_a_layernorm"
            self._query_norm = load_norm(
                loader, norm_name, query_inputs, config, eps=_LATENT_NORM_EPS
            )
        self._down = load_columns(loader, down_parts, bias=config.attention_bias)
        norm_name = f"{prefix}.kv_a_layernorm"
        self._latent_norm = load_norm(
            loader, norm_name, mla.kv_lora_rank, config, eps=_LATENT_NORM_EPS
        )
        query_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        query_part = Part(
            f"{prefix}.{query_name}",
            (config.num_heads * query_dim, query_inputs),
            _rows_of_heads(heads, query_dim),
        )
        self._query_up = load_columns(loader, [query_part], bias=False)
        self._load_up_projections(loader, prefix, config, heads)
        self._out = load_rows(
            loader,
            f"{prefix}.o_proj",
            (config.hidden_size, config.num_heads * mla.v_head_dim),
            _rows_of_heads(heads, mla.v_head_dim),
            config.output_bias,
            parallel,
            join,
        )

    def _load_up_projections(
        self, loader: WeightLoader, prefix: str, config: ModelConfig, heads: range
    ) -> None:
        mla = self._mla
        dim = mla.qk_nope_head_dim + mla.v_head_dim
        up = loader.load(
            f"{prefix}.kv_b_proj.weight",
            (config.num_heads * dim, mla.kv_lora_rank),
            rows=_rows_of_heads(heads, dim),
        ).view(len(heads), dim, mla.kv_lora_rank)
        # [heads, nope, rank]
        self._key_up = up[:, : mla.qk_nope_head_dim]
        # [heads, rank, v]
        self._value_up = up[:, mla.qk_nope_head_dim :].transpose(1, 2)

    def __call__(
        self, hidden: Tensor, norm: RMSNorm | None, step: Step
    ) -> AttentionQueries:
        """See HeadAttention."""
        mla = self._mla
        x = hidden if norm is None else norm(hidden)
        compressed, *low_rank_queries = self._down(x)
        query_input = low_rank_queries[0] if low_rank_queries else x
        (q,) = self._query_up(query_input, self._query_norm)
        q = q.view(x.shape[0], -1, mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        q_nope = q[..., : mla.qk_nope_head_dim]
        q_rope = q[..., mla.qk_nope_head_dim :]
        q_latent = torch.bmm(q_nope.transpose(0, 1), self._key_up).transpose(0, 1)
        key_rope = compressed[:, None, mla.kv_lora_rank :]
        q_rope, key_rope = self._rope.rotate_pair(q_rope, key_rope, step.angles[0])
        normed = self._latent_norm(compressed[:, : mla.kv_lora_rank])
        latent = torch.cat((normed, key_rope[:, 0]), dim=-1)
        attended = yield AttentionQuery(
            self._layer, (q_latent, q_rope, latent), is_latent=True
        )
        if step.rows is not None:
            attended = attended[step.rows]
            hidden = hidden[step.rows]
        # [heads, T or R, v]
        values = torch.bmm(attended.transpose(0, 1), self._value_up)
        return self._out(values.transpose(0, 1).reshape(hidden.shape[0], -1), hidden)

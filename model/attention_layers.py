"""The two kinds of attention layer: over keys and values of heads, and over latents (MLA)."""

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
    joined,
    load_columns,
    load_norm,
    load_rows,
    reordered,
)
from model.parallel import Parallel
from model.rope import Angles, Rope, halves_order
from model.weights import WeightLoader

_LATENT_NORM_EPS: Final = 1e-6  # DeepSeek's own, whatever the config says of the others


class AttentionSpec(NamedTuple):
    """What an attention backend of this rank must be made for."""

    num_q_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    scale: float  # of the scores, before the softmax
    layers: tuple[LayerAttention, ...]  # how each attends


class Step(NamedTuple):
    """What the attention layers of a step need besides hidden states."""

    angles: tuple[Angles, ...]  # of each of the model's ropes
    backend_rotates: bool
    rows: Tensor | None = None  # i64 [R], where the layer is to compute no others


class Query(NamedTuple):
    """What a layer asks of the attention backend: by q, k and v, or by what latents take."""

    layer: int
    inputs: tuple[Tensor, ...]  # [T, ...] each
    rope_norm: RopeNormArgs | None = None
    is_latent: bool = False

    def answer(self, backend: AttentionBackend) -> Tensor:
        """[T, heads, dim]; see the backend's `forward` and `forward_latent`."""
        if self.is_latent:
            return backend.forward_latent(self.layer, *self.inputs)
        return backend.forward(self.layer, *self.inputs, rope_norm=self.rope_norm)

    def first(self, num_tokens: int) -> "Query":
        """Of so many tokens."""
        rope_norm = self.rope_norm and self.rope_norm._replace(
            cos_sin=self.rope_norm.cos_sin[:num_tokens]
        )
        return self._replace(
            inputs=tuple(x[:num_tokens] for x in self.inputs), rope_norm=rope_norm
        )


# A layer that asks, is sent the answer, and returns hidden states.
Asking = Generator[Query, Tensor, Tensor]


def _elements(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


class HeadAttention:
    """Grouped-query attention over this rank's heads, perhaps with biases and q/k norms."""

    def __init__(
        self,
        loader: WeightLoader,
        config: ModelConfig,
        layer: int,
        parallel: Parallel,
        ropes: list[Rope],
        join: Join,
    ) -> None:
        self._layer, self._head_dim = layer, config.head_dim
        self._which = config.rope_of(layer)
        self._rope = None if self._which is None else ropes[self._which]
        prefix, dim = f"model.layers.{layer}.self_attn", config.head_dim
        q_rows = _elements(even_share(parallel, config.num_heads), dim)
        kv_rows = _elements(parallel.kv_heads(config.num_kv_heads), dim)
        q_shape = (config.num_heads * dim, config.hidden_size)
        kv_shape = (config.num_kv_heads * dim, config.hidden_size)
        *queries_keys, values = joined(
            f"{prefix}.qkv_proj" if "qkv_proj" in config.declared.fused else None,
            [f"{prefix}.{name}_proj" for name in "qkv"],
            [q_shape, kv_shape, kv_shape],
            [q_rows, kv_rows, kv_rows],
        )
        order = halves_order(config.ropes[self._which or 0], dim)
        turned = [part._replace(order=order) for part in queries_keys]
        self._qkv = load_columns(loader, [*turned, values], bias=config.attention_bias)
        self._out = load_rows(
            loader,
            f"{prefix}.o_proj",
            q_shape[::-1],
            q_rows,
            config.output_bias,
            parallel,
            join,
        )
        self._norms = _load_head_norms(loader, prefix, config, turned)
        self._parallel = parallel if config.qk_norm == "row" else None
        sinks, count = None, config.num_heads
        if config.declared.sinks:
            rows = even_share(parallel, count)
            sinks = loader.load(
                f"{prefix}.sinks", (count,), rows=rows, dtype=torch.float32
            )
        self.attends = LayerAttention(
            AttentionKind(config.window_of(layer), config.score_cap), sinks
        )

    def __call__(self, hidden: Tensor, norm: RMSNorm | None, step: Step) -> Asking:
        """Adds to hidden [T, hidden], in place, what attention makes of it after the norm; returns
        it, or only the wanted rows [R, hidden]."""
        num_tokens = hidden.shape[0]
        q, k, v = self._qkv(hidden, norm)
        norms = self._norms
        if norms and self._parallel is not None:
            (q, k), norms = _norm_rows(norms, (q, k), self._parallel), []
        q, k, v = (part.view(num_tokens, -1, self._head_dim) for part in (q, k, v))
        rope, angles = self._rope, step.angles[self._which or 0]
        cos_sin = (
            rope.cos_sin(angles) if rope is not None and step.backend_rotates else None
        )
        rope_norm = None
        if cos_sin is not None:
            weights = (norms[0].weight, norms[1].weight) if norms else None
            rope_norm = RopeNormArgs(cos_sin, weights, norms[0].eps if norms else 0.0)
        else:
            if norms:
                q, k = (norm(x) for norm, x in zip(norms, (q, k), strict=True))
            if rope is not None:
                q, k = rope.rotate_pair(q, k, angles)
        attended = (yield Query(self._layer, (q, k, v), rope_norm)).flatten(1)
        if step.rows is not None:
            attended, hidden = attended[step.rows], hidden[step.rows]
        return self._out(attended, hidden)


def _load_head_norms(
    loader: WeightLoader, prefix: str, config: ModelConfig, parts: list[Part]
) -> list[RMSNorm]:
    """Of queries and keys: of each head, or this rank's part of one over all heads."""
    found = []
    for part, name in zip(parts, ("q_norm", "k_norm"), strict=True):
        if config.qk_norm:
            of_all = config.qk_norm == "row"
            width, rows = (
                (part.shape[0], part.rows) if of_all else (config.head_dim, None)
            )
            norm = load_norm(loader, f"{prefix}.{name}", width, config, rows=rows)
            found.append(RMSNorm(reordered(norm.weight, part.order), norm.eps))
    return found


def _norm_rows(
    norms: list[RMSNorm], parts: tuple[Tensor, ...], parallel: Parallel
) -> tuple[Tensor, ...]:
    """Parts [T, n] of queries and of keys, normed over the heads of all ranks. Ranks hold equally
    many, whether or not some are the same."""
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

    The cache holds one latent per token, shared by all heads: the normed compressed KV beside the
    roped key. The up-projections of keys and values are absorbed into the query and the output, so
    that attention reads latents as they lie and every rank keeps the same, whole cache.
    """

    attends = LayerAttention()

    def __init__(
        self,
        loader: WeightLoader,
        config: ModelConfig,
        layer: int,
        parallel: Parallel,
        ropes: list[Rope],
        join: Join,
    ) -> None:
        mla = config.mla
        assert mla is not None
        self._layer, self._rope, self._mla = layer, ropes[0], mla
        prefix = f"model.layers.{layer}.self_attn"
        heads = even_share(parallel, config.num_heads)
        rank, width = mla.kv_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim
        down = [
            Part(
                f"{prefix}.kv_a_proj_with_mqa",
                (width, config.hidden_size),
                range(width),
            )
        ]
        inputs, name, self._query_norm = config.hidden_size, "q_proj", None
        if mla.q_lora_rank is not None:  # queries go by a low rank too
            inputs, name = mla.q_lora_rank, "q_b_proj"
            down += [
                Part(f"{prefix}.q_a_proj", (inputs, config.hidden_size), range(inputs))
            ]
            self._query_norm = load_norm(
                loader, f"{prefix}.q_a_layernorm", inputs, config, eps=_LATENT_NORM_EPS
            )
        self._down = load_columns(loader, down, bias=config.attention_bias)
        self._latent_norm = load_norm(
            loader, f"{prefix}.kv_a_layernorm", rank, config, eps=_LATENT_NORM_EPS
        )
        dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        shape = (config.num_heads * dim, inputs)
        self._query_up = load_columns(
            loader, [Part(f"{prefix}.{name}", shape, _elements(heads, dim))], bias=False
        )
        dim = mla.qk_nope_head_dim + mla.v_head_dim
        up = loader.load(
            f"{prefix}.kv_b_proj.weight",
            (config.num_heads * dim, rank),
            rows=_elements(heads, dim),
        ).view(len(heads), dim, rank)
        self._key_up = up[:, : mla.qk_nope_head_dim]  # [heads, nope, rank]
        self._value_up = up[:, mla.qk_nope_head_dim :].transpose(
            1, 2
        )  # [heads, rank, v]
        shape = (config.hidden_size, config.num_heads * mla.v_head_dim)
        columns = _elements(heads, mla.v_head_dim)
        self._out = load_rows(
            loader,
            f"{prefix}.o_proj",
            shape,
            columns,
            config.output_bias,
            parallel,
            join,
        )

    def __call__(self, hidden: Tensor, norm: RMSNorm | None, step: Step) -> Asking:
        """See HeadAttention."""
        mla, x, angles = (
            self._mla,
            hidden if norm is None else norm(hidden),
            step.angles[0],
        )
        compressed, *low = self._down(x)
        (q,) = self._query_up(low[0] if low else x, self._query_norm)
        q = q.view(x.shape[0], -1, mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        q_nope, q_rope = q[..., : mla.qk_nope_head_dim], q[..., mla.qk_nope_head_dim :]
        q_latent = torch.bmm(q_nope.transpose(0, 1), self._key_up).transpose(0, 1)
        key_rope = compressed[:, None, mla.kv_lora_rank :]
        q_rope, key_rope = self._rope.rotate_pair(q_rope, key_rope, angles)
        normed = self._latent_norm(compressed[:, : mla.kv_lora_rank])
        latent = torch.cat((normed, key_rope[:, 0]), dim=-1)
        attended = yield Query(self._layer, (q_latent, q_rope, latent), is_latent=True)
        if step.rows is not None:
            attended, hidden = attended[step.rows], hidden[step.rows]
        values = torch.bmm(
            attended.transpose(0, 1), self._value_up
        )  # [heads, T or R, v]
        return self._out(values.transpose(0, 1).reshape(hidden.shape[0], -1), hidden)

"""One layer of a decoder: attention, feed-forward and their norms."""

from torch import Tensor

from attention.base import AttentionBackend
from model.attention_layers import (
    AttentionQueries,
    AttentionSpec,
    HeadAttention,
    LatentAttention,
    Step,
)
from model.config import ModelConfig
from model.layers import GatedMLP, Join, RMSNorm, load_norm
from model.mixture.moe import MoELayer
from model.parallel import Parallel
from model.rope import Rope, score_mscale
from model.weights import WeightLoader


class DecoderLayer:
    """One rank's part of a layer.

    Args:
        index: the layer's index in `config` and in the KV cache.
        prefix: prefix of the names of the layer's weights.
        attention_inputs: number of elements in an input row of the attention
            projections; None: the hidden size.
    """

    def __init__(
        self,
        loader: WeightLoader,
        config: ModelConfig,
        index: int,
        parallel: Parallel,
        ropes: list[Rope],
        *,
        prefix: str,
        attention_inputs: int | None = None,
    ) -> None:
        feed_forward_class = MoELayer if config.is_moe_layer(index) else GatedMLP
        mixture = config.traits.mixture
        block = mixture.prefix if mixture else "mlp"

        def norm(name: str | None) -> RMSNorm | None:
            if name is None:
                return None
            return load_norm(loader, f"{prefix}.{name}", config.hidden_size, config)

        names = config.traits.norms
        self.norm = norm(names.attention)
        attention_join = Join(norm(names.attention_out), config.residual_scale)
        self.mlp_norm = norm(names.mlp)
        mlp_join = Join(norm(names.mlp_out), config.residual_scale)
        self.attention: HeadAttention | LatentAttention
        attention_prefix = f"{prefix}.self_attn"
        if config.mla:
            assert attention_inputs is None, "MLA reads hidden states only"
            self.attention = LatentAttention(
                loader,
                attention_prefix,
                config,
                index,
                parallel,
                ropes,
                attention_join,
            )
        else:
            self.attention = HeadAttention(
                loader,
                attention_prefix,
                config,
                index,
                parallel,
                ropes,
                attention_join,
                num_inputs=attention_inputs,
            )
        self.feed_forward = feed_forward_class(
            loader, f"{prefix}.{block}", config, parallel, mlp_join
        )

    def __call__(self, hidden: Tensor, step: Step) -> AttentionQueries:
        """Runs the layer on `hidden` [T, hidden], which it may change in place.

        Returns:
            [T, hidden], or only the rows [R, hidden] that `step.rows` selects.
        """
        hidden = yield from self.attention(hidden, self.norm, step)
        return self.feed_forward(hidden, self.mlp_norm)


def load_ropes(loader: WeightLoader, config: ModelConfig) -> list[Rope]:
    """Returns the ropes of a model, in the order of `config.ropes`."""
    head_dim = None if config.mla else config.head_dim
    return [
        Rope(rope, dtype=loader.dtype, device=loader.device, head_dim=head_dim)
        for rope in config.ropes
    ]


def attention_spec(
    config: ModelConfig, parallel: Parallel, layers: list[DecoderLayer]
) -> AttentionSpec:
    """Returns the properties that the attention backend of these layers must have."""
    query_dim = config.head_dim
    correction = 1.0
    if config.mla:
        query_dim += config.mla.qk_nope_head_dim
        correction = score_mscale(config.rope)
    return AttentionSpec(
        num_q_heads=config.num_heads // parallel.size,
        num_kv_heads=len(parallel.kv_heads(config.kv_heads_total)),
        scale=(config.score_scale or query_dim**-0.5) * correction,
        layers=tuple(layer.attention.layer_attention for layer in layers),
    )


def run_queries(queries: AttentionQueries, attention: AttentionBackend) -> Tensor:
    """Runs a generator of attention queries on a backend that is planned for its step.

    Returns:
        the hidden states that the generator returns.
    """
    query = next(queries)
    while True:
        try:
            query = queries.send(query.run_on(attention))
        except StopIteration as end:
            hidden: Tensor = end.value
            return hidden

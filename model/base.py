"""The decoder of every architecture here: they differ only in attention and feed-forward."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from attention.base import AttentionBackend
from model.config import ModelConfig
from model.layers import RMSNorm, Vocabulary, load_norm
from model.parallel import Parallel
from model.rope import Angles, Rope
from model.weights import WeightLoader


class AttentionSpec(NamedTuple):
    """What an attention backend of this rank must be made for."""

    num_q_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    head_dim: int  # elements per head in the KV cache
    scale: float  # of the scores, before the softmax
    mla: bool  # the model calls forward_latent


# hidden [T, hidden], changed in place and returned, or only its rows [R, hidden] where these are
# given. The norm comes first.
AttentionLayer = Callable[[Tensor, RMSNorm, Angles, AttentionBackend, Tensor | None], Tensor]
FeedForward = Callable[[Tensor, RMSNorm], Tensor]


class _Layer(NamedTuple):
    norm: RMSNorm
    attention: AttentionLayer
    mlp_norm: RMSNorm
    feed_forward: FeedForward


class CausalLM(ABC):
    """Embedding, layers, final norm and head of one rank. Inference only: the caller is in
    torch.inference_mode."""

    def __init__(self, config: ModelConfig, loader: WeightLoader, parallel: Parallel) -> None:
        self.config = config
        self.parallel = parallel
        self._rope = Rope(config.rope, dtype=loader.dtype, device=loader.device)
        self._vocab = Vocabulary(loader, config, parallel)
        self._layers = [self._make_layer(loader, index) for index in range(config.num_layers)]
        self._norm = load_norm(loader, "model.norm", config.hidden_size, config.rms_eps)

    @property
    @abstractmethod
    def attention_spec(self) -> AttentionSpec: ...

    def _make_layer(self, loader: WeightLoader, index: int) -> _Layer:
        attention = self.make_attention(loader, index, self._rope)
        feed_forward = self.make_feed_forward(loader, index)
        size, eps = self.config.hidden_size, self.config.rms_eps
        norm, mlp_norm = (
            load_norm(loader, f"model.layers.{index}.{name}", size, eps)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        return _Layer(norm, attention, mlp_norm, feed_forward)

    @abstractmethod
    def make_attention(self, loader: WeightLoader, layer: int, rope: Rope) -> AttentionLayer: ...

    @abstractmethod
    def make_feed_forward(self, loader: WeightLoader, layer: int) -> FeedForward: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Runs one step through all layers, writing its KV through `attention`.

        Args:
            token_ids: int64 [T].
            positions: int64 [T], of each token in its sequence.
            attention: planned for this step.
            rows: int64 [R], those of T to return, R >= 1; all where not given. The last layer
                computes no others once their KV is stored.

        Returns:
            [T, hidden] or [R, hidden], normed, in the model's dtype, equal on every rank.
        """
        hidden = self._vocab.embed(token_ids)
        angles = self._rope.angles(positions)
        for index, layer in enumerate(self._layers, 1):
            wanted = rows if index == len(self._layers) else None
            hidden = layer.attention(hidden, layer.norm, angles, attention, wanted)
            hidden = layer.feed_forward(hidden, layer.mlp_norm)
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of hidden [S, hidden], the whole vocabulary on every rank."""
        return self._vocab.logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """`logits` as computed, perhaps in 16 bits: what is largest can be told without widening
        them."""
        return self._vocab.logits(hidden)

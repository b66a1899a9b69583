"""The decoder of every architecture here: they differ only in attention and feed-forward."""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch

from attention.base import AttentionBackend
from model.config import ModelConfig
from model.layers import RMSNorm, VocabShard, load_norm
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


class AttentionLayer(Protocol):
    def __call__(
        self,
        hidden: torch.Tensor,
        norm: RMSNorm,
        angles: Angles,
        attention: AttentionBackend,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """hidden [T, hidden], changed in place and returned, or only its `rows` [R, hidden];
        `norm` comes first."""
        ...


class FeedForward(Protocol):
    def __call__(self, hidden: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """hidden [T, hidden], changed in place and returned; `norm` comes first."""
        ...


class _Layer:
    def __init__(
        self,
        loader: WeightLoader,
        config: ModelConfig,
        index: int,
        attention: AttentionLayer,
        feed_forward: FeedForward,
    ) -> None:
        names = ("input_layernorm", "post_attention_layernorm")
        self._norm, self._mlp_norm = (
            load_norm(loader, f"model.layers.{index}.{name}", config.hidden_size, config.rms_eps)
            for name in names
        )
        self._attention = attention
        self._feed_forward = feed_forward

    def __call__(
        self,
        hidden: torch.Tensor,
        angles: Angles,
        attention: AttentionBackend,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """hidden [T, hidden], changed in place and returned, or only its `rows` [R, hidden]."""
        hidden = self._attention(hidden, self._norm, angles, attention, rows)
        return self._feed_forward(hidden, self._mlp_norm)


class CausalLM(ABC):
    """Embedding, layers, final norm and head of one rank. Inference only: the caller is in
    torch.inference_mode."""

    def __init__(self, config: ModelConfig, loader: WeightLoader, parallel: Parallel) -> None:
        self.config = config
        self.parallel = parallel
        self._rope = Rope(config.rope, dtype=loader.dtype, device=loader.device)
        self._vocab = VocabShard(loader, config, parallel)
        self._layers = [self._make_layer(loader, index) for index in range(config.num_layers)]
        self._norm = load_norm(loader, "model.norm", config.hidden_size, config.rms_eps)

    @property
    @abstractmethod
    def attention_spec(self) -> AttentionSpec: ...

    def _make_layer(self, loader: WeightLoader, index: int) -> _Layer:
        attention = self.make_attention(loader, index, self._rope)
        return _Layer(loader, self.config, index, attention, self.make_feed_forward(loader, index))

    @abstractmethod
    def make_attention(self, loader: WeightLoader, layer: int, rope: Rope) -> AttentionLayer: ...

    @abstractmethod
    def make_feed_forward(self, loader: WeightLoader, layer: int) -> FeedForward: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
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
        hidden = self._vocab.embedding(token_ids)
        angles = self._rope.angles(positions)
        for layer in self._layers[:-1]:
            hidden = layer(hidden, angles, attention, None)
        return self._norm(self._layers[-1](hidden, angles, attention, rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [S, vocab] of hidden [S, hidden], the whole vocabulary on every rank."""
        return self._vocab.head(hidden)

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits` as computed, perhaps in 16 bits: what is largest can be told without widening
        them."""
        return self._vocab.head.raw(hidden)

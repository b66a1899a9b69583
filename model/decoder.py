"""The decoder of every architecture here: they differ only in attention and feed-forward."""

from abc import abstractmethod
from typing import Protocol

import torch

from attention.base import AttentionBackend
from model.base import CausalLM
from model.config import ModelConfig
from model.layers import RMSNorm, VocabShard, load_norm
from model.parallel import Parallel
from model.rope import Angles, Rope
from model.weights import WeightLoader


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


class Decoder(CausalLM):
    """Embedding, layers, final norm and head of one rank."""

    def __init__(self, config: ModelConfig, loader: WeightLoader, parallel: Parallel) -> None:
        super().__init__(config, parallel)
        self._rope = Rope(config.rope, dtype=loader.dtype, device=loader.device)
        self._vocab = VocabShard(loader, config, parallel)
        self._layers = [self._make_layer(loader, index) for index in range(config.num_layers)]
        self._norm = load_norm(loader, "model.norm", config.hidden_size, config.rms_eps)

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
        hidden = self._vocab.embedding(token_ids)
        angles = self._rope.angles(positions)
        for layer in self._layers[:-1]:
            hidden = layer(hidden, angles, attention, None)
        return self._norm(self._layers[-1](hidden, angles, attention, rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._vocab.head(hidden)

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._vocab.head.raw(hidden)

"""What the runner asks of a model, whatever its architecture."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from attention.base import AttentionBackend
from model.config import ModelConfig
from model.parallel import Parallel


class AttentionSpec(NamedTuple):
    """What an attention backend of this rank must be made for."""

    num_q_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    head_dim: int  # elements per head in the KV cache
    scale: float  # of the scores, before the softmax
    mla: bool  # the model calls forward_latent


class CausalLM(ABC):
    """One rank of a decoder. Inference only: the caller is in torch.inference_mode."""

    def __init__(self, config: ModelConfig, parallel: Parallel) -> None:
        self.config = config
        self.parallel = parallel

    @property
    @abstractmethod
    def attention_spec(self) -> AttentionSpec: ...

    @abstractmethod
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

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [S, vocab] of hidden [S, hidden], the whole vocabulary on every rank."""

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits` as computed, perhaps in 16 bits: what is largest can be told without widening
        them."""
        return self.logits(hidden)

"""Attention backends for one sequence: a reference without blocks, and the torch
backend.
"""

import numpy as np
import torch

from attention.base import AttentionBackend, AttentionBatch
from attention.registry import create_backend
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from model.attention_layers import AttentionSpec

BLOCK_SIZE = 16


class DenseAttention:
    """A reference AttentionBackend that stores plain keys and values of one sequence.

    Every call appends tokens to the sequence.
    """

    applies_rope = False

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rope_norm: None,
    ) -> torch.Tensor:
        keys = self._append(self._keys, layer, k)
        values = self._append(self._values, layer, v)
        return self._attend(layer, q, keys, values)

    def forward_latent(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
    ) -> torch.Tensor:
        keys = self._append(self._keys, layer, latent[:, None])
        q = torch.cat((q_latent, q_rope), dim=-1)
        return self._attend(layer, q, keys, keys[..., : q_latent.shape[-1]])

    @staticmethod
    def _append(
        store: dict[int, torch.Tensor], layer: int, new: torch.Tensor
    ) -> torch.Tensor:
        store[layer] = torch.cat((store[layer], new)) if layer in store else new.clone()
        return store[layer]

    def _attend(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        (window, soft_cap), sinks = self._spec.layers[layer]
        group = q.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1).transpose(0, 1)
        values = values.repeat_interleave(group, dim=1).transpose(0, 1)
        total = keys.shape[1]
        new = q.shape[0]
        scores = q.transpose(0, 1) @ keys.mT * self._spec.scale
        scores = (scores / soft_cap).tanh() * soft_cap if soft_cap else scores
        positions = torch.arange(total, device=q.device)
        distance = positions[total - new :, None] - positions
        is_hidden = (distance < 0) | (distance >= (window or total))
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat(
                (scores, sinks[:, None, None].expand(-1, new, 1)), dim=-1
            )
        return (scores.softmax(-1)[..., :total].to(q.dtype) @ values).transpose(0, 1)


def paged(model, num_tokens: int) -> AttentionBackend:
    """Returns the torch backend with a pool for one sequence of `num_tokens` tokens."""
    config = model.config
    spec = model.attention_spec
    layout = KVLayout(
        "BHLCND",
        1 + -(-num_tokens // BLOCK_SIZE),
        spec.num_kv_heads,
        config.num_layers,
        config.kv_components,
        BLOCK_SIZE,
        config.kv_dim,
        "float32",
    )
    heads = {"num_q_heads": spec.num_q_heads, "head_dim": config.kv_dim}
    return create_backend(
        "torch", KVPool(layout), **heads, scale=spec.scale, layers=spec.layers
    )


def greedy(
    model, prompt: list[int], num_tokens: int, chunk: int | None = None
) -> list[int]:
    """Generates greedily with `model` and the torch backend.

    The prompt is computed in chunks of `chunk` tokens, or at once if `chunk` is None.
    """
    ids = list(prompt)
    attention = paged(model, len(prompt) + num_tokens)
    table = np.arange(1, attention.pool.layout.num_blocks, dtype=np.int32)
    with torch.inference_mode():
        start = 0
        step = chunk or len(prompt)
        while len(ids) < len(prompt) + num_tokens:
            stop = min(start + step, len(ids))
            lens = (np.array([n], np.int32) for n in (stop - start, stop))
            slots = BLOCK_SIZE + np.arange(start, stop, dtype=np.int64)
            attention.plan(AttentionBatch(*lens, table[None], slots))
            hidden = model.forward(
                torch.tensor(ids[start:stop]), torch.arange(start, stop), attention
            )
            start = stop
            if start == len(ids):
                ids.append(int(model.logits(hidden[-1:]).argmax()))
    return ids[len(prompt) :]

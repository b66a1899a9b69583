"""A reference attention for one sequence: keeps plain K and V, no pool, no blocks."""

import torch
import torch.nn.functional as F

from model.attention_layers import AttentionSpec


class DenseAttention:
    """Stands in for an AttentionBackend; the sequence grows with every forward of layer 0."""

    rotates = False

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cos_sin: None
    ) -> torch.Tensor:
        keys = self._append(self._keys, layer, k)
        values = self._append(self._values, layer, v)
        return self._attend(q, keys, values)

    def forward_latent(
        self, layer: int, q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor
    ) -> torch.Tensor:
        keys = self._append(self._keys, layer, latent[:, None])
        q = torch.cat((q_latent, q_rope), dim=-1)
        return self._attend(q, keys, keys[..., : q_latent.shape[-1]])

    @staticmethod
    def _append(store: dict[int, torch.Tensor], layer: int, new: torch.Tensor) -> torch.Tensor:
        store[layer] = torch.cat((store[layer], new)) if layer in store else new.clone()
        return store[layer]

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
        total, new = keys.shape[1], q.shape[0]
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, attn_mask=mask, scale=self._spec.scale
        )
        return out.transpose(0, 1)


def greedy(model, prompt: list[int], num_tokens: int, chunk: int | None = None) -> list[int]:
    """Generates with `model` and a DenseAttention, the prompt in chunks of `chunk` tokens."""
    attention, ids = DenseAttention(model.attention_spec), list(prompt)
    with torch.inference_mode():
        start, step = 0, chunk or len(prompt)
        while len(ids) < len(prompt) + num_tokens:
            stop = min(start + step, len(ids))
            hidden = model.forward(
                torch.tensor(ids[start:stop]), torch.arange(start, stop), attention
            )
            start = stop
            if start == len(ids):
                ids.append(int(model.logits(hidden[-1:]).argmax()))
    return ids[len(prompt) :]

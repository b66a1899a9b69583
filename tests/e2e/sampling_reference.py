"""What a request draws, computed from transformers' logits: one forward pass per token, no cache.

Only the noise is the engine's own, because a reference draws the same token from the same noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.sampling.counter_rng import gumbel_of_vocabulary, row_keys
from tests.e2e.reference import Reference


@dataclass
class Drawn:
    """One choice. `logprobs` are float32 [vocab], before anything shaped them."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)

    @property
    def chosen(self) -> list[float]:
        return [float(row[i]) for row, i in zip(self.logprobs, self.ids, strict=True)]


def logits_of(reference: Reference, ids: Sequence[int]) -> torch.Tensor:
    """float32 [tokens, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = reference.model(torch.tensor([list(ids)])).logits[0]
    return logits


def draw(
    reference: Reference,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    choice: int = 0,
    stops: Sequence[int] = (),
    **members: Any,
) -> Drawn:
    """Draws up to `num_tokens`; one of `stops` ends the output, and is its last token."""
    drawn = Drawn()
    while len(drawn.ids) < num_tokens:
        row = logits_of(reference, [*prompt, *drawn.ids])[-1]
        drawn.logprobs.append(row.log_softmax(-1))
        shaped = shape(row.clone(), prompt, drawn.ids, stops, members)
        drawn.ids.append(_pick(shaped, choice, len(prompt) + len(drawn.ids), members))
        if drawn.ids[-1] in stops:
            break
    return drawn


def shape(
    row: torch.Tensor,
    prompt: Sequence[int],
    outputs: Sequence[int],
    stops: Sequence[int],
    members: Mapping[str, Any],
) -> torch.Tensor:
    """Bias, penalties and min_tokens as the API defines them, on logits float32 [vocab]."""
    for token_id, bias in members.get("logit_bias", {}).items():
        row[int(token_id)] += bias
    seen = sorted({*prompt, *outputs})
    penalty = members.get("repetition_penalty", 1.0)
    row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    for token_id in set(outputs):
        count = outputs.count(token_id)
        row[token_id] -= members.get("frequency_penalty", 0.0) * count
        row[token_id] -= members.get("presence_penalty", 0.0)
    if len(outputs) < members.get("min_tokens", 0):
        row[list(stops)] = -torch.inf
    return row


def _pick(row: torch.Tensor, choice: int, position: int, members: Mapping[str, Any]) -> int:
    temperature = members.get("temperature", 0)
    if temperature == 0:
        return int(row.argmax())
    counters = (torch.tensor([n]) for n in (members["seed"], choice, position))
    noise = gumbel_of_vocabulary(row_keys(*counters), len(row))[0]
    return int((row / temperature + noise).argmax())

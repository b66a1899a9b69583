"""Runs a target on a fixed prompt, and a drafter on its states."""

import torch
from torch import Tensor

from model.decoder import CausalLM, StateCapture
from model.drafters.draft_model import DraftModel
from tests.model.dense import DenseAttention

PROMPT = [5, 99, 3, 17, 64, 2, 130, 41, 41, 8, 77, 23, 105, 12, 3, 9, 58, 101, 6, 33]
NUM_PROPOSALS = 3


def captured_states(
    model: CausalLM, layers: tuple[int, ...], rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs the prompt. Returns the captured states, and the result of `forward`."""
    out = torch.zeros(len(PROMPT), len(layers) * model.config.hidden_size)
    hidden = model.forward(
        torch.tensor(PROMPT),
        torch.arange(len(PROMPT)),
        DenseAttention(model.attention_spec),
        rows,
        StateCapture(layers, out),
    )
    return out, hidden


def propose(draft: DraftModel, states: Tensor, first_token: int) -> list[Tensor]:
    """Proposes tokens after the prompt and `first_token`.

    Returns:
        The logits of all rows of the prompt, then the logits of each later row.
    """
    attention = DenseAttention(draft.attention_spec)
    token_ids = torch.tensor([*PROMPT[1:], first_token])
    positions = torch.arange(len(PROMPT))
    states = draft.forward(token_ids, states, positions, attention)
    logits = [draft.raw_logits(states)]
    for index in range(NUM_PROPOSALS - 1):
        positions = torch.tensor([len(PROMPT) + index])
        token_ids = logits[-1][-1:].argmax(-1)
        states = draft.forward(token_ids, states[-1:], positions, attention)
        logits.append(draft.raw_logits(states))
    return logits

"""Trained drafters propose most of the tokens that their target draws.

The test fails if a drafter reads states, tokens or positions that differ from those in
its training.
"""

import pytest
import torch
from torch import Tensor

from model.decoder import CausalLM, StateCapture
from model.drafters.draft_model import DraftModel
from tests.make_drafters import KINDS
from tests.model.dense import DenseAttention, greedy
from tests.rigs.state_drafts import load_pair

_PROMPT_TOKENS = 24
_NUM_TOKENS = 96
_NUM_PROPOSALS = 3
# Minimum shares of first, second and third proposals that equal the target's tokens. A
# proposal is counted only if all earlier proposals are equal. By chance, a share would
# be 1 / 512.
_MIN_RATES = (0.6, 0.4, 0.2)


def _states(target: CausalLM, draft: DraftModel, token_ids: list[int]) -> Tensor:
    capture = target.new_capture(draft.target_layers, len(token_ids))
    assert isinstance(capture, StateCapture)
    target.forward(
        torch.tensor(token_ids),
        torch.arange(len(token_ids)),
        DenseAttention(target.attention_spec),
        capture=capture,
    )
    return draft.combine(capture.out)


def _proposals(draft: DraftModel, states: Tensor, token_ids: list[int]) -> list[int]:
    """Proposes tokens after `token_ids`.

    Args:
        states: the states of all tokens except the last one.
    """
    attention = DenseAttention(draft.attention_spec)
    proposals: list[int] = []
    inputs = torch.tensor(token_ids[1:])
    positions = torch.arange(len(states))
    for _ in range(_NUM_PROPOSALS):
        states = draft.forward(inputs, states, positions, attention)
        proposals.append(int(draft.raw_logits(states[-1:]).argmax()))
        inputs = torch.tensor(proposals[-1:])
        positions = positions[-1:] + 1
        states = states[-1:]
    return proposals


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_most_proposals_equal_the_tokens_of_the_target(kind):
    target, draft = load_pair(kind)
    prompt = list(range(40, 40 + _PROMPT_TOKENS))
    token_ids = prompt + greedy(target, prompt, _NUM_TOKENS)
    states = _states(target, draft, token_ids)
    num_proposed = [0] * _NUM_PROPOSALS
    num_accepted = [0] * _NUM_PROPOSALS
    for stop in range(_PROMPT_TOKENS, len(token_ids) - _NUM_PROPOSALS):
        proposals = _proposals(draft, states[: stop - 1], token_ids[:stop])
        for index, token_id in enumerate(proposals):
            num_proposed[index] += 1
            if token_id != token_ids[stop + index]:
                break
            num_accepted[index] += 1
    rates = [a / n for a, n in zip(num_accepted, num_proposed, strict=True)]
    assert all(
        rate >= minimum for rate, minimum in zip(rates, _MIN_RATES, strict=True)
    ), rates

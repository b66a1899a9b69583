"""Engines with a tiny trained model draw the tokens that transformers' logits imply.

The tests check drawn tokens under bias, penalties and min_tokens, and the logprobs of
outputs and prompts, for each choice.

A P/D pair uses P's signed reference and an in-memory transfer. All engines run in this
process.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch
from protocol.messages import AddRequest, SamplingParams, TokenLogprobs
from tests.make_models import ensure_model
from tests.rigs.engine_pair import RealPair
from tests.rigs.shadow import MemoryTransport, add

PROMPT = [40, 77, 130, 5, 9, 33, 77, 130, 41, 60, 12, 200, 3, 77]


class Reference:
    """A reference: logits of transformers in float32, shaped by the definitions of the
    sampling options.
    """

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits of all tokens: float32 [tokens, V]."""
        logits: torch.Tensor = (
            self._model(torch.tensor([list(token_ids)])).logits[0].float()
        )
        return logits

    def shaped_logits(self, request: AddRequest, token_ids: list[int]) -> torch.Tensor:
        """Returns the logits from which the next token is drawn: float32 [V]."""
        sampling = request.sampling
        num_prompt = len(request.token_ids)
        logits = self.logits(token_ids)[-1:].clone()
        for token, bias in sampling.logit_bias.items():
            logits[0, token] += bias
        if sampling.repetition_penalty != 1:
            process = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            logits = process(torch.tensor([token_ids]), logits)
        outputs = torch.tensor(token_ids[num_prompt:], dtype=torch.int64)
        counts = torch.bincount(outputs, minlength=logits.shape[1])
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (
            counts > 0
        )
        if len(outputs) < sampling.min_tokens:
            logits[0, request.stop_token_ids] = float("-inf")
        return logits[0]

    def check_choice(
        self,
        request: AddRequest,
        choice: int,
        tokens: list[int],
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Checks the logprobs. Checks also that the noise of each position draws the
        position's token from the shaped logits."""
        context = list(request.token_ids)
        params = msgspec.structs.replace(
            request.sampling, choice_index=choice, num_logprobs=None, logit_bias={}
        )
        for token, report in zip(tokens, logprobs, strict=True):
            batch = SamplingBatch.from_params([params], [len(context)])
            shaped_logits = self.shaped_logits(request, context)
            assert token == sample(shaped_logits[None], batch).token_ids.item()
            self._check_logprobs(report, self.logits(context)[-1], token)
            context.append(token)

    def check_prompt(
        self, request: AddRequest, rows: Sequence[TokenLogprobs | None]
    ) -> None:
        logits = self.logits(request.token_ids)
        assert len(rows) == len(request.token_ids) and rows[0] is None
        for i, row in enumerate(rows[1:]):
            assert row is not None
            self._check_logprobs(row, logits[i], request.token_ids[i + 1])

    @staticmethod
    def _check_logprobs(
        report: TokenLogprobs, logits: torch.Tensor, token: int
    ) -> None:
        expected = logits.log_softmax(-1)
        assert report.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        # Logits within 1e-4 of the token's logit may rank before or after it.
        num_larger = (expected > expected[token] + 1e-4).sum()
        num_not_smaller = (expected > expected[token] - 1e-4).sum()
        assert num_larger < report.rank <= num_not_smaller
        top = torch.tensor(report.top_logprobs)
        torch.testing.assert_close(top, expected[report.top_ids], atol=1e-4, rtol=0)
        torch.testing.assert_close(
            top, expected.topk(len(top)).values, atol=1e-4, rtol=0
        )


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(ensure_model("gqa"))


@pytest.fixture(scope="module")
def pair() -> Iterator[RealPair]:
    with RealPair(ensure_model("gqa"), p_block_size=8, block_size=4) as pair:
        yield pair
        assert pair.p.core.is_idle and pair.d.core.is_idle


Complete = Callable[[RealPair, AddRequest], MemoryTransport]
_COMPLETE_METHODS = [RealPair.decode_only, RealPair.prefill_and_decode]


def _request(num_choices: int = 1, max_tokens: int = 12, **fields: Any) -> AddRequest:
    names = SamplingParams.__struct_fields__
    sampling = {name: fields.pop(name) for name in names if name in fields}
    params = SamplingParams(
        **{"temperature": 0.0, "num_logprobs": 3, "seed": 11, **sampling}
    )
    prompt = fields.pop("prompt", PROMPT)
    return add("r", prompt, max_tokens, params, num_choices=num_choices, **fields)


REQUESTS = {
    "greedy": _request(),
    "bias": _request(logit_bias={77: 6.0, 130: -100.0, 9: 4.5}),
    "presence": _request(presence_penalty=1.5),
    "frequency": _request(frequency_penalty=1.2),
    "negative": _request(frequency_penalty=-1.0, presence_penalty=-0.5),
    "repetition": _request(repetition_penalty=1.4),
    "everything": _request(
        num_choices=3,
        temperature=1.3,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={5: 2.0},
        num_prompt_logprobs=2,
    ),
    "choices": _request(num_choices=4, temperature=1.0),
    "scores": _request(num_prompt_logprobs=4, max_tokens=3),
}


@pytest.mark.parametrize("complete", _COMPLETE_METHODS)
@pytest.mark.parametrize("name", REQUESTS)
def test_output_follows_the_definitions_applied_to_transformers_logits(
    reference, pair, complete, name
):
    request = REQUESTS[name]
    out = complete(pair, request)
    for choice in range(request.num_choices):
        tokens = out.tokens("r", choice)
        assert len(tokens) == request.max_tokens
        logprobs = [
            row
            for delta in out.deltas
            if delta.choice == choice
            for row in (delta.logprobs or [])
        ]
        reference.check_choice(request, choice, tokens, logprobs)
    if request.num_prompt_logprobs is not None:
        reference.check_prompt(request, out.prompt_logprobs("r"))


@pytest.mark.parametrize("complete", _COMPLETE_METHODS)
@pytest.mark.parametrize("min_tokens", [0, 1, 5])
def test_min_tokens_ban_stop_tokens(reference, pair, complete, min_tokens):
    unbanned = complete(pair, _request()).tokens("r")
    request = _request(min_tokens=min_tokens, stop_token_ids=[unbanned[0], unbanned[2]])
    out = complete(pair, request)
    tokens = out.tokens("r")
    reference.check_choice(
        request,
        0,
        tokens,
        [row for delta in out.deltas for row in (delta.logprobs or [])],
    )
    assert not set(tokens[:min_tokens]) & set(request.stop_token_ids)
    assert len(tokens) > min_tokens or tokens[-1] in request.stop_token_ids


@pytest.mark.parametrize("length", [1, 2, 130, 300])
def test_prompt_is_scored_in_several_chunks(reference, pair, length):
    prompt = [(37 * i * i + 11) % 500 for i in range(length)]
    request = _request(prompt=prompt, max_tokens=0, num_prompt_logprobs=1)
    reference.check_prompt(request, pair.decode_only(request).prompt_logprobs("r"))

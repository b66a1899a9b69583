"""The sampling digest covers everything that the first token depends on.

The tests draw first tokens from random logits as an engine does, with RowAllocator,
LogitShaper, grammar masks and the sampler.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.logits_processing import LogitShaper, RowAllocator
from engine.core.sequence import Phase, Sequence
from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch
from engine.text.grammar import GrammarCompiler
from protocol.kv_params import sampling_digest
from protocol.messages import Grammar, SamplingParams
from tests.rigs.examples import examples
from tests.rigs.shadow import add, masks_of

_VOCAB = 512
_ROWS = 24
_PROMPT = [5, 300, 7]
_END = 2  # the end-of-sequence token of the test models
_SCALES = torch.linspace(0.5, 6.0, _ROWS)[:, None]
_LOGITS = _SCALES * torch.randn(
    _ROWS, _VOCAB, generator=torch.Generator().manual_seed(3)
)
# Makes these tokens likely, so that bans, penalties and biases of them change draws.
_LOGITS[:, [_END, 5, 9]] += 2 * _SCALES
_LOGITS[:, 4] -= 3 * _SCALES.squeeze(1)
_OPTIONS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 0.7 + 1e-12, 1.5],
    "top_p": [1.0, 0.6],
    "top_k": [0, 3],
    "min_p": [0.0, 0.2],
    "presence_penalty": [0.0, 1.5],
    "frequency_penalty": [0.0, -1.5],
    "repetition_penalty": [1.0, 3.0],
    "logit_bias": [{}, {9: 0.0}, {9: -50.0}, {9: -50.0, 4: 1.0}],
    "min_tokens": [0, 1, 4],
    "grammar": [None, Grammar("regex", "[a-z0-9]*"), Grammar("regex", "[A-Z]+")],
    "num_logprobs": [None, 2],
}
_STOPS = [[], [_END], [_END, _END, 9], [9, _END]]
_params = st.fixed_dictionaries(
    {name: st.sampled_from(values) for name, values in _OPTIONS.items()}
)


def _first_tokens(
    compiler: GrammarCompiler,
    params: dict[str, Any],
    stop: list[int],
    max_tokens: int = 9,
) -> list[int]:
    """Returns a token drawn from each row of logits. Each row has its own seed."""
    rows = []
    for seed in range(_ROWS):
        sampling = SamplingParams(seed=seed, **params)
        request = add(str(seed), _PROMPT, max_tokens, sampling, stop_token_ids=stop)
        row = Sequence.from_request(request)
        row.phase = Phase.RUNNING
        if request.sampling.grammar is not None:
            row.sampling.grammar = compiler.new_state(request)
        rows.append(row)
    positions = [len(_PROMPT)] * _ROWS
    shaper = LogitShaper(_VOCAB, len(rows))
    shaping = shaper.prepare(RowAllocator().plan(rows, positions))
    if params["grammar"] is not None:
        masks = masks_of(compiler, [row.sampling.grammar for row in rows])
        shaping = shaper.masked(shaping, np.ascontiguousarray(masks))
    batch = SamplingBatch.from_params([row.sampling.params for row in rows], positions)
    tokens: list[int] = sample(_LOGITS.clone(), batch, shaping).token_ids.tolist()
    return tokens


def _digest(params: dict[str, Any], stop: list[int]) -> str:
    return sampling_digest(SamplingParams(**params), stop)


@given(
    params=_params,
    changed=_params,
    stops=st.tuples(*[st.sampled_from(_STOPS)] * 2),
    data=st.data(),
)
@examples(150)
def test_property_equal_digests_mean_equal_first_tokens(
    compiler, params, changed, stops, data
):
    names = data.draw(st.sets(st.sampled_from(sorted(params)), max_size=3))
    other_params = {**params, **{name: changed[name] for name in names}}
    if _digest(params, stops[0]) == _digest(other_params, stops[1]):
        drawn = _first_tokens(compiler, params, stops[0], max_tokens=1)
        assert drawn == _first_tokens(compiler, other_params, stops[1])


_PLAIN = {name: values[0] for name, values in _OPTIONS.items()}
_WARM = {**_PLAIN, "temperature": 1.5}
_LETTERS = {**_WARM, "grammar": Grammar("regex", "[a-z0-9]*")}
_ENDS = ([_END], [_END])
_BANNED = {**_PLAIN, "min_tokens": 1}
_Pairs = dict[str, tuple[dict[str, Any], dict[str, Any], tuple[list[int], list[int]]]]
_CHANGES: _Pairs = {
    "temperature": (_PLAIN, _WARM, _ENDS),
    "another temperature": (_WARM, {**_WARM, "temperature": 0.7}, _ENDS),
    "top_p": (_WARM, {**_WARM, "top_p": 0.6}, _ENDS),
    "top_k": (_WARM, {**_WARM, "top_k": 3}, _ENDS),
    "min_p": (_WARM, {**_WARM, "min_p": 0.2}, _ENDS),
    "repetition_penalty": (_PLAIN, {**_PLAIN, "repetition_penalty": 3.0}, _ENDS),
    "logit_bias": (_PLAIN, {**_PLAIN, "logit_bias": {9: -50.0}}, _ENDS),
    "min_tokens, as some routers set it": (_PLAIN, _BANNED, _ENDS),
    "stop tokens that min_tokens bans": (_BANNED, _BANNED, ([_END], [_END, 9])),
    "stop tokens that a grammar allows": (_LETTERS, _LETTERS, ([_END], [])),
    "grammar": (_PLAIN, {**_PLAIN, "grammar": Grammar("regex", "[A-Z]+")}, _ENDS),
    "a grammar's text": (
        _LETTERS,
        {**_LETTERS, "grammar": Grammar("regex", "[A-Z]+")},
        _ENDS,
    ),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_fields_that_change_the_first_token_change_the_digest(compiler, name):
    params, other_params, stops = _CHANGES[name]
    drawn = [
        _first_tokens(compiler, params, stops[0]),
        _first_tokens(compiler, other_params, stops[1]),
    ]
    assert drawn[0] != drawn[1]
    assert _digest(params, stops[0]) != _digest(other_params, stops[1])


_LIMITED = {**_PLAIN, "top_p": 0.6, "top_k": 3, "min_p": 0.2}
_OUTPUT_PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": -1.5}
_NEUTRAL: _Pairs = {
    "limits of the distribution, if the draw is greedy": (_PLAIN, _LIMITED, _ENDS),
    "penalties on outputs": (_PLAIN, {**_PLAIN, **_OUTPUT_PENALTIES}, _ENDS),
    "a bias of 0": (_PLAIN, {**_PLAIN, "logit_bias": {9: 0.0}}, _ENDS),
    "the number of tokens for which stop tokens are banned": (
        _BANNED,
        {**_PLAIN, "min_tokens": 4},
        _ENDS,
    ),
    "min_tokens without stop tokens": (_PLAIN, _BANNED, ([], [])),
    "stop tokens that nothing bans": (_PLAIN, _PLAIN, ([_END], [9])),
    "stop tokens in another order": (_BANNED, _BANNED, ([_END, 9, 9], [9, _END])),
    "a number that another language has rounded": (
        _WARM,
        {**_WARM, "temperature": 1.5 + 1e-12},
        _ENDS,
    ),
    "logprobs": (_PLAIN, {**_PLAIN, "num_logprobs": 2}, _ENDS),
}


@pytest.mark.parametrize("name", _NEUTRAL)
def test_fields_that_cannot_change_the_first_token_keep_the_digest(name):
    params, other_params, stops = _NEUTRAL[name]
    assert _digest(params, stops[0]) == _digest(
        {**other_params, "seed": 5, "choice_index": 1}, stops[1]
    )

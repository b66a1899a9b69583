"""The law of this project: through prefill and decode, or not, the tokens are the same.

Prompts of every awkward length, greedy and sampled, in float32: P/D equals the decode server alone
equals transformers' generate. That each draws as it says, and tells the right logprobs,
tests/engine/test_against_transformers.py holds against transformers' logits.
"""

from typing import Any

import pytest

from tests.rigs.client import (
    TIMEOUT_S,
    answer_of,
    complete,
    complete_all,
    make_prompt,
    parse_kv,
    stream,
    streamed_token_ids,
)
from tests.rigs.plain_http import http

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_BLOCK = 64
_LENGTHS = [
    1,
    2,
    17,
    _BLOCK - 1,
    _BLOCK,
    _BLOCK + 1,
    2 * _BLOCK,
    129,
    300,
    511,
    512,
    513,
    700,
]
_SHAPED: dict[str, Any] = {
    "temperature": 1.2, "presence_penalty": 0.7, "frequency_penalty": 0.5,
    "repetition_penalty": 1.3, "logit_bias": {"60": 2.5},
}  # fmt: skip


@pytest.mark.parametrize("length", [*_LENGTHS, 1500])
def test_greedy_equals_decode_alone_and_transformers(
    tiny_cluster, tiny_reference, length
):
    prompt = make_prompt(length, length)
    expected = tiny_reference.generate(prompt, 12)
    through = complete(tiny_cluster.url, prompt, 12)
    alone = complete(tiny_cluster.decode[0].url, make_prompt(length, length), 12)
    assert through.token_ids == expected
    assert alone.token_ids == expected
    assert through.kv == {"transferred": length, "recomputed": 0, "skipped": 0}
    assert through.usage["prompt_tokens"] == length
    assert through.usage["completion_tokens"] == 12


def test_the_same_prompt_twice_skips_what_the_decode_server_holds(
    tiny_cluster, tiny_reference
):
    prompt = make_prompt(1000, 200)
    first = complete(tiny_cluster.url, prompt, 5)
    second = complete(tiny_cluster.url, prompt, 5)
    assert first.token_ids == second.token_ids == tiny_reference.generate(prompt, 5)
    assert second.kv == {"transferred": 200 - 192, "recomputed": 0, "skipped": 192}
    assert first.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.usage["prompt_tokens_details"]["cached_tokens"] == 192


def test_many_at_once_with_shared_prefixes(tiny_cluster, tiny_reference):
    shared = make_prompt(7, 150)
    prompts = [shared + make_prompt(seed, 1 + 13 * seed) for seed in range(8)]
    prompts += [shared, shared, make_prompt(99, 40)]
    answers = complete_all(tiny_cluster.url, prompts, 10)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == tiny_reference.generate(prompt, 10)
        assert sum(answer.kv.values()) == len(prompt)
        assert answer.kv["recomputed"] == 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95, "top_k": 50},
        _SHAPED,
    ],
)
def test_sampling_with_a_seed_equals_decode_alone(tiny_cluster, sampling):
    prompts = [make_prompt(seed, 30 + 50 * seed) for seed in range(4)]
    seeds = [-(2**63), -1, 2**63 - 2, 2**63 - 1]
    for seed, prompt in zip(seeds, prompts, strict=True):
        through = complete(tiny_cluster.url, prompt, 20, seed=seed, **sampling)
        alone = complete(tiny_cluster.decode[0].url, prompt, 20, seed=seed, **sampling)
        assert through.token_ids == alone.token_ids
    last = {"seed": 2**63 - 1, **sampling}
    batched = complete_all(tiny_cluster.url, prompts, 20, **last)
    streamed = streamed_token_ids(stream(tiny_cluster.url, prompts[3], 20, **last))
    assert batched[3].token_ids == streamed == through.token_ids


def test_a_prompt_that_is_cut_is_cut_alike_by_both_servers(
    tiny_cluster, tiny_reference
):
    context = http.get(f"{tiny_cluster.url}/v1/models").json()["data"][0][
        "max_model_len"
    ]
    prompt = make_prompt(5, context + 100)
    for limit, kept in ((200, 200), (-1, context - 8)):
        expected = tiny_reference.generate(prompt[-kept:], 8)
        cut = complete(tiny_cluster.url, prompt, 8, truncate_prompt_tokens=limit)
        assert cut.token_ids == expected
        assert cut.usage["prompt_tokens"] == kept == sum(cut.kv.values())
        assert cut.kv["recomputed"] == 0 < cut.kv["transferred"]
        alone = complete(
            tiny_cluster.decode[0].url, prompt, 8, truncate_prompt_tokens=limit
        )
        assert alone.token_ids == expected


def test_a_conversation_that_is_cut_is_cut_alike_by_both_servers(tiny_cluster):
    """Its KV is of use to the decode server, so both have dropped the same messages."""
    turn = {
        "role": "user",
        "content": "Ida painted the wooden boat near the old river. " * 4,
    }
    # The answer's limit is longer than a turn, so that another limit drops other turns.
    body = {
        "input": [turn] * 100,
        "max_output_tokens": 64,
        "temperature": 0,
        "truncation": "auto",
    }
    body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answers = [
        http.post(f"{url}/v1/responses", json=body, timeout=TIMEOUT_S)
        for url in (tiny_cluster.url, tiny_cluster.decode[0].url)
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    through, alone = (answer.json() for answer in answers)
    (said,), (same,) = (answer["output"][0]["content"] for answer in (through, alone))
    assert said["text"] == same["text"]
    tokens, same_tokens = (
        [one["token"] for one in part["logprobs"]] for part in (said, same)
    )
    assert tokens == same_tokens and len(tokens) == through["usage"]["output_tokens"]
    assert through["usage"]["input_tokens"] == alone["usage"]["input_tokens"] > 100
    kv = parse_kv(answers[0].headers["x-baton-kv"])
    assert kv["recomputed"] == 0 < kv["transferred"]


_ASKED = {
    "prompt": "Ida painted the wooden boat near the old river. Then",
    "seed": 2**63 - 1,
}
_ASKED["ignore_eos"] = True


def test_each_choice_is_drawn_by_its_own_noise_and_the_best_are_the_likeliest(
    tiny_cluster,
):
    body = {
        "max_tokens": 10,
        "return_token_ids": True,
        "logprobs": 0,
        **_ASKED,
        **_SHAPED,
    }
    told = []
    for url in (tiny_cluster.url, tiny_cluster.decode[0].url):
        answer = answer_of(url, n=4, **body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        told.append([choice["token_ids"] for choice in choices])
        assert len({tuple(ids) for ids in told[-1]}) > 1
        assert answer["usage"]["completion_tokens"] == 40
        # Of equal lengths: sums rank as means do.
        choices.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        best = answer_of(url, n=2, best_of=4, **body)["choices"]
        assert [one["token_ids"] for one in best] == [
            one["token_ids"] for one in choices[:2]
        ]
    assert told[0] == told[1]


def test_a_stop_string_ends_one_choice_and_not_the_others(tiny_cluster):
    asked = {"n": 4, "max_tokens": 24, "temperature": 1.2, **_ASKED}
    whole = answer_of(tiny_cluster.url, **asked)["choices"]
    stop = whole[2]["text"][5:9]
    for server in tiny_cluster.servers():
        cut = answer_of(server.url, stop=stop, **asked)["choices"]
        for before, after in zip(whole, cut, strict=True):
            assert after["text"] == before["text"].partition(stop)[0]
            assert after["finish_reason"] == (
                "stop" if stop in before["text"] else "length"
            )

"""A cluster generates the same tokens as a single server and as transformers.

Prompts have edge-case lengths. Generation is greedy or sampled, in float32.
tests/engine/test_against_transformers.py compares sampling and logprobs with the logits
of transformers.
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
_LENGTHS = [1, 2, 17, _BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK]
_LENGTHS += [129, 300, 511, 512, 513, 700]
_PENALTIES: dict[str, Any] = {
    "temperature": 1.2,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.3,
    "logit_bias": {"60": 2.5},
}


@pytest.mark.parametrize("length", [*_LENGTHS, 1500])
def test_greedy_equals_a_single_decode_server_and_transformers(
    tiny_cluster, tiny_reference, length
):
    prompt = make_prompt(length, length)
    expected = tiny_reference.generate(prompt, 12)
    proxied = complete(tiny_cluster.url, prompt, 12)
    decode_only = complete(tiny_cluster.decode[0].url, make_prompt(length, length), 12)
    assert proxied.token_ids == expected
    assert decode_only.token_ids == expected
    assert proxied.kv == {"transferred": length, "recomputed": 0, "skipped": 0}
    assert proxied.usage["prompt_tokens"] == length
    assert proxied.usage["completion_tokens"] == 12


def test_repeated_prompt_skips_kv_that_the_decode_server_has(
    tiny_cluster, tiny_reference
):
    prompt = make_prompt(1000, 200)
    first = complete(tiny_cluster.url, prompt, 5)
    second = complete(tiny_cluster.url, prompt, 5)
    assert first.token_ids == second.token_ids == tiny_reference.generate(prompt, 5)
    assert second.kv == {"transferred": 200 - 192, "recomputed": 0, "skipped": 192}
    assert first.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.usage["prompt_tokens_details"]["cached_tokens"] == 192


def test_concurrent_prompts_with_shared_prefixes(tiny_cluster, tiny_reference):
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
        _PENALTIES,
    ],
)
def test_sampling_with_a_seed_equals_a_single_decode_server(tiny_cluster, sampling):
    prompts = [make_prompt(seed, 30 + 50 * seed) for seed in range(4)]
    seeds = [-(2**63), -1, 2**63 - 2, 2**63 - 1]
    for seed, prompt in zip(seeds, prompts, strict=True):
        proxied = complete(tiny_cluster.url, prompt, 20, seed=seed, **sampling)
        decode_only = complete(
            tiny_cluster.decode[0].url, prompt, 20, seed=seed, **sampling
        )
        assert proxied.token_ids == decode_only.token_ids
    last = {"seed": 2**63 - 1, **sampling}
    batched = complete_all(tiny_cluster.url, prompts, 20, **last)
    streamed = streamed_token_ids(stream(tiny_cluster.url, prompts[3], 20, **last))
    assert batched[3].token_ids == streamed == proxied.token_ids


def test_both_servers_truncate_a_prompt_alike(tiny_cluster, tiny_reference):
    models = http.get(f"{tiny_cluster.url}/v1/models").json()["data"]
    context = models[0]["max_model_len"]
    prompt = make_prompt(5, context + 100)
    for limit, length in ((200, 200), (-1, context - 8)):
        expected = tiny_reference.generate(prompt[-length:], 8)
        shortened = complete(tiny_cluster.url, prompt, 8, truncate_prompt_tokens=limit)
        assert shortened.token_ids == expected
        assert shortened.usage["prompt_tokens"] == length == sum(shortened.kv.values())
        assert shortened.kv["recomputed"] == 0 < shortened.kv["transferred"]
        decode_only = complete(
            tiny_cluster.decode[0].url, prompt, 8, truncate_prompt_tokens=limit
        )
        assert decode_only.token_ids == expected


def test_both_servers_truncate_a_conversation_alike(tiny_cluster):
    """The decode server could not use all of the prefill server's KV if the two had
    dropped different messages.
    """
    turn = {
        "role": "user",
        "content": "Ida painted the wooden boat near the old river. " * 4,
    }
    # The output limit is longer than a turn. So a server that used a different limit
    # would drop different turns.
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
    proxied, decode_only = (answer.json() for answer in answers)
    (proxied_part,) = proxied["output"][0]["content"]
    (decode_part,) = decode_only["output"][0]["content"]
    assert proxied_part["text"] == decode_part["text"]
    proxied_tokens = [entry["token"] for entry in proxied_part["logprobs"]]
    decode_tokens = [entry["token"] for entry in decode_part["logprobs"]]
    assert proxied_tokens == decode_tokens
    assert len(proxied_tokens) == proxied["usage"]["output_tokens"]
    assert (
        proxied["usage"]["input_tokens"] == decode_only["usage"]["input_tokens"] > 100
    )
    kv = parse_kv(answers[0].headers["x-baton-kv"])
    assert kv["recomputed"] == 0 < kv["transferred"]


_REQUEST: dict[str, Any] = {
    "prompt": "Ida painted the wooden boat near the old river. Then",
    "seed": 2**63 - 1,
    "ignore_eos": True,
}


def test_choices_differ_and_best_of_returns_the_likeliest(tiny_cluster):
    body = {
        "max_tokens": 10,
        "return_token_ids": True,
        "logprobs": 0,
        **_REQUEST,
        **_PENALTIES,
    }
    token_ids = []
    for url in (tiny_cluster.url, tiny_cluster.decode[0].url):
        answer = answer_of(url, n=4, **body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        token_ids.append([choice["token_ids"] for choice in choices])
        assert len({tuple(ids) for ids in token_ids[-1]}) > 1
        assert answer["usage"]["completion_tokens"] == 40
        # All choices have the same length, so the order by sum is also the order by
        # mean logprob.
        choices.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        best = answer_of(url, n=2, best_of=4, **body)["choices"]
        assert [one["token_ids"] for one in best] == [
            one["token_ids"] for one in choices[:2]
        ]
    assert token_ids[0] == token_ids[1]


def test_stop_string_ends_only_its_choice(tiny_cluster):
    request_fields = {"n": 4, "max_tokens": 24, "temperature": 1.2, **_REQUEST}
    full_choices = answer_of(tiny_cluster.url, **request_fields)["choices"]
    stop = full_choices[2]["text"][5:9]
    for server in tiny_cluster.servers():
        shortened = answer_of(server.url, stop=stop, **request_fields)["choices"]
        for before, after in zip(full_choices, shortened, strict=True):
            assert after["text"] == before["text"].partition(stop)[0]
            assert after["finish_reason"] == (
                "stop" if stop in before["text"] else "length"
            )

"""The law of this project: through prefill and decode, or not, the tokens are the same.

Prompts of every awkward length, greedy and sampled, in float32: P/D equals the decode server alone
equals transformers' generate.
"""

import pytest

from tests.rigs.client import complete, complete_all, make_prompt

_BLOCK = 64
_LENGTHS = [1, 2, 17, _BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK, 129, 300, 511, 512, 513, 700]


@pytest.mark.parametrize("length", [*_LENGTHS, 1500])
def test_greedy_equals_decode_alone_and_transformers(tiny_cluster, tiny_reference, length):
    prompt = make_prompt(length, length)
    expected = tiny_reference.generate(prompt, 12)
    through = complete(tiny_cluster.url, prompt, 12)
    alone = complete(tiny_cluster.decode[0].url, make_prompt(length, length), 12)
    assert through.token_ids == expected
    assert alone.token_ids == expected
    assert through.kv == {"transferred": length, "recomputed": 0, "skipped": 0}
    assert through.usage["prompt_tokens"] == length
    assert through.usage["completion_tokens"] == 12


def test_the_same_prompt_twice_skips_what_the_decode_server_holds(tiny_cluster, tiny_reference):
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
    ],
)
def test_sampling_with_a_seed_equals_decode_alone(tiny_cluster, sampling):
    prompts = [make_prompt(seed, 30 + 50 * seed) for seed in range(4)]
    for seed, prompt in enumerate(prompts):
        through = complete(tiny_cluster.url, prompt, 20, seed=seed, **sampling)
        alone = complete(tiny_cluster.decode[0].url, prompt, 20, seed=seed, **sampling)
        assert through.token_ids == alone.token_ids
    batched = complete_all(tiny_cluster.url, prompts, 20, seed=3, **sampling)
    assert batched[3].token_ids == through.token_ids

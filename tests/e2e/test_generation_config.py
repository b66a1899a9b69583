"""Both servers use the sampling values of a model's generation_config.json."""

import json
from typing import Any

import pytest

from tests.rigs.client import Answer, answer_of, complete, make_prompt
from tests.rigs.cluster import cluster

VALUES = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.1}
MESSAGES = [{"role": "user", "content": "Tell a story about Anna and the red ball."}]


@pytest.mark.slow
def test_suggested_values_apply_in_a_cluster_and_on_one_server(tiny_model, tmp_path):
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    config = {"eos_token_id": 2, "max_new_tokens": 20, **VALUES}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with cluster(tmp_path) as running:
        cluster_url = running.url
        decode_url = running.decode[0].url
        for seed in range(3):
            prompt = make_prompt(seed, 40 + seed)
            suggested = _draw(cluster_url, prompt, seed)
            # The KV is used only if P drew the same first token, with the same values.
            assert suggested.kv["transferred"] == len(prompt)
            assert len(suggested.token_ids) == 20
            decode_only = _draw(decode_url, prompt, seed)
            assert suggested.token_ids == decode_only.token_ids
            explicit = _draw(cluster_url, prompt, seed, **VALUES)
            assert suggested.token_ids == explicit.token_ids
            hotter = _draw(cluster_url, prompt, seed, temperature=2)
            assert suggested.token_ids != hotter.token_ids
            chat = _chat(cluster_url, seed)
            assert chat == _chat(decode_url, seed)
            assert chat == _chat(cluster_url, seed, **VALUES)


def _draw(url: str, prompt: list[int], seed: int, **members: Any) -> Answer:
    """Return a completion. `max_tokens` and `temperature` are only set if `members`
    have them.
    """
    defaults = {"max_tokens": None, "temperature": None}
    return complete(url, prompt, **{**defaults, "seed": seed, **members})


def _chat(url: str, seed: int, **members: Any) -> str:
    answer = answer_of(
        url, "/v1/chat/completions", messages=MESSAGES, seed=seed, **members
    )
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.slow
def test_server_starts_with_an_end_token_beyond_the_vocabulary(tiny_model, tmp_path):
    """The file has an end token beyond the vocabulary, and values that a server would
    refuse in a request. Neither prevents the start.

    Masks of end tokens and grammars still work.
    """
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    values = {"eos_token_id": [2, 100_000, -1], "temperature": 3, "top_p": 1.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with cluster(tmp_path) as running:
        prompt = make_prompt(1, 40)
        drawn = _draw(
            running.url, prompt, 1, max_tokens=8, min_tokens=4, ignore_eos=False
        )
        assert len(drawn.token_ids) >= 4
        digits = _draw(running.url, prompt, 1, max_tokens=8, guided_regex="[0-9]{3}")
        assert digits.text.isdigit()

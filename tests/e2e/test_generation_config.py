"""The sampling values of a model's generation_config.json are the same for both servers."""

import json
from typing import Any

import pytest

from tests.rigs.client import Answer, answer_of, complete, make_prompt
from tests.rigs.cluster import cluster

VALUES = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.1}
MESSAGES = [{"role": "user", "content": "Tell a story about Anna and the red ball."}]


@pytest.mark.slow
def test_what_a_model_suggests_is_drawn_from_through_both_servers_and_alone(
    tiny_model, tmp_path
):
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    suggested = {"eos_token_id": 2, "max_new_tokens": 20, **VALUES}
    (tmp_path / "generation_config.json").write_text(json.dumps(suggested))
    with cluster(tmp_path) as running:
        through, alone = running.url, running.decode[0].url
        for seed in range(3):
            prompt = make_prompt(seed, 40 + seed)
            unsaid = _draw(through, prompt, seed)
            assert unsaid.kv["transferred"] == len(
                prompt
            )  # P drew the first token alike
            assert len(unsaid.token_ids) == 20
            assert unsaid.token_ids == _draw(alone, prompt, seed).token_ids
            said = _draw(through, prompt, seed, **VALUES)
            assert unsaid.token_ids == said.token_ids
            assert (
                unsaid.token_ids
                != _draw(through, prompt, seed, temperature=2).token_ids
            )
            assert (
                _chat(through, seed)
                == _chat(alone, seed)
                == _chat(through, seed, **VALUES)
            )


def _draw(url: str, prompt: list[int], seed: int, **members: Any) -> Answer:
    unsaid = {"max_tokens": None, "temperature": None}
    return complete(url, prompt, **{**unsaid, "seed": seed, **members})


def _chat(url: str, seed: int, **members: Any) -> str:
    answer = answer_of(
        url, "/v1/chat/completions", messages=MESSAGES, seed=seed, **members
    )
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.slow
def test_an_end_token_beyond_the_vocabulary_ends_no_start(tiny_model, tmp_path):
    """Nor do values that no request may have. Masks of end tokens and grammars are made as ever."""
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

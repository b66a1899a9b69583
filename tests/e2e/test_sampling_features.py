"""Features of sampling over HTTP: through P/D as by D alone.

That each draws as it says, and tells the right logprobs, tests/engine/test_against_transformers.py
holds against transformers' logits; the shapes of answers are tests/engine/test_http_answers.py's.
"""

from typing import Any

import pytest

from tests.rigs.client import answer_of, complete, stream, streamed_token_ids
from tests.rigs.cluster import Cluster

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_PROMPT = "Ida painted the wooden boat near the old river. Then"
_DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 2**63 - 1, "ignore_eos": True}
_SHAPED: dict[str, Any] = {
    **_DRAWN,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.3,
    "logit_bias": {"60": 2.5},
}


@pytest.fixture
def urls(tiny_cluster: Cluster) -> list[str]:
    """The proxy, and the decode server alone."""
    return [tiny_cluster.url, tiny_cluster.decode[0].url]


def test_all_features_at_once_are_those_of_the_decode_server_alone(urls):
    answers = [complete(url, _PROMPT, 24, **_SHAPED).token_ids for url in urls]
    answers += [streamed_token_ids(stream(url, _PROMPT, 24, **_SHAPED)) for url in urls]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] != complete(urls[0], _PROMPT, 24, **_DRAWN).token_ids


def test_each_choice_is_drawn_by_its_own_noise_and_the_best_are_the_likeliest(urls):
    body = {"prompt": _PROMPT, "max_tokens": 10, "return_token_ids": True, "logprobs": 0, **_SHAPED}
    told = []
    for url in urls:
        answer = answer_of(url, n=4, **body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        told.append([choice["token_ids"] for choice in choices])
        assert len({tuple(ids) for ids in told[-1]}) > 1
        assert answer["usage"]["completion_tokens"] == 40
        # Of equal lengths: sums rank as means do.
        choices.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        best = answer_of(url, n=2, best_of=4, **body)["choices"]
        assert [one["token_ids"] for one in best] == [one["token_ids"] for one in choices[:2]]
    assert told[0] == told[1]


def test_a_stop_string_ends_one_choice_and_not_the_others(tiny_cluster):
    asked = {"prompt": _PROMPT, "n": 4, "max_tokens": 24, **_DRAWN}
    whole = answer_of(tiny_cluster.url, **asked)["choices"]
    stop = whole[2]["text"][5:9]
    for server in tiny_cluster.servers():
        cut = answer_of(server.url, stop=stop, **asked)["choices"]
        for before, after in zip(whole, cut, strict=True):
            assert after["text"] == before["text"].partition(stop)[0]
            assert after["finish_reason"] == ("stop" if stop in before["text"] else "length")

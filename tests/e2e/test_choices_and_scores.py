"""n, best_of, echo and prompt_logprobs: the same through P/D, from D alone and from P alone."""

from typing import Any

import openai
import pytest
import torch

from tests.e2e.reference import Reference
from tests.rigs.client import MODEL, TIMEOUT_S
from tests.rigs.cluster import Cluster, Server
from tests.rigs.plain_http import http

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_TEXT = "Ida painted the wooden boat near the old river. Then"
_TOLERANCE = 1e-4  # nats, in float32
_DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 11, "ignore_eos": True}


def _servers(cluster: Cluster) -> list[Server]:
    """The proxy first."""
    return [cluster.proxy, cluster.decode[0], cluster.prefill[0]]


def _post(url: str, **body: Any) -> dict[str, Any]:
    response = http.post(f"{url}/v1/completions", json={"model": MODEL, **body}, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _logprobs(reference: Reference, ids: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [tokens, vocabulary] of what follows each token."""
    with torch.inference_mode():
        return reference.model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_an_echoed_prompt_is_scored_as_transformers_does(
    tiny_cluster: Cluster, tiny_reference: Reference, max_tokens: int
) -> None:
    ids = tiny_reference.tokenizer(_TEXT).input_ids
    everything = ids + tiny_reference.generate(ids, max_tokens) if max_tokens else ids
    table = _logprobs(tiny_reference, everything)
    expected = [table[i - 1, token].item() for i, token in enumerate(everything) if i]
    for server in _servers(tiny_cluster):
        asked = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
        body = _post(server.url, prompt=_TEXT, echo=True, logprobs=2, **asked)
        (choice,) = body["choices"]
        found = choice["logprobs"]
        assert choice["text"] == tiny_reference.tokenizer.decode(everything)
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(expected, abs=_TOLERANCE)
        for at, top in enumerate(found["top_logprobs"][1:]):
            best = table[at].max().item()
            assert max(top.values()) == pytest.approx(best, abs=_TOLERANCE)
            assert found["tokens"][at + 1] in top and 2 <= len(top) <= 3
        starts = found["text_offset"]
        assert starts == sorted(starts) and starts[0] == 0
        ends = [*starts[1:], len(choice["text"])]
        assert [choice["text"][a:b] for a, b in zip(starts, ends, strict=True)] == found["tokens"]
        assert body["usage"]["completion_tokens"] == max_tokens
        assert body["usage"]["prompt_tokens"] == len(ids)


def test_scoring_ends_on_the_prefill_server(tiny_cluster: Cluster) -> None:
    decode = tiny_cluster.decode[0]

    def served() -> float:
        return sum(v for k, v in decode.metrics().items() if k.startswith("baton_requests_total"))

    before = served()
    for asked in ({"max_tokens": 0}, {"max_tokens": 1, "echo": True, "logprobs": 1}):
        _post(tiny_cluster.url, prompt=[_TEXT, "Leo found the key"], **asked)
    assert served() == before
    _post(tiny_cluster.url, prompt=_TEXT, max_tokens=2, echo=True)
    assert served() == before + 1


def test_a_prompt_that_is_cached_is_scored_all_the_same(tiny_cluster: Cluster) -> None:
    prompt = _TEXT * 20
    for server in _servers(tiny_cluster):
        first = _post(server.url, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
        again = _post(server.url, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
        scores = [a["choices"][0]["logprobs"]["token_logprobs"] for a in (first, again)]
        assert scores[0][1:] == pytest.approx(scores[1][1:], abs=_TOLERANCE)


def test_prompt_logprobs_are_the_same_everywhere(
    tiny_cluster: Cluster, tiny_reference: Reference
) -> None:
    ids = tiny_reference.tokenizer(_TEXT).input_ids
    table = _logprobs(tiny_reference, ids)
    for server in _servers(tiny_cluster):
        body = _post(
            server.url, prompt=ids, prompt_logprobs=3, max_tokens=4, temperature=0, ignore_eos=True
        )
        first, *rest = body["choices"][0]["prompt_logprobs"]
        assert first is None and len(rest) == len(ids) - 1
        for at, entries in enumerate(rest):
            for token_id, entry in entries.items():
                value = table[at, int(token_id)].item()
                assert entry["logprob"] == pytest.approx(value, abs=_TOLERANCE)
            assert str(ids[at + 1]) in entries
            assert sorted(e["rank"] for e in entries.values() if e["rank"]) == [1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_the_same_through_both_and_differ_among_themselves(
    tiny_cluster: Cluster, stream: bool
) -> None:
    answers = []
    for server in _servers(tiny_cluster):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            asked: dict[str, Any] = {
                "model": MODEL,
                "messages": [{"role": "user", "content": _TEXT}],
                "n": 4,
                "max_tokens": 12,
                "temperature": 1.2,
                "seed": 11,
                "extra_body": {"ignore_eos": True},
            }
            texts = dict.fromkeys(range(4), "")
            if stream:
                for chunk in client.chat.completions.create(**asked, stream=True):
                    for choice in chunk.choices:
                        texts[choice.index] += choice.delta.content or ""
            else:
                answer = client.chat.completions.create(**asked)
                texts = {c.index: c.message.content for c in answer.choices}
                assert answer.usage is not None
                assert answer.usage.completion_tokens == 48
            answers.append(texts)
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0].values())) == 4


def test_a_stop_string_ends_one_choice_and_not_the_others(tiny_cluster: Cluster) -> None:
    whole = _post(tiny_cluster.url, prompt=_TEXT, n=4, max_tokens=24, **_DRAWN)["choices"]
    stop = whole[2]["text"][5:9]
    for server in _servers(tiny_cluster):
        cut = _post(server.url, prompt=_TEXT, n=4, max_tokens=24, stop=stop, **_DRAWN)["choices"]
        for before, after in zip(whole, cut, strict=True):
            assert after["text"] == before["text"].partition(stop)[0]
            assert after["finish_reason"] == ("stop" if stop in before["text"] else "length")


def test_the_best_of_several_are_those_of_the_highest_mean(tiny_cluster: Cluster) -> None:
    asked = {"prompt": _TEXT, "max_tokens": 10, **_DRAWN}
    every = _post(tiny_cluster.url, n=5, logprobs=0, **asked)["choices"]
    means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) for c in every}
    ranked = sorted(means, key=lambda text: -means[text])
    for server in _servers(tiny_cluster):
        body = _post(server.url, n=2, best_of=5, **asked)
        assert [c["text"] for c in body["choices"]] == ranked[:2]
        assert [c["index"] for c in body["choices"]] == [0, 1]
        assert body["usage"]["completion_tokens"] == 50
        assert body["choices"][0]["logprobs"] is None


def test_choices_share_the_prompt_in_usage(tiny_cluster: Cluster) -> None:
    prompt = [9 + i % 400 for i in range(200)]
    for server in _servers(tiny_cluster)[:2]:
        bodies = [_post(server.url, prompt=prompt, n=3, max_tokens=2, **_DRAWN) for _ in range(2)]
        for body in bodies:
            assert body["usage"]["prompt_tokens"] == 200
            assert body["usage"]["completion_tokens"] == 6
        cached = bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 128 <= cached < 200

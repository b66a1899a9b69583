"""Every feature of sampling: through P/D as by D alone. That both draw as they say, and tell the
right logprobs, tests/engine/test_against_transformers.py holds against transformers' logits."""

from typing import Any

import pytest

from tests.e2e.reference import Reference
from tests.rigs.client import answer_of, complete, stream, streamed_token_ids
from tests.rigs.cluster import Cluster

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_TEXT = "Clara found the silver clock behind the house. Clara"
_TOLERANCE = 1e-4  # nats, in float32


@pytest.fixture
def urls(tiny_cluster: Cluster) -> list[str]:
    """The proxy, and the decode server alone."""
    return [tiny_cluster.url, tiny_cluster.decode[0].url]


@pytest.fixture(scope="module")
def prompt(tiny_reference: Reference) -> list[int]:
    ids: list[int] = tiny_reference.tokenizer(_TEXT).input_ids
    return ids


_SHAPES: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 1.9, "frequency_penalty": 1.4, "repetition_penalty": 1.7},
    "rewards": {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.6},
    "bias": {"logit_bias": {"60": 15.5, "417": -8, "301": 15, "261": -100}},
    "drawn": {"temperature": 1.3, "seed": 7},
    "drawn-all": {
        "temperature": 0.9,
        "seed": 2**63 - 1,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {"60": 2.5},
    },
}


@pytest.mark.parametrize("name", list(_SHAPES))
def test_shaped_draws_are_those_of_the_decode_server_alone(urls, prompt, tiny_reference, name):
    members, answers = _SHAPES[name], []
    # A small penalty does nothing where the model is sure; where it is, differs by machine.
    for near in (prompt, *([token] * 5 for token in range(300, 500, 7))):
        answers = [complete(url, near, 24, **members).token_ids for url in urls]
        assert answers[0] == answers[1]
        if answers[0] != tiny_reference.generate(near, 24):
            break
    else:
        pytest.fail("the feature changes nothing")
    for url in urls:
        assert streamed_token_ids(stream(url, near, 24, **members)) == answers[0]


def test_a_stop_token_of_the_clients_ends_the_output(urls, prompt, tiny_reference):
    plain = tiny_reference.generate(prompt, 24)
    stop = next(t for i, t in enumerate(plain) if i >= 4 and t not in plain[:i])
    expected = plain[: plain.index(stop) + 1]
    for url in urls:
        answer = complete(url, prompt, 24, stop_token_ids=[stop, 511])
        assert (answer.token_ids, answer.finish_reason) == (expected, "stop")
        assert answer.usage["completion_tokens"] == len(expected)
        first = complete(url, prompt, 24, stop_token_ids=[plain[0]])
        assert (first.token_ids, first.finish_reason) == (plain[:1], "stop")
        least = complete(url, prompt, 24, stop_token_ids=[stop], min_tokens=20)
        assert len(least.token_ids) >= 20 and stop not in least.token_ids[:20]


def test_a_stop_string_may_lie_across_tokens(urls, prompt, tiny_reference):
    ids = tiny_reference.generate(prompt, 24)
    decode = tiny_reference.tokenizer.decode
    whole = decode(ids)
    # From the last character of one token to the first ones of the next but one.
    cuts = [(len(decode(ids[:n])) - 1, len(decode(ids[: n + 1])) + 2) for n in range(2, 20)]
    at, stop = next((a, whole[a:b]) for a, b in cuts if whole.index(whole[a:b]) == a)
    for url in urls:
        answer = complete(url, prompt, 24, stop=[stop])
        assert (answer.text, answer.finish_reason) == (whole[:at], "stop")
        events = [e for e in stream(url, prompt, 24, stop=[stop]) if isinstance(e, dict)]
        assert "".join(c["text"] for e in events for c in e["choices"]) == whole[:at]
        kept = complete(url, prompt, 24, stop=[stop], include_stop_str_in_output=True)
        assert kept.text == whole[: at + len(stop)]


@pytest.mark.parametrize("shape", [{}, {"frequency_penalty": 1.2, "logit_bias": {"60": 2}}])
def test_each_choice_is_drawn_by_its_own_noise_and_the_best_are_the_likeliest(urls, prompt, shape):
    body = {"prompt": prompt, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
    body |= {"temperature": 1.2, "seed": 11, "logprobs": 0, **shape}
    told = []
    for url in urls:
        answer = answer_of(url, n=4, **body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        told.append([choice["token_ids"] for choice in choices])
        assert len({tuple(ids) for ids in told[-1]}) > 1
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == 40
        # Of equal lengths: sums rank as means do.
        choices.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        best = answer_of(url, n=2, best_of=4, **body)["choices"]
        assert [one["token_ids"] for one in best] == [one["token_ids"] for one in choices[:2]]
    assert told[0] == told[1]


# -- n and echo: the same through P/D, from D alone and from P alone --------------

_BOAT = "Ida painted the wooden boat near the old river. Then"
_DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 11, "ignore_eos": True}


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_an_echoed_prompt_is_scored_as_transformers_does(tiny_cluster, tiny_reference, max_tokens):
    ids = tiny_reference.tokenizer(_BOAT).input_ids
    everything = ids + tiny_reference.generate(ids, max_tokens) if max_tokens else ids
    table = tiny_reference.logprobs(everything)
    expected = [table[i - 1, token].item() for i, token in enumerate(everything) if i]
    for server in tiny_cluster.servers():
        asked = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
        body = answer_of(server.url, prompt=_BOAT, echo=True, logprobs=2, **asked)
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


def test_a_stop_string_ends_one_choice_and_not_the_others(tiny_cluster):
    asked = {"prompt": _BOAT, "n": 4, "max_tokens": 24, **_DRAWN}
    whole = answer_of(tiny_cluster.url, **asked)["choices"]
    stop = whole[2]["text"][5:9]
    for server in tiny_cluster.servers():
        cut = answer_of(server.url, prompt=_BOAT, n=4, max_tokens=24, stop=stop, **_DRAWN)[
            "choices"
        ]
        for before, after in zip(whole, cut, strict=True):
            assert after["text"] == before["text"].partition(stop)[0]
            assert after["finish_reason"] == ("stop" if stop in before["text"] else "length")

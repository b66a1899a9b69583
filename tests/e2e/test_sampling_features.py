"""Every feature of sampling: through P/D as by D alone as by transformers' logits."""

from typing import Any

import pytest
import torch

from tests.e2e.reference import Reference
from tests.e2e.sampling_reference import draw, logits_of
from tests.rigs.client import answer_of, complete, stream, streamed_token_ids
from tests.rigs.cluster import Cluster

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_TEXT = "Clara found the silver clock behind the house. Clara"
_MESSAGES = [{"role": "user", "content": "Tell a story about Ben and the white door."}]
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
def test_shaped_draws_are_the_references(urls, prompt, tiny_reference, name):
    members = _SHAPES[name]
    # A small penalty does nothing where the model is sure; where it is, differs by machine.
    for near in (prompt, *([token] * 5 for token in range(300, 500, 7))):
        expected = draw(tiny_reference, near, 24, **members)
        if expected.ids != tiny_reference.generate(near, 24):
            prompt = near
            break
    else:
        pytest.fail("the feature changes nothing")
    for url in urls:
        assert complete(url, prompt, 24, **members).token_ids == expected.ids
        assert streamed_token_ids(stream(url, prompt, 24, **members)) == expected.ids


def test_min_tokens_keeps_ends_away(urls, tiny_reference):
    ids = tiny_reference.tokenizer("Kate").input_ids
    end = tiny_reference.tokenizer.eos_token_id

    def expect(**members: Any) -> list[int]:
        drawn = {"temperature": 2.0, **members}
        return draw(tiny_reference, ids, 12, stops=[end], **drawn).ids

    seed = next(seed for seed in range(100) if expect(seed=seed)[-1] == end)
    early = expect(seed=seed)
    for least in (0, len(early), 12):
        expected = expect(seed=seed, min_tokens=least)
        assert len(expected) >= least and (expected == early) is (least == 0)
        drawn = {"temperature": 2.0, "seed": seed, "ignore_eos": False, "min_tokens": least}
        for url in urls:
            answer = complete(url, ids, 12, **drawn)
            assert answer.token_ids == expected
            assert answer.finish_reason == ("stop" if expected[-1] == end else "length")


def test_a_stop_token_of_the_clients_ends_the_output(urls, prompt, tiny_reference):
    plain = tiny_reference.generate(prompt, 24)
    stop = next(t for i, t in enumerate(plain) if i >= 4 and t not in plain[:i])
    expected = plain[: plain.index(stop) + 1]
    late = draw(tiny_reference, prompt, 24, stops=[stop], min_tokens=20).ids
    for url in urls:
        answer = complete(url, prompt, 24, stop_token_ids=[stop, 511])
        assert (answer.token_ids, answer.finish_reason) == (expected, "stop")
        assert answer.usage["completion_tokens"] == len(expected)
        first = complete(url, prompt, 24, stop_token_ids=[plain[0]])
        assert (first.token_ids, first.finish_reason) == (plain[:1], "stop")
        least = complete(url, prompt, 24, stop_token_ids=[stop], min_tokens=20)
        assert least.token_ids == late


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


@pytest.mark.parametrize("shape", [{}, {"repetition_penalty": 1.5, "logit_bias": {"60": 5}}])
def test_logprobs_of_a_completion_are_those_of_the_logits(urls, prompt, tiny_reference, shape):
    expected = draw(tiny_reference, prompt, 12, **shape)
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **shape}
    body |= {"logprobs": 4, "return_tokens_as_token_ids": True}
    for url in urls:
        (choice,) = answer_of(url, "/v1/completions", **body)["choices"]
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{i}" for i in expected.ids]
        assert logprobs["token_logprobs"] == pytest.approx(expected.chosen, abs=_TOLERANCE)
        for row, chosen, top in zip(
            expected.logprobs, expected.ids, logprobs["top_logprobs"], strict=True
        ):
            ids = [int(name.removeprefix("token_id:")) for name in top]
            assert set(row.topk(4).indices.tolist()) | {chosen} == set(ids)
            assert list(top.values()) == pytest.approx(row[ids].tolist(), abs=_TOLERANCE)


def test_logprobs_of_a_chat_and_of_its_prompt_are_those_of_the_logits(tiny_cluster, tiny_reference):
    chat_prompt = tiny_reference.chat(_MESSAGES)
    expected = draw(tiny_reference, chat_prompt, 12)
    rows = _logprobs(tiny_reference, chat_prompt)
    body = {"messages": _MESSAGES, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 2}
    for server in tiny_cluster.servers():
        answer = answer_of(server.url, "/v1/chat/completions", **body)
        content = answer["choices"][0]["logprobs"]["content"]
        text = b"".join(bytes(e["bytes"]) for e in content).decode()
        assert text == tiny_reference.tokenizer.decode(expected.ids)
        assert [e["logprob"] for e in content] == pytest.approx(expected.chosen, abs=_TOLERANCE)
        for row, entry in zip(expected.logprobs, content, strict=True):
            told = [e["logprob"] for e in entry["top_logprobs"]]
            assert told == pytest.approx(row.topk(3).values.tolist(), abs=_TOLERANCE)
        first, *scored = answer["prompt_logprobs"]
        assert first is None and len(scored) == len(chat_prompt) - 1
        for row, token_id, entry in zip(rows, chat_prompt[1:], scored, strict=False):
            assert set(entry) == {str(token_id), *map(str, row.topk(2).indices.tolist())}
            for key, told in entry.items():
                assert told["logprob"] == pytest.approx(float(row[int(key)]), abs=_TOLERANCE)
            assert sorted(told["rank"] for told in entry.values() if told["rank"]) == [1, 2]


@pytest.mark.parametrize("shape", [{}, {"frequency_penalty": 1.2, "logit_bias": {"60": 2}}])
def test_each_choice_is_drawn_by_its_own_noise_and_the_best_are_the_likeliest(
    urls, prompt, tiny_reference, shape
):
    for seed in range(11, 99):  # until no two are the same by chance
        members = {"temperature": 1.2, "seed": seed, **shape}
        drawn = [draw(tiny_reference, prompt, 10, choice=k, **members) for k in range(4)]
        expected = [one.ids for one in drawn]
        if len({tuple(ids) for ids in expected}) == 4:
            break
    assert len({tuple(ids) for ids in expected}) == 4
    drawn.sort(key=lambda one: -sum(one.chosen))  # of equal lengths: sums rank as means do
    body = {"prompt": prompt, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
    for url in urls:
        answer = answer_of(url, "/v1/completions", n=4, **body, **members)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        assert [choice["token_ids"] for choice in choices] == expected
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == 40
        best = answer_of(url, "/v1/completions", n=2, best_of=4, **body, **members)
        assert [choice["token_ids"] for choice in best["choices"]] == [d.ids for d in drawn[:2]]


# -- n and echo: the same through P/D, from D alone and from P alone --------------

_BOAT = "Ida painted the wooden boat near the old river. Then"
_DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 11, "ignore_eos": True}


def _logprobs(reference: Reference, ids: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [tokens, vocabulary] of what follows each token."""
    return logits_of(reference, ids).log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_an_echoed_prompt_is_scored_as_transformers_does(tiny_cluster, tiny_reference, max_tokens):
    ids = tiny_reference.tokenizer(_BOAT).input_ids
    everything = ids + tiny_reference.generate(ids, max_tokens) if max_tokens else ids
    table = _logprobs(tiny_reference, everything)
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

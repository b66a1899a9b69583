"""Every feature of sampling: through P/D as by D alone as by transformers' logits."""

from typing import Any

import openai
import pytest
import torch

from tests.e2e.reference import Reference
from tests.e2e.sampling_reference import draw, logits_of
from tests.rigs.client import MODEL, answer_of, complete, stream, streamed_token_ids
from tests.rigs.cluster import Cluster, Server

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_TEXT = "Clara found the silver clock behind the house. Clara"
_MESSAGES = [{"role": "user", "content": "Tell a story about Ben and the white door."}]
_TOLERANCE = 1e-4  # nats, in float32


@pytest.fixture(params=["pd", "decode"])
def url(request: pytest.FixtureRequest, tiny_cluster: Cluster) -> str:
    """The proxy, and the decode server alone."""
    return tiny_cluster.url if request.param == "pd" else tiny_cluster.decode[0].url


@pytest.fixture(scope="module")
def prompt(tiny_reference: Reference) -> list[int]:
    ids: list[int] = tiny_reference.tokenizer(_TEXT).input_ids
    return ids


_SHAPES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": 1.4},
    "negative": {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    "repetition": {"repetition_penalty": 1.7},
    "below-one": {"repetition_penalty": 0.6},
    "bias": {"logit_bias": {"60": 15.5, "417": -8, "301": 15}},
    "ban": {"logit_bias": {"261": -100}},
    "all": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {"60": 3.5},
    },
    "drawn": {"temperature": 1.3, "seed": 7},
    "drawn-all": {
        "temperature": 0.9,
        "seed": 2**63 - 1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {"60": 2.5},
    },
}


@pytest.mark.parametrize("name", list(_SHAPES))
def test_shaped_draws_are_the_references(
    url: str, prompt: list[int], tiny_reference: Reference, name: str
) -> None:
    members = _SHAPES[name]
    # A small penalty does nothing where the model is sure; where it is, differs by machine.
    for near in (prompt, *([token] * 5 for token in range(300, 500, 7))):
        expected = draw(tiny_reference, near, 24, **members)
        if expected.ids != tiny_reference.generate(near, 24):
            prompt = near
            break
    else:
        pytest.fail("the feature changes nothing")
    answer = complete(url, prompt, 24, **members)
    assert answer.token_ids == expected.ids
    events = stream(url, prompt, 24, **members)
    assert streamed_token_ids(events) == expected.ids


def test_min_tokens_keeps_ends_away(url: str, tiny_reference: Reference) -> None:
    ids = tiny_reference.tokenizer("Kate").input_ids
    end = tiny_reference.tokenizer.eos_token_id
    seed = next(
        seed
        for seed in range(100)
        if draw(tiny_reference, ids, 12, stops=[end], temperature=2.0, seed=seed).ids[-1] == end
    )
    drawn = {"temperature": 2.0, "seed": seed, "ignore_eos": False}
    early = draw(tiny_reference, ids, 12, stops=[end], **drawn)
    answer = complete(url, ids, 12, **drawn)
    assert (answer.token_ids, answer.finish_reason) == (early.ids, "stop")
    for least in (len(early.ids), 12):
        expected = draw(tiny_reference, ids, 12, stops=[end], min_tokens=least, **drawn)
        assert len(expected.ids) >= least and expected.ids != early.ids
        answer = complete(url, ids, 12, min_tokens=least, **drawn)
        assert answer.token_ids == expected.ids


def test_a_stop_token_of_the_clients_ends_the_output(
    url: str, prompt: list[int], tiny_reference: Reference
) -> None:
    plain = tiny_reference.generate(prompt, 24)
    stop = next(t for i, t in enumerate(plain) if i >= 4 and t not in plain[:i])
    expected = plain[: plain.index(stop) + 1]
    answer = complete(url, prompt, 24, stop_token_ids=[stop, 511])
    assert answer.token_ids == expected
    assert answer.finish_reason == "stop"
    assert answer.usage["completion_tokens"] == len(expected)
    first = complete(url, prompt, 24, stop_token_ids=[plain[0]])
    assert (first.token_ids, first.finish_reason) == (plain[:1], "stop")
    least = {"stop_token_ids": [stop], "min_tokens": 20}
    expected = draw(tiny_reference, prompt, 24, stops=[stop], min_tokens=20).ids
    assert complete(url, prompt, 24, **least).token_ids == expected


def test_a_stop_string_may_lie_across_tokens(
    url: str, prompt: list[int], tiny_reference: Reference
) -> None:
    ids = tiny_reference.generate(prompt, 24)
    decode = tiny_reference.tokenizer.decode
    whole = decode(ids)
    # From the last character of one token to the first ones of the next but one.
    cuts = [(len(decode(ids[:n])) - 1, len(decode(ids[: n + 1])) + 2) for n in range(2, 20)]
    at, stop = next((a, whole[a:b]) for a, b in cuts if whole.index(whole[a:b]) == a)
    for asked in (url, url):
        answer = complete(asked, prompt, 24, stop=[stop])
        assert (answer.text, answer.finish_reason) == (whole[:at], "stop")
    events = [e for e in stream(url, prompt, 24, stop=[stop]) if isinstance(e, dict)]
    assert "".join(c["text"] for e in events for c in e["choices"]) == whole[:at]
    kept = complete(url, prompt, 24, stop=[stop], include_stop_str_in_output=True)
    assert kept.text == whole[: at + len(stop)]


@pytest.mark.parametrize("shape", [{}, {"repetition_penalty": 1.5, "logit_bias": {"60": 5}}])
def test_logprobs_of_a_completion_are_those_of_the_logits(
    url: str, prompt: list[int], tiny_reference: Reference, shape: dict[str, Any]
) -> None:
    expected = draw(tiny_reference, prompt, 12, **shape)
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **shape}
    body |= {"logprobs": 4, "return_tokens_as_token_ids": True}
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


def test_logprobs_of_a_chat_are_those_of_the_logits(url: str, tiny_reference: Reference) -> None:
    tokenizer = tiny_reference.tokenizer
    prompt = tokenizer.apply_chat_template(_MESSAGES, add_generation_prompt=True, return_dict=False)
    expected = draw(tiny_reference, prompt, 12)
    body = {"messages": _MESSAGES, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 3}
    (choice,) = answer_of(url, "/v1/chat/completions", **body)["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in content).decode() == tokenizer.decode(expected.ids)
    assert [e["logprob"] for e in content] == pytest.approx(expected.chosen, abs=_TOLERANCE)
    for row, entry in zip(expected.logprobs, content, strict=True):
        likeliest = row.topk(3).values.tolist()
        told = [e["logprob"] for e in entry["top_logprobs"]]
        assert told == pytest.approx(likeliest, abs=_TOLERANCE)


@pytest.mark.parametrize("shape", [{}, {"frequency_penalty": 1.2, "logit_bias": {"60": 2}}])
def test_each_choice_is_drawn_by_its_own_noise(
    url: str, prompt: list[int], tiny_reference: Reference, shape: dict[str, Any]
) -> None:
    for seed in range(11, 99):  # until no two are the same by chance
        members = {"temperature": 1.2, "seed": seed, **shape}
        expected = [draw(tiny_reference, prompt, 10, choice=k, **members).ids for k in range(4)]
        if len({tuple(ids) for ids in expected}) == 4:
            break
    assert len({tuple(ids) for ids in expected}) == 4
    body = {"prompt": prompt, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
    answer = answer_of(url, "/v1/completions", n=4, **body, **members)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert [choice["token_ids"] for choice in choices] == expected
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 40


def test_the_best_of_several_are_the_likeliest_by_the_logits(
    url: str, prompt: list[int], tiny_reference: Reference
) -> None:
    members = {"temperature": 1.5, "seed": 3}
    drawn = [draw(tiny_reference, prompt, 8, choice=k, **members) for k in range(5)]
    drawn.sort(key=lambda one: -sum(one.chosen))  # of equal lengths: sums rank as means do
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    answer = answer_of(url, "/v1/completions", n=2, best_of=5, **body, **members)
    assert [choice["token_ids"] for choice in answer["choices"]] == [d.ids for d in drawn[:2]]


def test_the_prompt_of_a_chat_is_scored_by_the_logits(url: str, tiny_reference: Reference) -> None:
    tokenizer = tiny_reference.tokenizer
    prompt = tokenizer.apply_chat_template(_MESSAGES, add_generation_prompt=True, return_dict=False)
    rows = logits_of(tiny_reference, prompt).log_softmax(-1)
    body = {"messages": _MESSAGES, "max_tokens": 4, "temperature": 0, "prompt_logprobs": 2}
    first, *scored = answer_of(url, "/v1/chat/completions", **body)["prompt_logprobs"]
    assert first is None
    for row, token_id, entry in zip(rows, prompt[1:], scored, strict=False):
        assert set(entry) == {str(token_id), *map(str, row.topk(2).indices.tolist())}
        for key, told in entry.items():
            assert told["logprob"] == pytest.approx(float(row[int(key)]), abs=_TOLERANCE)
    assert len(scored) == len(prompt) - 1


# -- n, echo and prompt_logprobs: the same through P/D, from D alone and from P alone --------------

_BOAT = "Ida painted the wooden boat near the old river. Then"
_DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 11, "ignore_eos": True}


def _servers(cluster: Cluster) -> list[Server]:
    """The proxy first."""
    return [cluster.proxy, cluster.decode[0], cluster.prefill[0]]


def _logprobs(reference: Reference, ids: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [tokens, vocabulary] of what follows each token."""
    return logits_of(reference, ids).log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_an_echoed_prompt_is_scored_as_transformers_does(
    tiny_cluster: Cluster, tiny_reference: Reference, max_tokens: int
) -> None:
    ids = tiny_reference.tokenizer(_BOAT).input_ids
    everything = ids + tiny_reference.generate(ids, max_tokens) if max_tokens else ids
    table = _logprobs(tiny_reference, everything)
    expected = [table[i - 1, token].item() for i, token in enumerate(everything) if i]
    for server in _servers(tiny_cluster):
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


def test_scoring_ends_on_the_prefill_server(tiny_cluster: Cluster) -> None:
    decode = tiny_cluster.decode[0]

    def served() -> float:
        return sum(v for k, v in decode.metrics().items() if k.startswith("baton_requests_total"))

    before = served()
    for asked in ({"max_tokens": 0}, {"max_tokens": 1, "echo": True, "logprobs": 1}):
        answer_of(tiny_cluster.url, prompt=[_BOAT, "Leo found the key"], **asked)
    assert served() == before
    answer_of(tiny_cluster.url, prompt=_BOAT, max_tokens=2, echo=True)
    assert served() == before + 1


def test_a_prompt_that_is_cached_is_scored_all_the_same(tiny_cluster: Cluster) -> None:
    prompt = _BOAT * 20
    for server in _servers(tiny_cluster):
        first = answer_of(server.url, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
        again = answer_of(server.url, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
        scores = [a["choices"][0]["logprobs"]["token_logprobs"] for a in (first, again)]
        assert scores[0][1:] == pytest.approx(scores[1][1:], abs=_TOLERANCE)


def test_prompt_logprobs_are_the_same_everywhere(
    tiny_cluster: Cluster, tiny_reference: Reference
) -> None:
    ids = tiny_reference.tokenizer(_BOAT).input_ids
    table = _logprobs(tiny_reference, ids)
    for server in _servers(tiny_cluster):
        body = answer_of(
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
                "messages": [{"role": "user", "content": _BOAT}],
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
    asked = {"prompt": _BOAT, "n": 4, "max_tokens": 24, **_DRAWN}
    whole = answer_of(tiny_cluster.url, **asked)["choices"]
    stop = whole[2]["text"][5:9]
    for server in _servers(tiny_cluster):
        cut = answer_of(server.url, prompt=_BOAT, n=4, max_tokens=24, stop=stop, **_DRAWN)[
            "choices"
        ]
        for before, after in zip(whole, cut, strict=True):
            assert after["text"] == before["text"].partition(stop)[0]
            assert after["finish_reason"] == ("stop" if stop in before["text"] else "length")


def test_choices_share_the_prompt_in_usage(tiny_cluster: Cluster) -> None:
    prompt = [9 + i % 400 for i in range(200)]
    for server in _servers(tiny_cluster)[:2]:
        bodies = [
            answer_of(server.url, prompt=prompt, n=3, max_tokens=2, **_DRAWN) for _ in range(2)
        ]
        for body in bodies:
            assert body["usage"]["prompt_tokens"] == 200
            assert body["usage"]["completion_tokens"] == 6
        cached = bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 128 <= cached < 200

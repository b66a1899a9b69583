"""Every feature of sampling: through P/D as by D alone as by transformers' logits."""

from typing import Any

import pytest

from tests.e2e.reference import Reference
from tests.e2e.sampling_reference import draw, logits_of
from tests.rigs.client import MODEL, TIMEOUT_S, complete, stream, streamed_token_ids
from tests.rigs.cluster import Cluster
from tests.rigs.plain_http import http

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


def _post(url: str, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(f"{url}{path}", json={"model": MODEL, **body}, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


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
    (choice,) = _post(url, "/v1/completions", **body)["choices"]
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
    (choice,) = _post(url, "/v1/chat/completions", **body)["choices"]
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
    answer = _post(url, "/v1/completions", n=4, **body, **members)
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
    answer = _post(url, "/v1/completions", n=2, best_of=5, **body, **members)
    assert [choice["token_ids"] for choice in answer["choices"]] == [d.ids for d in drawn[:2]]


def test_the_prompt_of_a_chat_is_scored_by_the_logits(url: str, tiny_reference: Reference) -> None:
    tokenizer = tiny_reference.tokenizer
    prompt = tokenizer.apply_chat_template(_MESSAGES, add_generation_prompt=True, return_dict=False)
    rows = logits_of(tiny_reference, prompt).log_softmax(-1)
    body = {"messages": _MESSAGES, "max_tokens": 4, "temperature": 0, "prompt_logprobs": 2}
    first, *scored = _post(url, "/v1/chat/completions", **body)["prompt_logprobs"]
    assert first is None
    for row, token_id, entry in zip(rows, prompt[1:], scored, strict=False):
        assert set(entry) == {str(token_id), *map(str, row.topk(2).indices.tolist())}
        for key, told in entry.items():
            assert told["logprob"] == pytest.approx(float(row[int(key)]), abs=_TOLERANCE)
    assert len(scored) == len(prompt) - 1

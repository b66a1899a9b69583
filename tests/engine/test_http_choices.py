"""Several choices of a prompt, and what is said of the prompt itself."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest, KVUsage, TokenDelta, TokenLogprobs
from tests.engine.test_http_features import logprobs_of
from tests.engine.test_tokenizer import write_sentencepiece_like
from tests.rigs.http_server import READY, chunks, end, scripted, serving

# -- echo and scoring --------------------------------------------------------------------------


def scoring(tokenizer: Tokenizer, prompt: str) -> list[TokenLogprobs | None]:
    """Token i of the prompt has log-probability -i; the likeliest is always "z"."""
    (z,) = tokenizer.encode("z")
    ids = tokenizer.encode(prompt)
    rest = [TokenLogprobs(-float(i), [z], [-0.125]) for i, _ in enumerate(ids[1:], 1)]
    return [None, *rest]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_has_logprobs_before_those_of_the_answer(
    tokenizer: Tokenizer, stream: bool
) -> None:
    (x,) = tokenizer.encode("x")
    found = scoring(tokenizer, "aéb")
    script = scripted(
        {"prompt_logprobs": found[:1]},
        {"prompt_logprobs": found[1:]},
        {"token_ids": [x], "logprobs": [logprobs_of((x, -0.5))]},
        end(),
    )
    asked = {"prompt": "aéb", "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}

    async with serving(tokenizer, script) as server:
        response = await server.post(**asked)
        choices = [c["choices"][0] for c in chunks(response)] if stream else None
        choices = choices or response.json()["choices"]
        assert "".join(c["text"] for c in choices) == "aébx"
        parts = [c["logprobs"] for c in choices]
        whole = {name: [v for part in parts for v in part[name]] for name in parts[0]}
        assert whole == {
            "tokens": ["a", r"bytes:\xc3", r"bytes:\xa9", "b", "x"],
            "token_logprobs": [None, -1.0, -2.0, -3.0, -0.5],
            "top_logprobs": [
                None,
                {r"bytes:\xc3": -1.0, "z": -0.125},
                {r"bytes:\xa9": -2.0, "z": -0.125},
                {"b": -3.0, "z": -0.125},
                {"x": -0.5},
            ],
            "text_offset": [0, 1, 1, 2, 3],
        }
        (added,) = server.engine.added
        assert (added.num_prompt_logprobs, added.max_tokens) == (1, 1)


async def test_nothing_is_generated_with_max_tokens_0(tokenizer: Tokenizer) -> None:
    script = scripted({"prompt_logprobs": scoring(tokenizer, "ab")}, end())

    async with serving(tokenizer, script) as server:
        asked = {"max_tokens": 0, "echo": True, "logprobs": 0}
        body = (await server.post(**asked)).json()
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
        assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.0}]
        assert body["usage"]["completion_tokens"] == 0
        streamed = chunks(await server.post(stream=True, **asked))
        assert [c["choices"][0]["text"] for c in streamed] == ["ab"]
        fits = await server.post(prompt=[5] * 64, max_tokens=0)
        assert fits.status_code == 200


async def test_an_echo_without_logprobs_is_only_text(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        for prompt, text in (("Hi<end>", "Hi<end>"), (tokenizer.encode("Hi<end>"), "Hi")):
            body = (await server.post(prompt=prompt, echo=True, max_tokens=1)).json()
            assert body["choices"][0]["text"].startswith(text)
            assert body["choices"][0]["logprobs"] is None
        assert [a.num_prompt_logprobs for a in server.engine.added] == [None, None]


async def test_prompt_logprobs_are_objects_by_token_id(tokenizer: Tokenizer) -> None:
    a, b, z = tokenizer.encode("abz")
    found = [None, TokenLogprobs(-2.0, [z, b], [-0.5, -2.0])]
    script = scripted({"prompt_logprobs": found, "token_ids": [a]}, end())
    expected = [
        None,
        {
            str(b): {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
            str(z): {"logprob": -0.5, "rank": 1, "decoded_token": "z"},
        },
    ]

    async with serving(tokenizer, script) as server:
        (choice,) = (await server.post(prompt_logprobs=2)).json()["choices"]
        assert choice["prompt_logprobs"] == expected
        assert choice["logprobs"] is None
        fewer = (await server.post(prompt_logprobs=1)).json()["choices"][0]
        assert fewer["prompt_logprobs"][1][str(b)]["rank"] is None


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ("Hi é", [0, 0, 0, 1, 2]),
        ("Hi <s> it", [0, 0, 0, 1, 2, 3]),  # its text comes back without a space
        ("<s> it", [0, 0, 3]),
    ],
)
async def test_what_the_tokenizer_puts_before_an_echoed_text_takes_no_room(
    tmp_path: Path, given: str, begins: list[int]
) -> None:
    write_sentencepiece_like(tmp_path)  # puts <s> and a space before every text
    tokenizer = Tokenizer(tmp_path)
    found = [None] * len(tokenizer.encode(given))
    roomy = replace(READY, vocab_size=4096)
    async with serving(
        tokenizer, scripted({"prompt_logprobs": found}, end()), ready=roomy
    ) as server:
        asked = {"prompt": given, "echo": True, "logprobs": 0, "max_tokens": 0}
        (choice,) = (await server.post(**asked)).json()["choices"]
        assert choice["text"] == given
        assert choice["logprobs"]["tokens"][0] == "<s>"
        assert choice["logprobs"]["text_offset"][: len(begins)] == begins


async def test_an_engine_that_scores_too_little_is_an_error(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, scripted({"prompt_logprobs": [None]}, end())) as server:
        response = await server.post(prompt_logprobs=0)
        assert response.status_code == 500
        assert "scored 1 of the prompt's 2 tokens" in response.json()["error"]["message"]


# -- several choices ---------------------------------------------------------------------------


def counting(request: AddRequest) -> Any:
    """Choice k answers with the prompt's last token + 1 + k, as often as it may."""

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        for _ in range(request.max_tokens):
            for choice in range(request.num_choices):
                token_id = request.token_ids[-1] + 1 + choice
                yield TokenDelta(request_id=request.request_id, choice=choice, token_ids=[token_id])
            await asyncio.sleep(0)
        for choice in reversed(range(request.num_choices)):
            usage = KVUsage(recomputed=len(request.token_ids), cached_tokens=1)
            yield TokenDelta(
                request_id=request.request_id, choice=choice, finish_reason="length", usage=usage
            )

    return script(request)


async def test_choices_of_several_prompts_have_indices_in_order(tokenizer: Tokenizer) -> None:
    asked = {"prompt": [[10], [20, 30]], "n": 3, "max_tokens": 2, "return_token_ids": True}
    expected = [[11, 11], [12, 12], [13, 13], [31, 31], [32, 32], [33, 33]]

    async with serving(tokenizer, counting) as server:
        body = (await server.post(**asked)).json()
        assert [c["index"] for c in body["choices"]] == list(range(6))
        assert [c["token_ids"] for c in body["choices"]] == expected
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 12,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        found = chunks(await server.post(stream=True, **asked))
        ids: dict[int, list[int]] = {index: [] for index in range(6)}
        for choice in (chunk["choices"][0] for chunk in found):
            ids[choice["index"]] += choice["token_ids"]
        assert list(ids.values()) == expected
        assert found[-1]["baton_kv"]["recomputed"] == 3
        assert [add.num_choices for add in server.engine.added] == [3, 3, 3, 3]


async def test_a_chat_streams_each_choice_with_its_role(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, counting) as server:
        found = chunks(await server.chat(stream=True, n=2, max_tokens=3))
        for index in (0, 1):
            deltas = [c["choices"][0]["delta"] for c in found if c["choices"][0]["index"] == index]
            assert [d.get("role") for d in deltas] == ["assistant"] + [None] * (len(deltas) - 1)


async def test_a_stop_string_ends_one_choice_alone(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")

    stopped = asyncio.Event()

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        for choice, token_id in ((0, a), (1, b)):
            yield TokenDelta(request_id=request.request_id, choice=choice, token_ids=[token_id] * 2)
        await stopped.wait()
        yield TokenDelta(request_id=request.request_id, **end(1, finish_reason="abort"))
        yield TokenDelta(request_id=request.request_id, **end(0, token_ids=[b]))

    async with serving(tokenizer, script) as server:
        tell = server.engine.tell

        def told(message: Any) -> None:
            assert message.choice == 1
            stopped.set()

        server.engine.tell = told  # type: ignore[method-assign]
        body = (await server.post(n=2, stop="bb")).json()
        server.engine.tell = tell  # type: ignore[method-assign]
        assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [
            ("aab", "length"),
            ("", "stop"),
        ]


async def test_the_best_choices_are_those_of_the_highest_mean(tokenizer: Tokenizer) -> None:
    a, b, c = tokenizer.encode("abc")

    def said(choice: int, *pairs: tuple[int, float]) -> dict[str, Any]:
        found = [TokenLogprobs(logprob) for _, logprob in pairs]
        return end(choice, token_ids=[i for i, _ in pairs], logprobs=found)

    script = scripted(
        said(2, (c, -1.0), (c, -1.0), (c, -1.0)), said(0, (a, -2.0)), said(1, (b, -0.5))
    )

    async with serving(tokenizer, script) as server:
        body = (await server.post(n=2, best_of=3)).json()
        assert [(x["index"], x["text"]) for x in body["choices"]] == [(0, "b"), (1, "ccc")]
        assert body["choices"][0]["logprobs"] is None
        assert body["usage"]["completion_tokens"] == 5
        (added,) = server.engine.added
        assert (added.num_choices, added.sampling.num_logprobs) == (3, 0)

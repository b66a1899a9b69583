"""Every field of the two endpoints: what the engine is asked for, and what the client reads."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.http.api import Api
from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest, EngineReady, TokenDelta, TokenLogprobs
from tests.engine.test_tokenizer import write_sentencepiece_like
from tests.rigs.http_server import USAGE, chunks, end, saying, scripted, serving


def logprobs_of(*pairs: tuple[int, float]) -> TokenLogprobs:
    """The first pair is the chosen token, all are the likeliest."""
    return TokenLogprobs(pairs[0][1], [i for i, _ in pairs], [p for _, p in pairs])


@pytest.mark.parametrize("field", ["user", "safety_identifier", "prompt_cache_key"])
async def test_a_chat_may_say_whose_it_is(tokenizer: Tokenizer, field: str) -> None:
    async with serving(tokenizer) as server:
        assert (await server.chat(**{field: "u-1"})).status_code == 200


# -- log-probabilities -------------------------------------------------------------------------


async def test_chat_logprobs_have_chats_own_shape(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    parts = tokenizer.encode("é")
    script = scripted(
        {"token_ids": [a], "logprobs": [logprobs_of((a, -0.5), (b, -1.0), (parts[0], -3.0))]},
        {"token_ids": [parts[0]], "logprobs": [logprobs_of((parts[0], -0.25), (a, -2.0))]},
        {"token_ids": [parts[1]], "logprobs": [TokenLogprobs(float("-inf"), [a], [-2.0])]},
        end(),
    )
    asked = {"logprobs": True, "top_logprobs": 2}

    async with serving(tokenizer, script) as server:
        (choice,) = (await server.chat(**asked)).json()["choices"]
        assert choice["message"]["content"] == "aé"
        first, second, third = choice["logprobs"]["content"]
        assert first == {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": -1.0, "bytes": [98]},
            ],
        }
        assert (second["token"], second["bytes"]) == (r"bytes:\xc3", [0xC3])
        assert (third["token"], third["logprob"]) == (r"bytes:\xa9", -9999.0)
        streamed = chunks(await server.chat(stream=True, **asked))
        content = [t for c in streamed for t in c["choices"][0]["logprobs"]["content"]]
        assert content == [first, second, third]
        assert [add.sampling.num_logprobs for add in server.engine.added] == [2, 2]
        bare = (await server.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        assert [token["top_logprobs"] for token in bare] == [[], [], []]


async def test_tokens_can_be_named_by_their_ids(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    script = scripted({"token_ids": [a], "logprobs": [logprobs_of((a, -0.5), (b, -1.0))]}, end())

    async with serving(tokenizer, script) as server:
        asked = {"return_tokens_as_token_ids": True, "logprobs": 2}
        found = (await server.post(**asked)).json()["choices"][0]["logprobs"]
        assert found["tokens"] == [f"token_id:{a}"]
        assert found["top_logprobs"] == [{f"token_id:{a}": -0.5, f"token_id:{b}": -1.0}]


# -- ends of an answer -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "o w"}, "Hell", "o w"),
        ({"stop": ["rld", "o w"], "include_stop_str_in_output": True}, "Hello w", "o w"),
        ({"stop": "o w", "min_tokens": 7}, "Hello world", None),
        ({"stop": "rld", "min_tokens": 5}, "Hello wo", "rld"),
    ],
)
async def test_stop_strings(
    tokenizer: Tokenizer, fields: dict[str, Any], text: str, reason: str | None
) -> None:
    async with serving(tokenizer, saying(tokenizer, "Hello world")) as server:
        (choice,) = (await server.post(**fields)).json()["choices"]
        assert choice["text"] == text
        assert choice.get("stop_reason") == reason
        assert choice["finish_reason"] == ("length" if reason is None else "stop")


async def test_a_stop_token_of_the_clients_is_the_reason_and_has_no_text(
    tokenizer: Tokenizer,
) -> None:
    (dot,) = tokenizer.encode(".")

    script = saying(tokenizer, "Hi.", finish_reason="stop")
    async with serving(tokenizer, script) as server:
        asked = {"stop_token_ids": [dot], "ignore_eos": True}
        (choice,) = (await server.post(**asked)).json()["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("Hi", dot)
        kept = await server.post(**asked, include_stop_str_in_output=True)
        assert kept.json()["choices"][0]["text"] == "Hi."
        plain = (await server.post(stop_token_ids=[dot])).json()["choices"][0]
        assert plain["stop_reason"] == dot
        ids = [add.stop_token_ids for add in server.engine.added]
        assert ids == [[dot], [dot], [*tokenizer.eos_ids, dot]]
        bad = await server.post(stop_token_ids=[260])
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "stop_token_ids")


async def test_special_tokens_are_text_when_they_are_not_skipped(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, saying(tokenizer, "a<end>b")) as server:
        for skips, text in ((True, "ab"), (False, "a<end>b")):
            asked = {"skip_special_tokens": skips, "ignore_eos": True}
            assert (await server.post(**asked)).json()["choices"][0]["text"] == text


_ROOMY = EngineReady(num_blocks=64, block_size=16, max_model_len=4096, vocab_size=4096)


async def test_special_tokens_around_a_prompt_can_be_left_out(tmp_path: Path) -> None:
    write_sentencepiece_like(tmp_path)  # puts a token before every text
    tokenizer = Tokenizer(tmp_path)
    bare = tokenizer.encode("Hi", add_special_tokens=False)
    assert tokenizer.encode("Hi") != bare

    async with serving(tokenizer, ready=_ROOMY) as server:
        for adds in (False, True):
            await server.post(prompt="Hi", add_special_tokens=adds)
        await server.chat(add_special_tokens=True)
        await server.chat()
        first, second, third, fourth = (add.token_ids for add in server.engine.added)
        assert first == bare and second == tokenizer.encode("Hi")
        assert len(third) == len(fourth) + len(second) - len(first)


# -- chat --------------------------------------------------------------------------------------


async def test_the_last_message_can_be_continued(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello "}]

    async with serving(tokenizer) as server:
        response = await server.chat(messages=messages, continue_final_message=True)
        assert response.status_code == 200
        (added,) = server.engine.added
        assert tokenizer.decode(added.token_ids) == "user:Hi;assistant:Hello "


# -- streams -----------------------------------------------------------------------------------


def at_once(token_ids: list[int]) -> Any:
    """A script in which all of a request's tokens arrive together, each in a delta of its own."""

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        end = {"finish_reason": "length", "usage": USAGE}
        for members in (*({"token_ids": [i]} for i in token_ids), end):
            for choice in range(request.num_choices):
                yield TokenDelta(request_id=request.request_id, choice=choice, **members)

    return script


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_can_come_with_every_chunk(tokenizer: Tokenizer, n: int) -> None:
    """Of the tokens up to that chunk, though more have arrived together with them."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    script = at_once(tokenizer.encode("abc"))

    async with serving(tokenizer, script) as server:
        asked = {"stream": True, "return_token_ids": True, "stream_options": options, "n": n}
        *found, last = chunks(await server.post(**asked))
        num_tokens = 0
        for chunk in found:
            num_tokens += len(chunk["choices"][0]["token_ids"])
            assert chunk["usage"]["completion_tokens"] == num_tokens
            assert chunk["usage"]["prompt_tokens"] == 2
        assert last["usage"]["completion_tokens"] == num_tokens == 3 * n


async def test_nothing_follows_a_stop_string_but_the_end(tokenizer: Tokenizer) -> None:
    """The engine goes on until it hears of it."""
    script = at_once(tokenizer.encode("one two three"))
    asked = {"stop": "e", "return_token_ids": True, "stream": True}

    async with serving(tokenizer, script) as server:
        *found, last = chunks(await server.post(**asked))
        assert "".join(chunk["choices"][0]["text"] for chunk in found) == "on"
        assert all(chunk["choices"][0]["token_ids"] for chunk in found)
        assert last["choices"][0]["finish_reason"] == "stop"


async def test_the_fingerprint_is_on_every_answer(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, fingerprint="fp_1") as server:
        assert (await server.post()).json()["system_fingerprint"] == "fp_1"
        for chunk in chunks(await server.chat(stream=True)):
            assert chunk["system_fingerprint"] == "fp_1"


# -- /tokenize, /detokenize --------------------------------------------------------------------


async def test_a_text_is_tokenized_and_back(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        body = {"model": "m", "prompt": "Hi<end>", "return_token_strs": True}
        found = (await server.http.post("/tokenize", json=body)).json()
        ids = tokenizer.encode("Hi<end>")
        assert found["tokens"] == ids and found["count"] == len(ids)
        assert found["max_model_len"] == 64
        assert found["token_strs"] == ["H", "i", "<end>"]
        back = await server.http.post("/detokenize", json={"tokens": ids})
        assert back.json() == {"prompt": "Hi<end>"}


async def test_messages_are_tokenized_as_a_chat_would_be(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]

    async with serving(tokenizer) as server:
        response = await server.http.post("/tokenize", json={"messages": messages})
        await server.chat(messages=messages)
        assert response.json()["tokens"] == server.engine.added[0].token_ids


# -- the document, and other origins -----------------------------------------------------------


async def test_the_document_lists_what_is_accepted(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        found = (await server.http.get("/openapi.json")).json()
        fields = found["components"]["schemas"]["CompletionRequest"]["properties"]
        assert fields["suffix"] == {"enum": ["", None]}
        assert {"type": "string", "minLength": 1} in fields["prompt"]["anyOf"]
        page = await server.http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "logit_bias" in page.text
        for path in found["paths"]:
            asked = await server.http.get(path.replace("{name}", "m"))
            assert asked.status_code == (200 if "get" in found["paths"][path] else 405), path
            kinds = found["paths"][path].get("get", {}).get("responses", {}).get("200")
            if kinds:
                assert asked.headers["content-type"].split(";")[0] in kinds["content"]


async def test_pages_of_named_origins_alone_may_call(tokenizer: Tokenizer) -> None:
    origin = "https://app.example"
    preflight = {"origin": origin, "access-control-request-method": "POST"}

    async with serving(tokenizer, origins=(origin,)) as server:
        asked = await server.http.options("/v1/completions", headers=preflight)
        assert asked.headers["access-control-allow-origin"] == origin
        body = {"model": "m", "prompt": "ab"}
        for sender, allowed in ((origin, origin), ("https://other.example", None)):
            response = await server.http.post(
                "/v1/completions", json=body, headers={"origin": sender}
            )
            assert response.headers.get("access-control-allow-origin") == allowed
    async with serving(tokenizer) as server:
        response = await server.http.options("/v1/completions", headers=preflight)
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("model", [{}, {"model": None}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/tokenize", {"prompt": "ab"}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
async def test_the_only_model_need_not_be_named(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], model: dict[str, Any]
) -> None:
    async with serving(tokenizer) as server:
        response = await server.http.post(path, json={**body, **model})
        assert response.status_code == 200, response.text
        assert response.json().get("model", "m") == "m"


async def test_one_of_several_models_must_be_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Api, "model_names", ["m", "other"])
    async with serving(tokenizer) as server:
        response = await server.http.post("/v1/completions", json={"prompt": "ab"})
        assert response.status_code == 400
        assert "other" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "model"

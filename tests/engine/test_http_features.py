"""Every field of the two endpoints: what the engine is asked for, and what the client reads."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.http.api import Api
from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest, EngineReady, TokenDelta
from tests.engine.test_tokenizer import write_sentencepiece_like
from tests.rigs.http_server import USAGE, chunks, serving


@pytest.mark.parametrize("field", ["user", "safety_identifier", "prompt_cache_key"])
async def test_a_chat_may_say_whose_it_is(tokenizer: Tokenizer, field: str) -> None:
    async with serving(tokenizer) as server:
        assert (await server.chat(**{field: "u-1"})).status_code == 200


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

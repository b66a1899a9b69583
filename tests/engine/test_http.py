"""The HTTP application over real sockets, in front of a scripted engine."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine.http.api import ServerHooks
from engine.http.request_stats import MAX_RECENT
from engine.text.tokenizer import Tokenizer
from protocol.errors import KVParamsRejected
from protocol.messages import AddRequest, EngineStats, HostTierReport, TokenDelta
from protocol.metrics import ENGINE_TOTALS, stat_key
from protocol.process.logging import LineFormatter
from protocol.server_stats import STATS_PATH, ServerStats
from tests.engine.test_http_tools import TOOL
from tests.engine.test_tokenizer import write_sentencepiece_style
from tests.rigs.http_server import (
    CONTEXT,
    READY,
    USAGE,
    chunks,
    serving,
    serving_4k,
    text_script,
    with_template,
)
from tests.rigs.metric import without_model


async def test_engine_receives_the_sampling_of_the_request(tokenizer):
    async with serving(tokenizer) as server:
        await server.post(temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=7)
        await server.post(ignore_eos=True, max_tokens=1, max_completion_tokens=1)
        await server.post()
        first, second, third = server.engine.added
        sampling = first.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
        assert (sampling.min_p, sampling.seed, first.max_tokens) == (0.1, 7, 16)
        assert first.stop_token_ids == tokenizer.encode("<end>")
        assert second.stop_token_ids == [] and second.max_tokens == 1
        assert second.sampling.seed != third.sampling.seed  # the server chooses seeds


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_cuts_the_text_and_aborts_the_engine(tokenizer, stream):
    async def endless(request: AddRequest) -> AsyncIterator[TokenDelta]:
        for token_id in tokenizer.encode("one two th"):
            yield TokenDelta(request_id=request.request_id, token_ids=[token_id])
        await asyncio.Event().wait()

    options = (
        {"include_usage": True, "continuous_usage_stats": True} if stream else None
    )
    requested = {"stop": ["o t", " two"], "stream": stream, "stream_options": options}
    async with serving(tokenizer, endless) as server:
        response = await server.post(**requested, return_token_ids=True)
        *actual, last = chunks(response) if stream else [response.json()] * 2
        (end,) = actual[-1]["choices"]
        assert "".join(chunk["choices"][0]["text"] for chunk in actual) == "one"
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", " two")
        assert last["usage"]["completion_tokens"] == len("one two")
        num_tokens = 0
        # The usage counts tokens only up to the stop string.
        for chunk in actual:
            num_tokens += len(chunk["choices"][0]["token_ids"])
            assert chunk["usage"]["completion_tokens"] == num_tokens
        assert server.engine.aborted == [server.engine.added[0].request_id]


# -- hooks -----------------------------------------------------------------------------


class KVHooks(ServerHooks):
    def prepare(self, request: Any, adds: Any, ready: Any) -> Any:
        if request.kv_transfer_params == {"bad": True}:
            raise KVParamsRejected(
                "`kv_transfer_params.bad` is true.", param="kv_transfer_params"
            )
        return [
            replace(add, retain_kv=request.kv_transfer_params is not None)
            for add in adds
        ]

    def response_members(self, last_deltas: Any) -> dict[str, Any]:
        return {
            "kv_transfer_params": [delta.usage.transferred for delta in last_deltas]
        }


async def test_hooks_change_requests_and_answer(tokenizer):
    script = text_script(tokenizer, "x")
    async with serving(tokenizer, script, KVHooks()) as server:
        response = await server.post(prompt=["a", "b"], kv_transfer_params={"x": 1})
        assert response.json()["kv_transfer_params"] == [1, 1]
        assert [added.retain_kv for added in server.engine.added] == [True, True]
        last = chunks(await server.post(stream=True))[-1]
        assert last["kv_transfer_params"] == [1] and "usage" not in last
        rejected = await server.post(kv_transfer_params={"bad": True})
        assert rejected.status_code == 400
        assert rejected.json()["error"]["code"] == "kv_transfer_params_rejected"


@pytest.mark.parametrize("stops", [None, "a"])
async def test_stop_string_in_the_last_token_waits_for_the_engines_last_delta(
    tokenizer, stops
):
    """The only token of a prefill leg may complete a stop string. The engine sends the
    KV params after that token."""

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        yield TokenDelta(request_id=request.request_id, token_ids=tokenizer.encode("a"))
        await asyncio.sleep(0.01)
        yield TokenDelta(
            request_id=request.request_id, finish_reason="length", usage=USAGE
        )

    async with serving(tokenizer, script, KVHooks()) as server:
        body = (await server.post(max_tokens=1, stop=stops)).json()
        assert body["kv_transfer_params"] == [1]
        assert body["choices"][0]["finish_reason"] == ("stop" if stops else "length")
        assert server.engine.aborted == []


# -- ids, metrics, operations ----------------------------------------------------------


@pytest.mark.parametrize("request_id", ["req-1", "100% {odd} \u00e9", "x" * 3000])
async def test_request_id_is_echoed_and_logged(tokenizer, request_id, caplog):
    caplog.set_level(logging.INFO, "baton")
    caplog.handler.setFormatter(LineFormatter("decode"))
    async with serving(tokenizer) as server:
        header = {"x-request-id": request_id.encode("latin-1")}
        for _ in range(2):
            response = await server.post(headers=header)
            assert response.headers["x-request-id"] == request_id
        first, second = server.engine.added
        assert first.request_id != second.request_id
        assert (
            first.request_id.startswith(request_id[:64]) and len(first.request_id) < 100
        )
        generated = [(await server.post()).headers["x-request-id"] for _ in range(2)]
        assert len(set(generated)) == 2
    access_lines = [line for line in caplog.text.splitlines() if "prompt=2" in line]
    assert sum(f"{request_id[:128]}" in line for line in access_lines) == 2, (
        "the log shows the beginning of a long id"
    )


async def test_series_of_requests_exist_before_the_first_request(tokenizer):
    def series(text: str) -> set[str]:
        names = {line.rsplit(" ", 1)[0] for line in text.splitlines()}
        return {
            name
            for name in names
            if name.startswith(("baton_requests_", "baton_kv_tokens_"))
        }

    async with serving(tokenizer, text_script(tokenizer, "Hello")) as server:
        before = series(without_model((await server.http.get("/metrics")).text))
        await server.post()
        await server.post(stop="l")
        await server.post(temperature=-1)
        after = series(without_model((await server.http.get("/metrics")).text))
        assert after == before
        assert 'baton_requests_total{endpoint="responses",outcome="error"}' in before
        assert 'baton_kv_tokens_total{source="recomputed"}' in before


async def test_metrics_count_requests_and_tokens(tokenizer):
    async with serving(tokenizer, text_script(tokenizer, "Hello")) as server:
        key = stat_key("baton_kv_blocks", state="free")
        server.engine.emit(EngineStats({key: 7.0, "baton_requests_running": 2.0}))
        await server.post()
        await server.post(temperature=-1)
        text = without_model((await server.http.get("/metrics")).text)
        for line in (
            'baton_requests_total{endpoint="completions",outcome="length"} 1.0',
            'baton_requests_total{endpoint="completions",outcome="rejected"} 1.0',
            "baton_prompt_tokens_total 2.0",
            "baton_generation_tokens_total 5.0",
            'baton_kv_tokens_total{source="transferred"} 1.0',
            "baton_time_to_first_token_seconds_count 1.0",
            "baton_inter_token_seconds_count 4.0",
            'baton_kv_blocks{state="free"} 7.0',
            "baton_requests_running 2.0",
        ):
            assert f"\n{line}\n" in text, line


async def test_ready_names_the_kv_store_while_the_engine_uses_it(tokenizer):
    async with serving(tokenizer) as server:
        tier = HostTierReport(store="s", num_tokens=64, start_s=0.005, token_s=1e-6)
        for host_tier in (None, tier, None):
            server.engine.emit(EngineStats({}, host_tier))
            report = (await server.http.get("/ready")).json()
            expected = host_tier and msgspec.to_builtins(host_tier)
            assert report.get("host_tier") == expected


async def test_stats_report_recent_requests_with_times_but_without_texts(tokenizer):
    async with serving(
        tokenizer, text_script(tokenizer, "Hello", usage=USAGE)
    ) as server:

        async def stats(since: int) -> ServerStats:
            response = await server.http.get(STATS_PATH, params={"since": since})
            assert "Hello" not in response.text
            return msgspec.json.decode(response.content, type=ServerStats)

        server.engine.emit(EngineStats({"baton_requests_running": 2.0}))
        await server.post(headers={"x-request-id": "mine" * 99})
        await server.post(temperature=-1)
        server_stats = await stats(0)
        assert server_stats.values["baton_requests_running"] == 2.0
        assert server_stats.values["baton_inter_token_seconds_count"] == 4.0
        done, refused = server_stats.served
        assert (done.id, done.outcome, done.generated) == (
            ("mine" * 99)[:128],
            "length",
            5,
        )
        assert done.kv == {"transferred": 1, "recomputed": 1, "skipped": 0}
        assert sorted(done.times, key=done.times.__getitem__) == [
            "accepted",
            "first",
            "end",
        ]
        assert (refused.outcome, refused.error) == ("rejected", "invalid_request")
        for _ in range(MAX_RECENT):
            await server.post(temperature=-1)
        assert (await stats(server_stats.next - 1)).served[0].number == 2, (
            "only the last MAX_RECENT requests are kept"
        )
        assert (await stats(MAX_RECENT + 2)).served == []
        assert len((await stats(10**6)).served) == MAX_RECENT, (
            "a number from before a restart of the server returns all requests"
        )
        wrong = await server.http.get(STATS_PATH, params={"since": "-1"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "since")


async def test_ready_and_models_report_the_served_model(tokenizer):
    ready_engine = replace(READY, geometry={"tp": 2})
    async with serving(tokenizer, hooks=KVHooks(), ready=ready_engine) as server:
        ready = (await server.http.get("/ready")).json()
        assert ready == {
            "ready": True,
            "role": "prefill",
            "model": "m",
            "num_blocks": 64,
            "block_size": 16,
            "max_model_len": CONTEXT,
            "max_num_seqs": 8,
            "tp": 2,
            **dict.fromkeys(ENGINE_TOTALS, 0.0),
        }
        (card,) = (await server.http.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("m", CONTEXT)
        assert (await server.http.get("/v1/models/m")).json() == card
        missing = await server.http.get("/v1/models/a/b")
        assert missing.status_code == 404
        assert missing.json()["error"]["message"].startswith(
            'The model in the path is "a/b"; '
        )


# -- requests of clients ---------------------------------------------------------------


async def test_special_tokens_around_a_prompt_can_be_left_out(tmp_path):
    write_sentencepiece_style(tmp_path)  # puts a token before every text
    tokenizer = Tokenizer(tmp_path)
    plain_ids = tokenizer.encode("Hi", add_special_tokens=False)
    assert tokenizer.encode("Hi") != plain_ids
    async with serving(
        tokenizer, ready=replace(READY, max_model_len=4096, vocab_size=4096)
    ) as server:
        for adds in (False, True):
            await server.post(prompt="Hi", add_special_tokens=adds)
        await server.chat(add_special_tokens=True)
        await server.chat()
        first, second, third, fourth = (add.token_ids for add in server.engine.added)
        assert first == plain_ids and second == tokenizer.encode("Hi")
        assert len(third) == len(fourth) + len(second) - len(first)


# -- /tokenize, /detokenize ------------------------------------------------------------


async def test_text_survives_tokenize_and_detokenize(tokenizer):
    async with serving(tokenizer) as server:
        body = {"model": "m", "prompt": "Hi<end>", "return_token_strs": True}
        actual = (await server.http.post("/tokenize", json=body)).json()
        ids = tokenizer.encode("Hi<end>")
        assert actual["tokens"] == ids and actual["count"] == len(ids)
        assert actual["max_model_len"] == 64
        assert actual["token_strs"] == ["H", "i", "<end>"]
        detokenized = await server.http.post("/detokenize", json={"tokens": ids})
        assert detokenized.json() == {"prompt": "Hi<end>"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "0||Hi>"),
        ({"tools": [TOOL]}, json.dumps([TOOL]) + "||Hi>"),
        ({"tools": [TOOL], "tool_choice": "none"}, "0||Hi>"),
        (
            {"add_generation_prompt": False, "chat_template_kwargs": {"a": "b"}},
            "0|b|Hi",
        ),
        ({"continue_final_message": True, "reasoning_effort": "low"}, "0|low|Hi"),
    ],
)
async def test_messages_are_tokenized_as_in_a_chat(tokenizer, fields, expected):
    template = "{{ tools | tojson if tools else 0 }}|{{ a }}{{ reasoning_effort }}|"
    template += "{{ messages[0].content }}{{ '>' if add_generation_prompt }}"
    request = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    async with serving_4k(with_template(tokenizer, template)) as server:
        response = await server.http.post("/tokenize", json=request)
        await server.chat(**request)
        ids = response.json()["tokens"]
        assert (
            ids == server.engine.added[0].token_ids
            and tokenizer.decode_all(ids) == expected
        )


# -- the OpenAPI document --------------------------------------------------------------


async def test_openapi_document_lists_accepted_fields(tokenizer):
    async with serving(tokenizer) as server:
        actual = (await server.http.get("/openapi.json")).json()
        fields = actual["components"]["schemas"]["CompletionRequest"]["properties"]
        assert fields["suffix"] == {"enum": ["", None]}
        assert {"type": "string", "minLength": 1} in fields["prompt"]["anyOf"]
        page = await server.http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "logit_bias" in page.text
        for path in actual["paths"]:
            request = await server.http.get(path.replace("{name}", "m"))
            assert request.status_code == (
                200 if "get" in actual["paths"][path] else 405
            ), path
            kinds = actual["paths"][path].get("get", {}).get("responses", {}).get("200")
            if kinds:
                assert request.headers["content-type"].split(";")[0] in kinds["content"]


async def test_model_may_be_left_out(tokenizer):
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "ab"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/responses": {"input": "Hi"},
        "/tokenize": {"prompt": "ab"},
        "/detokenize": {"tokens": [65]},
    }
    async with serving(tokenizer) as server:
        for path, body in bodies.items():
            for model in ({}, {"model": None}):
                response = await server.http.post(path, json={**body, **model})
                assert response.status_code == 200, response.text
                assert response.json().get("model", "m") == "m"

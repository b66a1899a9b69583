"""Names of fields and paths of other inference servers work at the proxy and at a
server of Baton.
"""

from typing import Any

import httpx
import pytest

from engine.text.tokenizer import Tokenizer
from protocol.messages import Grammar
from protocol.version import VERSION
from tests.engine.test_access import SIDES, open_client
from tests.proxy.fakes import Fake, Rig, decodes
from tests.rigs.http_server import chunks, serving, serving_4k, text_script

COMPLETIONS, CHAT, RESPONSES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
)
ALL_PATHS = (COMPLETIONS, CHAT, RESPONSES)


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompts: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "ab"},
        CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
        RESPONSES: {"input": "Hi"},
    }
    return {**prompts[path], **fields}


async def send(http: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    return await http.post(path, json=body(path, **fields))


@SIDES
async def test_version_is_reported(side: str, tokenizer: Tokenizer) -> None:
    async with open_client(side, tokenizer) as client:
        answer = await client.get("/version")
        assert (answer.status_code, answer.json()) == (200, {"version": VERSION})
        assert (await client.head("/version")).status_code == 200
        assert (await client.post("/version")).status_code == 405


async def test_model_card_has_the_same_root_at_proxy_and_server(tokenizer):
    async with serving(tokenizer) as server:
        server_card = (await server.http.get("/v1/models")).json()["data"][0]
    async with Rig(decode=[Fake(decodes, details={"model": "m"})]) as rig:
        proxy_card = (await rig.client.get("/v1/models/m")).json()
    for card in (server_card, proxy_card):
        assert (card["id"], card["root"], card["parent"]) == ("m", "m", None)


GBNF = 'root ::= "a" | "b"'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_SCHEMA_TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
GRAMMAR_FIELDS: list[tuple[dict[str, Any], Grammar]] = [
    ({"ebnf": GBNF}, Grammar("grammar", GBNF)),
    ({"grammar": GBNF}, Grammar("grammar", GBNF)),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"json_schema": SCHEMA}, Grammar("json_schema", _SCHEMA_TEXT)),
    ({"json_schema": _SCHEMA_TEXT}, Grammar("json_schema", _SCHEMA_TEXT)),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        Grammar("json_schema", _SCHEMA_TEXT),
    ),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_grammar_fields_of_other_servers_are_accepted(path, tokenizer):
    async with serving(tokenizer, text_script(tokenizer, "a")) as server:
        for fields, grammar in GRAMMAR_FIELDS:
            answer = await send(server.http, path, **fields)
            assert answer.status_code == 200, answer.text
            assert server.engine.added[-1].sampling.grammar == grammar
        for fields, _ in GRAMMAR_FIELDS[:5]:
            answer = await send(server.http, path, guided_regex="b", **fields)
            assert answer.status_code == 400 and "both set" in answer.text
        for kind in ("text", "json_schema"):
            wrong = {"response_format": {"type": kind, "schema": SCHEMA}}
            assert (await send(server.http, path, **wrong)).status_code == 400
        broken = {
            "response_format": {"type": "json_object", "schema": {"type": "no such"}}
        }
        error = (await send(server.http, path, **broken)).json()["error"]
        assert error["param"] == "response_format.schema"


# -- request_id ------------------------------------------------------------------------

ID_PREFIXES = {COMPLETIONS: "cmpl-", CHAT: "chatcmpl-", RESPONSES: "resp_"}


@pytest.mark.parametrize("path", ALL_PATHS)
async def test_request_id_sets_only_the_id_of_the_answer(path, tokenizer):
    async with serving_4k(tokenizer, text_script(tokenizer, "ok")) as server:
        answers = [await send(server.http, path, request_id="mine-1") for _ in range(2)]
        for answer in answers:
            assert answer.json()["id"] == ID_PREFIXES[path] + "mine-1"
            assert answer.headers["x-request-id"] != "mine-1"
        first, second = server.engine.added
        assert "mine" not in first.request_id and first.request_id != second.request_id
        if path == RESPONSES:  # ids of items must not repeat in a conversation
            items = [answer.json()["output"][0]["id"] for answer in answers]
            assert items[0] != items[1]
        else:
            streamed = chunks(
                await send(server.http, path, request_id="mine-1", stream=True)
            )
            assert {chunk["id"] for chunk in streamed} == {ID_PREFIXES[path] + "mine-1"}


@pytest.mark.parametrize("path", ALL_PATHS)
async def test_request_id_is_short_and_visible(path, tokenizer):
    async with serving_4k(tokenizer) as server:
        for wrong in ("", "a b", "a\n", "ü", "x" * 129, 7):
            answer = await send(server.http, path, request_id=wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                "request_id",
            )

"""POST /tokenize and /detokenize: what the model's tokenizer makes of a text, and back."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from engine.http.generate import Api
from engine.http.limits import check_model, check_token_ids, fill_in_model
from engine.http.middleware import read_body, refusal_of
from engine.http.text_encoder import LONG_CHARS
from protocol.openai.api import parse_json_object
from protocol.openai.tokenize import as_request, parse_detokenize, parse_tokenize


def add_tokenizing(app: FastAPI, api: Api) -> None:
    """Adds both routes; what they raise is answered by the application's handlers."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await _answer(request, api, _tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await _answer(request, api, _detokenize)


async def _answer(
    request: Request, api: Api, work: Callable[[bytes, Api], Awaitable[bytes]]
) -> Response:
    raw = await read_body(request, api.settings.max_body_bytes)
    try:
        return Response(await work(raw, api), media_type="application/json")
    except RecursionError as raised:
        raise refusal_of(raised) from None


async def _tokenize(raw: bytes, api: Api) -> bytes:
    members = parse_json_object(raw)
    fill_in_model(members, api.model_names)
    parsed = await api.texts.run(len(raw), lambda: parse_tokenize(members))
    check_model(parsed.model, api.model_names)
    ready = api.require_ready()
    request = as_request(parsed)  # whose sender may want to know by how much it is too long
    (ids,) = await api.texts.tokenize(request, ready.max_model_len, sure_to=LONG_CHARS)

    def answer() -> bytes:
        pieces = api.tokenizer.pieces(ids) if parsed.return_token_strs else None
        told: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": ready.max_model_len,
            "tokens": ids,
            "token_strs": pieces,
        }
        return msgspec.json.encode(told)

    return await api.texts.run(len(ids), answer)


async def _detokenize(raw: bytes, api: Api) -> bytes:
    members = parse_json_object(raw)
    fill_in_model(members, api.model_names)

    def answer() -> bytes:
        parsed = parse_detokenize(members)
        check_model(parsed.model, api.model_names)
        if parsed.tokens:
            check_token_ids(parsed.tokens, api.require_ready().vocab_size, "tokens")
        return msgspec.json.encode({"prompt": api.tokenizer.decode_all(parsed.tokens)})

    return await api.texts.run(len(raw), answer)

"""POST /tokenize and /detokenize: what the model's tokenizer makes of a text, and back."""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from engine.http_generate import Api
from engine.http_limits import check_model, check_token_ids
from engine.http_middleware import read_body, refusal_of
from engine.http_text import INLINE_CHARS
from engine.tokenizer import Tokenizer
from protocol.openai import parse_json_object
from protocol.openai_tokenize import (
    TokenizeRequest,
    as_chat,
    parse_detokenize,
    parse_tokenize,
)


def add_tokenizing(app: FastAPI, api: Api) -> None:
    """Adds both routes; what they raise is answered by the application's handlers."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await _answer(request, api, _tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await _answer(request, api, _detokenize)


async def _answer(
    request: Request, api: Api, work: Callable[[dict[str, Any], Api], dict[str, Any]]
) -> Response:
    raw = await read_body(request, api.settings.max_body_bytes)
    try:
        members = parse_json_object(raw)
        if len(raw) > INLINE_CHARS:  # nor is a long answer written where streams would wait for it
            return await asyncio.to_thread(lambda: JSONResponse(work(members, api)))
        return JSONResponse(work(members, api))
    except RecursionError as raised:
        raise refusal_of(raised) from None


def _tokenize(members: dict[str, Any], api: Api) -> dict[str, Any]:
    parsed = parse_tokenize(members)
    check_model(parsed.model or api.model_names[0], api.model_names)
    ids = _encode(parsed, api.tokenizer)
    return {
        "count": len(ids),
        "max_model_len": api.require_ready().max_model_len,
        "tokens": ids,
        "token_strs": api.tokenizer.pieces(ids) if parsed.return_token_strs else None,
    }


def _encode(parsed: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    adds = parsed.add_special_tokens
    if parsed.messages is None:
        return tokenizer.encode(parsed.prompt or "", add_special_tokens=adds is not False)
    messages = [message.model_dump(exclude_none=True) for message in parsed.messages]
    options = as_chat(parsed).template_options
    return tokenizer.encode_chat(messages, add_special_tokens=bool(adds), **options)


def _detokenize(members: dict[str, Any], api: Api) -> dict[str, Any]:
    parsed = parse_detokenize(members)
    check_model(parsed.model or api.model_names[0], api.model_names)
    if parsed.tokens:
        check_token_ids(parsed.tokens, api.require_ready().vocab_size, "tokens")
    return {"prompt": api.tokenizer.decode_all(parsed.tokens)}

"""The paths that need only the tokenizer: /tokenize, /detokenize, and the path of
Anthropic's API that counts tokens.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.http.api import Api
from engine.http.limits import check_token_ids, set_default_model
from engine.http.middleware import cancelled_on_disconnect, read_json
from engine.http.text_workers import LONG_CHARS
from protocol.anthropic.errors import COUNT_TOKENS_PATH
from protocol.anthropic.request import MessagesChat, parse_count_tokens
from protocol.http.deadlines import deadline_of, enforce_deadline
from protocol.openai.requests import validate
from protocol.openai.tokenize import DetokenizeRequest, TokenizeRequest

_Work = Callable[[dict[str, Any], int], Awaitable[bytes]]


class TokenizerPages:
    """The handlers of one server for the paths that need only the tokenizer."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @property
    def handlers(self) -> dict[str, Callable[..., Any]]:
        """The handlers, by path."""
        works: dict[str, _Work] = {
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            COUNT_TOKENS_PATH: self._count_tokens,
        }
        return {path: partial(self._answer, work=work) for path, work in works.items()}

    async def _answer(self, request: Request, work: _Work) -> Response:
        """Answer a call that needs only the tokenizer.

        Args:
            work: returns the JSON response. Its arguments are the body's members and
                the body's size in bytes.
        """
        settings = self._api.settings
        self._api.client.require_ready()  # succeeds only once the tokenizer is loaded
        async with enforce_deadline(
            deadline_of(request.scope["headers"], settings.request_timeout_s)
        ):
            members, num_bytes = await read_json(request, settings.max_body_bytes)
            set_default_model(members, self._api.model_name)
            async with cancelled_on_disconnect(request.receive):
                answer = await work(members, num_bytes)
            return Response(answer, media_type="application/json")

    async def _tokenize(self, members: dict[str, Any], num_bytes: int) -> bytes:
        api = self._api
        length = api.client.require_ready().max_model_len
        api.text_encoder.check_num_items(members, length)

        def parse() -> TokenizeRequest:
            api.text_encoder.check_num_chars(members, length)
            return validate(TokenizeRequest, members)

        parsed = await api.text_encoder.run_python(num_bytes, parse)
        # Clients use the count to learn how far a text exceeds the context. So a text
        # that exceeds the context is not refused if it has at most LONG_CHARS
        # characters.
        (ids,) = await api.text_encoder.tokenize(
            parsed.as_generation(), num_bytes, length, unchecked_chars=LONG_CHARS
        )

        def encode_answer() -> bytes:
            pieces = api.tokenizer.pieces(ids) if parsed.return_token_strs else None
            answer = {
                "count": len(ids),
                "max_model_len": length,
                "tokens": ids,
                "token_strs": pieces,
            }
            return msgspec.json.encode(answer)

        return await api.text_encoder.run(len(ids), encode_answer)

    async def _detokenize(self, members: dict[str, Any], num_bytes: int) -> bytes:
        api = self._api

        def encode_answer() -> bytes:
            parsed = validate(DetokenizeRequest, members)
            if parsed.tokens:
                check_token_ids(
                    parsed.tokens, api.client.require_ready().vocab_size, "tokens"
                )
            text = api.tokenizer.decode_all(parsed.tokens)
            return msgspec.json.encode({"prompt": text})

        return await api.text_encoder.run(num_bytes, encode_answer)

    async def _count_tokens(self, members: dict[str, Any], num_bytes: int) -> bytes:
        api = self._api
        length = api.client.require_ready().max_model_len
        api.text_encoder.check_num_items(members, length)

        def parse() -> MessagesChat:
            api.text_encoder.check_num_chars(members, length)
            return parse_count_tokens(members)

        parsed = await api.run_parser(num_bytes, parse)
        # As in /tokenize, a prompt that exceeds the context is counted, not refused.
        (ids,) = await api.text_encoder.tokenize(
            parsed, num_bytes, length, unchecked_chars=LONG_CHARS
        )
        return msgspec.json.encode({"input_tokens": len(ids)})

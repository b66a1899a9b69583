"""One call of /v1/completions or /v1/chat/completions: from the body to the last byte.

    body -> parse -> tokenize -> AddRequests (with the server's hooks) -> Generation -> response

What happens after an AddRequest is accepted is in http_call.py.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.client import Engine
from engine.http_call import CLIENT_GONE, Call, Generation
from engine.http_choice import Choice
from engine.http_hooks import HttpSettings, ServerHooks
from engine.http_middleware import (
    ClientDisconnected,
    error_response,
    read_body,
)
from engine.http_tally import Tally
from engine.tokenizer import Tokenizer
from protocol.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    NoServerAvailable,
)
from protocol.logging import current_request_id
from protocol.messages import AddRequest, EngineReady
from protocol.metrics import Metrics
from protocol.openai import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    ChatWriter,
    CompletionRequest,
    CompletionWriter,
    GenerationRequest,
    ResponseWriter,
    parse_chat,
    parse_completion,
    parse_json_object,
)

_INLINE_CHARS = 16384  # longer texts are tokenized off the event loop


@dataclass(frozen=True)
class Endpoint:
    """What differs between the two endpoints."""

    name: str
    parse: Callable[[dict[str, Any]], GenerationRequest]
    writer: type[ResponseWriter]


COMPLETIONS = Endpoint("completions", parse_completion, CompletionWriter)
CHAT = Endpoint("chat", parse_chat, ChatWriter)


@dataclass(frozen=True)
class Api:
    """Everything a call needs, made once per application."""

    client: Engine
    tokenizer: Tokenizer
    settings: HttpSettings
    hooks: ServerHooks
    metrics: Metrics

    @property
    def model_names(self) -> list[str]:
        return [self.settings.served_model_name or self.settings.model]

    async def respond(self, request: Request, endpoint: Endpoint) -> Response:
        """Answers one HTTP request; never raises a BatonError."""
        tally = Tally(self.metrics, endpoint.name)
        members: dict[str, Any] = {}
        try:
            members = parse_json_object(await read_body(request, self.settings.max_body_bytes))
            parsed = endpoint.parse(members)
            call = await self._start(parsed, endpoint, tally)
        except BatonError as error:
            for message in self.hooks.refused(members.get("kv_transfer_params")):
                self.client.tell(message)
            tally.close(error)
            return error_response(error)
        except ClientDisconnected as gone:
            tally.close(gone)
            return Response(status_code=CLIENT_GONE)
        except BaseException as error:
            tally.close(error)
            raise
        return await call.respond(request.receive)

    async def _start(self, parsed: GenerationRequest, endpoint: Endpoint, tally: Tally) -> Call:
        if parsed.model not in self.model_names:
            raise ModelNotFound(
                f"`model` is {parsed.model[:200]!r}; this server has {self.model_names[0]!r}.",
                param="model",
            )
        ready = self._require_ready()
        prompts = await self._tokenize(parsed, ready)
        adds = self._plan(parsed, prompts, ready)
        writer = endpoint.writer(
            secrets.token_hex(16),
            int(time.time()),
            parsed.model,
            include_usage=parsed.include_usage,
            return_token_ids=parsed.return_token_ids,
        )
        tally.accepted(sum(map(len, prompts)))
        choices = {
            add.request_id: Choice(
                i,
                parsed,
                add.token_ids,
                self.tokenizer,
                max_tokens=add.max_tokens,
                end_ids=add.stop_token_ids,
            )
            for i, add in enumerate(adds)
        }
        generation = Generation(self.client.submit(adds), choices, tally)
        return Call(self.hooks, parsed, writer, generation, tally)

    def _require_ready(self) -> EngineReady:
        if self.client.ready is None and self.client.healthy:
            raise NoServerAvailable("The engine is still starting; try again soon.")
        self.client.check_alive()
        assert self.client.ready is not None
        return self.client.ready

    async def _tokenize(self, parsed: GenerationRequest, ready: EngineReady) -> list[list[int]]:
        param = "messages" if isinstance(parsed, ChatRequest) else "prompt"
        sizes = _num_chars(parsed)
        at_least = self.tokenizer.min_tokens(max(sizes, default=0))
        if at_least >= ready.max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has at least {at_least} tokens and the context holds "
                f"{ready.max_model_len}; shorten the prompt.",
                param=param,
            )
        if sum(sizes) > _INLINE_CHARS:
            prompts = await asyncio.to_thread(self._encode, parsed)
        else:
            prompts = self._encode(parsed)
        for ids in prompts:
            if not ids:
                raise InvalidRequest(f"`{param}` has no tokens; send some text.", param=param)
            if min(ids) < 0 or max(ids) >= ready.vocab_size:
                bad = min(ids) if min(ids) < 0 else max(ids)
                raise InvalidRequest(
                    f"`{param}` has the token id {bad}; ids are from 0 to {ready.vocab_size - 1}.",
                    param=param,
                )
        return prompts

    def _encode(self, parsed: GenerationRequest) -> list[list[int]]:
        if isinstance(parsed, ChatRequest):
            messages = [message.model_dump(exclude_none=True) for message in parsed.messages]
            return [self.tokenizer.encode_chat(messages)]
        assert isinstance(parsed, CompletionRequest)
        return [
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in parsed.prompts
        ]

    def _plan(
        self, parsed: GenerationRequest, prompts: list[list[int]], ready: EngineReady
    ) -> list[AddRequest]:
        limits = [token_limit(parsed, len(ids), ready.max_model_len) for ids in prompts]
        seed = parsed.seed if parsed.seed is not None else secrets.randbits(63)
        sampling = parsed.sampling(seed)
        stop_token_ids = [] if parsed.ignore_eos else list(self.tokenizer.eos_ids)
        extras = self.hooks.prepare(parsed, prompts, sampling, stop_token_ids)
        # Unique even where a client uses one X-Request-Id twice, and short whatever it sent.
        unique = f"{(current_request_id() or '')[:64]}-{secrets.token_hex(6)}"
        common = {
            "sampling": sampling,
            "stop_token_ids": stop_token_ids,
        }
        return [
            AddRequest(
                request_id=f"{unique}-{index}",
                token_ids=ids,
                **{**common, "max_tokens": limits[index], **extras[index]},
            )
            for index, ids in enumerate(prompts)
        ]


def _num_chars(parsed: GenerationRequest) -> list[int]:
    """Characters of each prompt that is text."""
    if isinstance(parsed, ChatRequest):
        return [sum(len(message.content) for message in parsed.messages)]
    assert isinstance(parsed, CompletionRequest)
    return [len(prompt) for prompt in parsed.prompts if isinstance(prompt, str)]


def token_limit(parsed: GenerationRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """How many tokens a prompt may generate.

    Raises:
        ContextLengthExceeded: the prompt, or it and the limit the client asked for, do not fit.
    """
    room = max_model_len - num_prompt_tokens
    param = "messages" if isinstance(parsed, ChatRequest) else "prompt"
    if room < 1:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens and the context holds {max_model_len}; "
            f"shorten the prompt to at most {max_model_len - 1} tokens.",
            param=param,
        )
    asked = parsed.token_limit
    if asked is None:
        return room if isinstance(parsed, ChatRequest) else min(DEFAULT_COMPLETION_TOKENS, room)
    if asked > room:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens and `max_tokens` asks for {asked} more, "
            f"but the context holds {max_model_len}; lower `max_tokens` to at most {room} or "
            "shorten the prompt.",
            param="max_tokens",
        )
    return asked

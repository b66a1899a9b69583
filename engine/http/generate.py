"""One call of an endpoint that generates: from the body to the last byte.

    body -> parse -> tokenize -> AddRequests (with the server's hooks) -> PromptGeneration
         -> response

What happens after an AddRequest is accepted is in call.py.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.http.call import ChoiceGroup, HttpRequestState, PromptGeneration
from engine.http.choice import ChoiceStream
from engine.http.hooks import HttpSettings, ServerHooks
from engine.http.limits import (
    check_against_server,
    check_model,
    check_size,
    check_token_ids,
    fill_in_model,
    prompt_param,
    token_limit,
)
from engine.http.middleware import (
    CLIENT_GONE,
    cancelled_on_disconnect,
    error_response,
    read_body,
    refusal_of,
)
from engine.http.prompt import Namer, Prompt
from engine.http.request_stats import RequestStats
from engine.http.text_encoder import TextEncoder, given_texts, text_digest
from engine.http.tools import demands_of, new_tool_parser
from engine.process.client import Engine
from engine.text.grammar_check import GrammarChecker
from engine.text.tokenizer import Tokenizer
from protocol.errors import (
    BatonError,
    NoServerAvailable,
)
from protocol.http.body import ClientDisconnected
from protocol.kv_params import sender_releases
from protocol.messages import AddRequest, EngineReady
from protocol.metrics import Metrics
from protocol.openai.api import (
    ChatWriter,
    CompletionWriter,
    GenerationRequest,
    ResponseWriter,
    client_request,
    decode_context,
    parse_chat,
    parse_completion,
    parse_json_object,
)
from protocol.openai.responses_request import ResponsesChat, parse_responses
from protocol.openai.responses_writer import ResponsesWriter
from protocol.openai.sampling import GenerationConfig
from protocol.process.logging import current_request_id

# Larger bodies are checked off the event loop: one of many small messages takes half a second for
# a megabyte.
INLINE_BODY_BYTES = 1 << 16


@dataclass(frozen=True)
class Endpoint:
    """What differs between the endpoints."""

    name: str
    parse: Callable[[dict[str, Any]], GenerationRequest]
    writer: type[ResponseWriter]


COMPLETIONS = Endpoint("completions", parse_completion, CompletionWriter)
CHAT = Endpoint("chat", parse_chat, ChatWriter)
RESPONSES = Endpoint("responses", parse_responses, ResponsesWriter)


def _parse(
    endpoint: Endpoint, members: dict[str, Any], config: GenerationConfig
) -> tuple[GenerationRequest, GenerationRequest | None]:
    """A request, and the client's own where it is the prefill leg of one: what the decode server
    would refuse after the prefill."""
    parsed, asked = endpoint.parse(members).with_defaults(config), client_request(members)
    return parsed, None if asked is None else endpoint.parse(asked)


@dataclass(frozen=True)
class Api:
    """Everything a call needs, made once per application."""

    client: Engine
    tokenizer: Tokenizer
    settings: HttpSettings
    hooks: ServerHooks
    metrics: Metrics
    texts: TextEncoder
    grammars: GrammarChecker
    generation_config: GenerationConfig  # what requests get where they do not say
    fingerprint: str | None = None  # `system_fingerprint` of every answer

    @property
    def model_names(self) -> list[str]:
        return [self.settings.served_model_name or self.settings.model]

    async def respond(self, request: Request, endpoint: Endpoint) -> Response:
        """Answers one HTTP request; never raises a BatonError."""
        tally = RequestStats(self.metrics, endpoint.name)
        members: dict[str, Any] = {}
        config = self.generation_config
        try:
            raw = await read_body(request, self.settings.max_body_bytes)
            members = parse_json_object(raw)
            fill_in_model(members, self.model_names)
            if len(raw) > INLINE_BODY_BYTES:
                parsed, behind = await asyncio.to_thread(_parse, endpoint, members, config)
            else:
                parsed, behind = _parse(endpoint, members, config)
            context = decode_context(members)
            call = await self._start(request, parsed, endpoint, tally, behind, context)
        except (BatonError, RecursionError) as raised:
            error = refusal_of(raised)
            offered = members.get("kv_transfer_params")
            if not sender_releases(offered):
                for message in self.hooks.refused(offered):
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

    async def _start(
        self,
        request: Request,
        parsed: GenerationRequest,
        endpoint: Endpoint,
        tally: RequestStats,
        behind: GenerationRequest | None,
        context: int | None,
    ) -> HttpRequestState:
        """Takes a request on.

        Args:
            behind: the client's own request, where `parsed` is its prefill leg.
            context: of the decode server that `behind` is for.
        """
        check_model(parsed.model, self.model_names)
        ready = self.require_ready()
        check_against_server(parsed, ready.vocab_size, self.settings.max_num_seqs)
        if demands := demands_of(parsed):
            async with cancelled_on_disconnect(request.receive):
                await self.grammars.check(demands)
        prompts = await self._tokenize(parsed, ready)
        asked, room = parsed, ready.max_model_len
        if behind is not None and context is not None:
            asked, room = behind, context
        default = self.generation_config.max_new_tokens
        lengths = [len(ids) + token_limit(asked, len(ids), room, default) for ids in prompts]
        check_size(parsed, lengths, room, self.settings.max_num_seqs)
        adds = self._plan(parsed, prompts, ready)
        tally.on_end(self.grammars.hold(adds[0].sampling.grammar))
        tally.on_end(self.hooks.admit(adds, ready, parsed.kv_transfer_params))
        subscription = self.client.submit(adds)
        try:  # all else is made while the engine has begun
            tally.accepted(sum(map(len, prompts)))
            writer = self._writer(parsed, endpoint)
            generation = PromptGeneration(subscription, self._groups(parsed, adds), parsed.n, tally)
        except BaseException:
            subscription.close()
            raise
        return HttpRequestState(self.hooks, parsed, writer, generation, tally)

    def _writer(self, parsed: GenerationRequest, endpoint: Endpoint) -> ResponseWriter:
        response_id, created = secrets.token_hex(16), int(time.time())
        if isinstance(parsed, ResponsesChat):
            return ResponsesWriter(response_id, created, parsed.model, asked=parsed.asked)
        return endpoint.writer(
            response_id,
            created,
            parsed.model,
            fingerprint=self.fingerprint,
            include_usage=parsed.include_usage,
            continuous_usage=parsed.continuous_usage,
            return_token_ids=parsed.return_token_ids,
        )

    def _groups(self, parsed: GenerationRequest, adds: list[AddRequest]) -> dict[str, ChoiceGroup]:
        namer = Namer(self.tokenizer, as_ids=parsed.return_tokens_as_token_ids)
        groups: dict[str, ChoiceGroup] = {}
        for number, (add, given) in enumerate(zip(adds, given_texts(parsed), strict=True)):
            prompt = Prompt(parsed, add.token_ids, given, self.tokenizer, namer)
            choices = [
                ChoiceStream(
                    number * add.num_choices + choice,
                    parsed,
                    prompt,
                    self.tokenizer,
                    namer,
                    max_tokens=add.max_tokens,
                    end_ids=add.stop_token_ids,
                    tool_parser=new_tool_parser(
                        parsed, self.settings.tool_call_parser, self.tokenizer
                    ),
                )
                for choice in range(add.num_choices)
            ]
            groups[add.request_id] = ChoiceGroup(prompt, choices)
        return groups

    def require_ready(self) -> EngineReady:
        """What the engine said of itself. Raises ServiceError before it did, or when it died."""
        if self.client.ready is None and self.client.healthy:
            raise NoServerAvailable("The engine is still starting; try again soon.")
        self.client.check_alive()
        assert self.client.ready is not None
        return self.client.ready

    async def _tokenize(self, parsed: GenerationRequest, ready: EngineReady) -> list[list[int]]:
        param = prompt_param(parsed)
        prompts = self._handed_over(parsed)
        if prompts is None:
            prompts = await self.texts.tokenize(parsed, ready.max_model_len)
        for ids in prompts:
            check_token_ids(ids, ready.vocab_size, param)
        return prompts

    def _handed_over(self, parsed: GenerationRequest) -> list[list[int]] | None:
        """The ids that a prefill server made of this very text, if it told them."""
        told = self.hooks.tokenized(parsed.kv_transfer_params)
        if told is None or told[0] != text_digest(parsed, self.tokenizer):
            return None
        return [told[1]]

    def _plan(
        self, parsed: GenerationRequest, prompts: list[list[int]], ready: EngineReady
    ) -> list[AddRequest]:
        unasked = self.generation_config.max_new_tokens
        limits = [token_limit(parsed, len(ids), ready.max_model_len, unasked) for ids in prompts]
        seed = parsed.seed if parsed.seed is not None else secrets.randbits(63)
        sampling = parsed.sampling(seed)
        end_ids = [] if parsed.ignore_eos else list(self.tokenizer.eos_ids)
        stop_token_ids = [*end_ids, *(i for i in parsed.stop_token_ids if i not in end_ids)]
        digest = text_digest(parsed, self.tokenizer) if parsed.is_prefill else None
        # Unique even where a client uses one X-Request-Id twice, and short whatever it sent.
        unique = f"{(current_request_id() or '')[:64]}-{secrets.token_hex(6)}"
        adds = [
            AddRequest(
                request_id=f"{unique}-{index}",
                token_ids=ids,
                sampling=sampling,
                max_tokens=limits[index],
                stop_token_ids=stop_token_ids,
                num_choices=parsed.num_candidates,
                num_prompt_logprobs=parsed.num_prompt_logprobs,
                text_digest=digest,
                grammar_bytes=self.grammars.nbytes(sampling.grammar),
            )
            for index, ids in enumerate(prompts)
        ]
        return self.hooks.prepare(parsed, adds, ready)

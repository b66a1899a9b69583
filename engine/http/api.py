"""What all calls of one HTTP application share, and what each kind of server adds to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from engine.http.request_stats import ServerMetrics
from engine.http.text_encoder import TextEncoder, check_parsers
from engine.process.client import EngineClient
from engine.text.grammar_check import GrammarChecker
from engine.text.tokenizer import Tokenizer
from protocol.http.access import Access, check, grant_of
from protocol.messages import AddRequest, EngineInput, EngineReady, TokenDelta
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import validate
from protocol.openai.responses import ChatWriter, CompletionWriter, ResponseWriter
from protocol.openai.responses_request import parse_responses
from protocol.openai.responses_writer import ResponsesWriter
from protocol.openai.sampling import GenerationConfig, GenerationRequest
from protocol.settings.settings import EngineSettings

# kv_transfer_params, which a proxy adds to a request, do not count as the client's. They carry a
# prompt's logprobs where those are wanted: 20 bytes each, limits.MAX_PROMPT_LOGPROBS of them.
KV_PARAMS_BYTES = 2**26


class Endpoint(NamedTuple):
    """What differs between the endpoints that generate."""

    name: str
    parse: Callable[[dict[str, Any]], GenerationRequest]
    writer: type[ResponseWriter]


ENDPOINTS: Final = {
    "/v1/completions": Endpoint(
        "completions", partial(validate, CompletionRequest), CompletionWriter
    ),
    "/v1/chat/completions": Endpoint(
        "chat", partial(validate, ChatRequest), ChatWriter
    ),
    "/v1/responses": Endpoint("responses", parse_responses, ResponsesWriter),
}


class ServerHooks:
    """What legs of requests that two servers share add to the HTTP API; by itself, nothing."""

    def prepare(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        """The engine's requests, one per prompt, with what `kv_transfer_params` asks for.

        Raises:
            KVParamsRejected: the request's kv_transfer_params cannot be honoured.
        """
        return adds

    def admit(
        self,
        adds: Sequence[AddRequest],
        ready: EngineReady,
        kv_transfer_params: object = None,
    ) -> Callable[[], None]:
        """Takes a request on, or not; the result is called once, when the request has ended.

        Raises:
            Overloaded: there is no room for these prompts together.
        """
        return nothing

    def refused(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        """What to tell the engine when a request with these params was refused, or when nobody
        will come for the KV that they stand for."""
        return ()

    def finish(self, finals: Sequence[TokenDelta]) -> dict[str, Any]:
        """Top-level members of the response, from the last delta of each prompt, in order."""
        return {}


def nothing() -> None:
    """What an admitted request's end asks for, unless a server says otherwise."""


@dataclass
class Api:
    """Everything a call needs, made once per application. Calls that need what is not there before
    `take_model` are refused by `client.require_ready` until then. Raises ValueError where the
    settings name keys or certificates that cannot be.

    Args:
        secret: of the cluster, with which proxies sign.

    Attributes:
        on_drain: has the server end in order.
        fingerprint: the `system_fingerprint` of answers.
        generation_config: the defaults for fields that a request leaves out.
    """

    client: EngineClient
    settings: EngineSettings
    hooks: ServerHooks
    secret: bytes = b""
    on_drain: Callable[[], None] = field(default_factory=lambda: nothing, init=False)
    fingerprint: str | None = field(default=None, init=False)
    generation_config: GenerationConfig = field(
        default_factory=GenerationConfig, init=False
    )

    def __post_init__(self) -> None:
        check(self.settings)
        self.metrics = ServerMetrics(endpoint.name for endpoint in ENDPOINTS.values())
        self.access = Access(self.settings, self.metrics)

    def take_model(
        self,
        tokenizer: Tokenizer,
        fingerprint: str | None = None,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        """What is known once the model's files were read. Raises ValueError where they have not
        what an option needs."""
        check_parsers(self.settings, tokenizer)
        self.tokenizer, self.fingerprint = tokenizer, fingerprint
        self.generation_config = generation_config or GenerationConfig()
        self.texts = TextEncoder(
            tokenizer,
            self.settings.tool_call_parser,
            split_special_tokens=self.settings.split_special_tokens,
        )
        self.grammars = GrammarChecker(tokenizer, self.settings.grammar_timeout_s)

    def salted(
        self,
        adds: list[AddRequest],
        parsed: GenerationRequest,
        scope: Mapping[str, Any],
    ) -> list[AddRequest]:
        """The engine's requests with the cache salt of their request and of its API key."""
        salt = grant_of(scope).cache_salt(parsed.cache_salt, self.secret)
        return [replace(add, cache_salt=salt) for add in adds] if salt else adds

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.settings.model

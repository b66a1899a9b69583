"""The state that all HTTP calls of one server share, and the hooks for the prefill and
decode legs of disaggregated requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from engine.http.request_stats import ServerMetrics
from engine.http.text_encoder import TextEncoder, check_parsers
from engine.process.client import EngineClient
from engine.text.grammar_check import GrammarChecker
from engine.text.tokenizer import Tokenizer
from protocol.http.access import Access, check, grant_of
from protocol.http.endpoints import ENDPOINTS
from protocol.http.json_bounds import INLINE_BODY_BYTES
from protocol.messages import AddRequest, EngineInput, EngineReady, TokenDelta
from protocol.openai.sampling import GenerationConfig, GenerationRequest
from protocol.settings.settings import EngineSettings

# Maximum size of the members that a proxy adds to a body. They do not count towards
# --max-body-bytes. The member kv_transfer_params contains the prompt's logprobs if the
# client requests them: 20 bytes each, and at most limits.MAX_PROMPT_LOGPROBS.
KV_PARAMS_BYTES = 2**26

_T = TypeVar("_T")


class ServerHooks:
    """Hooks with which the legs of disaggregated requests extend the HTTP API.

    The hooks of this base class do nothing.
    """

    def prepare(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        """Return `adds`, changed as `request.kv_transfer_params` requires.

        Args:
            adds: the requests to the engine, one for each prompt.
            ready: the engine's report about itself.

        Raises:
            KVParamsRejected: the request's kv_transfer_params cannot be honored.
        """
        return adds

    def admit(
        self,
        adds: Sequence[AddRequest],
        ready: EngineReady,
        kv_transfer_params: object = None,
    ) -> Callable[[], None]:
        """Reserve the resources that a request needs until the request ends.

        Returns:
            A callback that frees the reservation. The caller calls it once, when the
            request has ended.

        Raises:
            Overloaded: the requests that have several prompts each would together hold
                too many KV blocks.
        """
        return no_op

    def release_messages(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        """Return messages to the engine that release the KV of `kv_transfer_params`.

        The server sends these messages when it refuses a request that has these params,
        or when no server will pull the KV to which these params refer.
        """
        return ()

    def response_members(self, last_deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        """Return the members that the leg adds to the JSON response.

        Args:
            last_deltas: the last delta of each prompt's first choice, in the order of
                the prompts.
        """
        return {}


def no_op() -> None:
    """Do nothing. `ServerHooks.admit` returns this if it has reserved nothing."""


@dataclass
class Api:
    """The state that every call needs. Each application, and so each server, has one.

    `set_model` adds the model. Until `set_model` has been called,
    `client.require_ready` refuses the calls that need the model.

    Args:
        secret: the cluster secret, with which proxies sign data in requests.

    Attributes:
        on_drain: starts the shutdown of the server: its streams migrate or finish.
        fingerprint: the `system_fingerprint` of responses.
        generation_config: the model's defaults for fields that a request leaves out.

    Raises:
        ValueError: a TLS file is unusable, or API keys or packages that an option needs
            are missing.
    """

    client: EngineClient
    settings: EngineSettings
    hooks: ServerHooks
    secret: bytes = b""
    on_drain: Callable[[], None] = field(default_factory=lambda: no_op, init=False)
    fingerprint: str | None = field(default=None, init=False)
    generation_config: GenerationConfig = field(
        default_factory=GenerationConfig, init=False
    )

    def __post_init__(self) -> None:
        check(self.settings)
        self.metrics = ServerMetrics(
            [endpoint.name for endpoint in ENDPOINTS.values()],
            model_name=self.model_name,
            role=self.settings.role,
            options=self.settings,
        )
        self.access = Access(self.settings, self.metrics)

    def set_model(
        self,
        tokenizer: Tokenizer,
        fingerprint: str | None = None,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        """Set the tokenizer, the fingerprint and the defaults of the model.

        Raises:
            ValueError: the model lacks a token that --reasoning-parser or
                --tool-call-parser needs.
        """
        check_parsers(self.settings, tokenizer)
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.generation_config = generation_config or GenerationConfig()
        self.text_encoder = TextEncoder(
            tokenizer,
            self.settings.tool_call_parser,
            split_special_tokens=self.settings.split_special_tokens,
        )
        self.grammars = GrammarChecker(tokenizer, self.settings.grammar_timeout_s)

    async def run_parser(self, num_bytes: int, parse: Callable[[], _T]) -> _T:
        """Run `parse`, which parses a request, in a thread unless its body is small.

        Only members that proxies add can make a body exceed --max-body-bytes. These
        members do not count as work.

        Args:
            num_bytes: the size of the body.
        """
        size = 0
        if num_bytes > INLINE_BODY_BYTES:
            size = min(num_bytes, self.settings.max_body_bytes)
        return await self.text_encoder.run_python(size, parse)

    def with_cache_salt(
        self,
        adds: list[AddRequest],
        parsed: GenerationRequest,
        scope: Mapping[str, Any],
    ) -> list[AddRequest]:
        """Return the requests to the engine with a cache salt.

        The salt depends on the request's `cache_salt` and on the client's API key.
        `adds` is returned unchanged if there is no salt.
        """
        salt = grant_of(scope).cache_salt(parsed.cache_salt, self.secret)
        if not salt:
            return adds
        return [replace(add, cache_salt=salt) for add in adds]

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.settings.model

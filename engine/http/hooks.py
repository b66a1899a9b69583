"""What engine/http/app.py needs to be told by the server that it serves."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from protocol.messages import AddRequest, EngineInput, EngineReady, TokenDelta
from protocol.openai.api import GenerationRequest


class HttpSettings(Protocol):
    """The settings that this module reads."""

    @property
    def model(self) -> str: ...
    @property
    def served_model_name(self) -> str | None: ...
    @property
    def max_body_bytes(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def cors_origin(self) -> tuple[str, ...]: ...
    @property
    def tool_call_parser(self) -> str: ...
    @property
    def grammar_timeout_s(self) -> float: ...


class ServerHooks:
    """What a prefill or a decode server adds to the HTTP API; by itself, nothing."""

    role: str = "both"

    def prepare(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        """The engine's requests, one per prompt, with what `kv_transfer_params` asks for.

        Raises:
            KVParamsRejected: the request's kv_transfer_params cannot be honoured.
        """
        return adds

    def tokenized(self, kv_transfer_params: object) -> tuple[str, list[int]] | None:
        """The text digest and the token ids of the one prompt, where a holder of the cluster
        secret tells them; see http_text.text_digest."""
        return None

    def admit(
        self, adds: Sequence[AddRequest], ready: EngineReady, kv_transfer_params: object = None
    ) -> Callable[[], None]:
        """Takes a request on, or not; what it returns is called once, when the request has ended.

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

"""What a server adds to the HTTP application."""

from collections.abc import Callable, Sequence
from typing import Any

from protocol.messages import AddRequest, EngineInput, EngineReady, TokenDelta
from protocol.openai.sampling import GenerationRequest

# kv_transfer_params, which a proxy adds to a request, do not count as the client's. They carry a
# prompt's logprobs where those are wanted: 20 bytes each, 20 of them at every token.
LOGPROB_BYTES = 20
KV_PARAMS_BYTES = 2**26


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
        secret tells them; see text_encoder.text_digest."""
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

"""The prefill server's HTTP side: which requests keep their KV, and what the answer adds."""

from collections.abc import Mapping, Sequence
from typing import Any

from protocol import kv_params
from protocol.errors import InvalidRequest
from protocol.messages import EngineInput, SamplingParams, TokenDelta
from protocol.openai import GenerationRequest


class PrefillHooks:
    """A request with `do_remote_decode` is prefilled, its KV leased and described in the answer.

    A request without is an ordinary one: this server then generates all of it.
    """

    role = "prefill"

    def __init__(self, secret: bytes) -> None:
        del secret  # the engine signs: it knows the blocks

    def prepare(
        self,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        stop_token_ids: Sequence[int] = (),
    ) -> Sequence[Mapping[str, Any]]:
        if not kv_params.is_prefill_request(request.kv_transfer_params):
            return [{} for _ in prompts]
        if request.token_limit != 1 or request.stream:
            raise InvalidRequest(
                "a request with kv_transfer_params.do_remote_decode must have max_tokens 1 and "
                f"stream false; it has max_tokens {request.token_limit}, stream {request.stream}",
                param="kv_transfer_params.do_remote_decode",
            )
        return [{"retain_kv": True} for _ in prompts]

    def refused(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        return ()

    def finish(self, finals: Sequence[TokenDelta]) -> dict[str, Any]:
        params = [final.kv_transfer_params for final in finals]
        if any(one is None for one in params):
            return {}
        return {"kv_transfer_params": params[0] if len(params) == 1 else params}

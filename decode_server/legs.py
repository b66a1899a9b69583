"""A server that takes either leg of a request."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.http.api import ServerHooks
from protocol.kv_params import is_prefill_request
from protocol.messages import AddRequest, EngineInput, EngineReady, TokenDelta
from protocol.openai.sampling import GenerationRequest


class Legs(ServerHooks):
    """Takes either leg of a request, by what its kv_transfer_params ask for."""

    def __init__(self, prefill: ServerHooks, decode: ServerHooks) -> None:
        self._prefill, self._decode = prefill, decode

    def prepare(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        offered = request.kv_transfer_params
        is_prefill = isinstance(offered, dict) and is_prefill_request(offered)
        leg = self._prefill if is_prefill else self._decode
        return self._decode.hinted(offered, leg.prepare(request, adds, ready))

    def tokenized(self, kv_transfer_params: object) -> tuple[str, list[int]] | None:
        return self._decode.tokenized(kv_transfer_params)

    def admit(
        self, adds: Sequence[AddRequest], ready: EngineReady, kv_transfer_params: object = None
    ) -> Callable[[], None]:
        return self._prefill.admit(adds, ready, kv_transfer_params)

    def refused(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        both = self._prefill.refused(kv_transfer_params), self._decode.refused(kv_transfer_params)
        return [*both[0], *both[1]]

    def finish(self, finals: Sequence[TokenDelta]) -> dict[str, Any]:
        return self._prefill.finish(finals)

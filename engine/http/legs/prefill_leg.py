"""The prefill leg of a request: retains its KV, and refers to the KV in the answer."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from engine.http.api import ServerHooks, no_op
from protocol import kv_offers, kv_params
from protocol.errors import InvalidRequest, KVParamsRejected, Overloaded
from protocol.messages import (
    AbortRequest,
    AddRequest,
    EngineInput,
    EngineReady,
    TokenDelta,
)
from protocol.openai.sampling import GenerationRequest
from protocol.short_repr import short_repr

# Transfer ids that are stored, and requests of one id. An answer arrives or is lost
# within seconds, so older ids are not needed.
MAX_TRANSFERS = 16384


class PrefillLeg(ServerHooks):
    """Prefills a request with `do_remote_decode`, and leases its KV to another server.

    Args:
        is_reachable: whether other servers have an address to read this server's KV
            from.
    """

    def __init__(self, *, is_reachable: bool = True) -> None:
        self._is_reachable = is_reachable
        # The engine's requests by the `transfer_id` that a proxy gave their leg. A
        # proxy that gives up a leg cannot know whether the answer, which names leased
        # KV, was already sent.
        self._transfers: OrderedDict[str, deque[str]] = OrderedDict()
        self._num_batch_blocks = 0  # of unanswered requests with several prompts

    def prepare(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        if not self._is_reachable or ready.geometry.get("dcp", 1) != 1:
            fix = "start it without --dcp"
            if not self._is_reachable:
                fix = "give it --side-channel-host"
            raise KVParamsRejected(
                f"other servers cannot read the KV of this one: {fix}, or send the "
                "request to a prefill server",
                param="kv_transfer_params.do_remote_decode",
            )
        if request.token_limit != 1 or request.stream:
            limit = short_repr(request.token_limit)
            raise InvalidRequest(
                "a request with kv_transfer_params.do_remote_decode must have "
                f"max_tokens 1 and stream false; it has max_tokens {limit}, stream "
                f"{short_repr(request.stream)}",
                param="kv_transfer_params.do_remote_decode",
            )
        leg_id = kv_params.transfer_id(request.kv_transfer_params)
        prepared = []
        for index, add in enumerate(adds):
            prompt_id = leg_id and kv_offers.prompt_name(leg_id, index)
            prepared.append(replace(add, retain_kv=True, transfer_id=prompt_id))
        return prepared

    def admit(
        self,
        adds: Sequence[AddRequest],
        ready: EngineReady,
        kv_transfer_params: object = None,
    ) -> Callable[[], None]:
        """Bound the blocks that requests of several prompts hold together.

        Prompts of one answer keep their blocks until the last of them is computed.
        Without this bound they could wait for blocks that they hold themselves, or two
        such requests could deadlock. A decode server alone serves a request that is
        refused here.
        """
        if not adds[0].retain_kv:
            return no_op
        if name := kv_params.transfer_id(kv_transfer_params):
            # A proxy that retries sends several requests with one id.
            request_ids = self._transfers.setdefault(name, deque(maxlen=MAX_TRANSFERS))
            request_ids.extend(add.request_id for add in adds)
            self._transfers.move_to_end(name)
            if len(self._transfers) > MAX_TRANSFERS:
                self._transfers.popitem(last=False)
        if len(adds) == 1:
            return no_op
        num_blocks = sum(-(-len(add.token_ids) // ready.block_size) for add in adds)
        limit = ready.num_blocks // 2
        if self._num_batch_blocks + num_blocks > limit:
            raise Overloaded(
                f"{len(adds)} prompts need {num_blocks} KV blocks at once; requests of "
                f"several prompts may hold {limit}, and {self._num_batch_blocks} of "
                "these are taken"
            )
        self._num_batch_blocks += num_blocks

        def release() -> None:
            self._num_batch_blocks -= num_blocks

        return release

    def release_messages(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        """Return orders to abort the requests of a transfer that no proxy waits for."""
        name = kv_params.transfer_id(kv_transfer_params)
        return [
            AbortRequest(request_id)
            for request_id in self._transfers.pop(name or "", ())
        ]

    def finish(self, finals: Sequence[TokenDelta]) -> dict[str, Any]:
        params = [final.kv_transfer_params for final in finals]
        if any(param is None for param in params):
            return {}
        return {"kv_transfer_params": params[0] if len(params) == 1 else params}

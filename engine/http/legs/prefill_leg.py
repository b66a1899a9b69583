"""The prefill leg of a request: retains the KV and refers to it in the response."""

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

# Maximum number of stored transfer ids, and of stored request ids per transfer id. A
# response arrives or is lost within seconds, so the ids of old requests are not needed.
MAX_TRANSFERS = 16384


class PrefillLeg(ServerHooks):
    """The hooks of a request with `do_remote_decode`: its KV is leased after prefill.

    Args:
        is_reachable: whether this server has an address at which other servers can read
            its KV.
    """

    def __init__(self, *, is_reachable: bool = True) -> None:
        self._is_reachable = is_reachable
        # The ids of the requests to the engine, by the `transfer_id` that the proxy
        # assigned to their prefill leg. If the proxy abandons the leg, it may never
        # receive the response that refers to the leased KV. So the proxy releases the
        # KV by its transfer id.
        self._request_ids: OrderedDict[str, deque[str]] = OrderedDict()
        # Number of KV blocks of unfinished HTTP requests with several prompts.
        self._num_multi_prompt_blocks = 0

    def prepare(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        if not self._is_reachable or ready.geometry.get("dcp", 1) != 1:
            fix = "start this server without --dcp"
            if not self._is_reachable:
                fix = "start this server with --side-channel-host"
            raise KVParamsRejected(
                f"other servers cannot read the KV of this server: {fix}, or send the "
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
        transfer_id = kv_params.transfer_id(request.kv_transfer_params)
        prepared = []
        for index, add in enumerate(adds):
            prompt_id = transfer_id and kv_offers.prompt_transfer_id(transfer_id, index)
            prepared.append(replace(add, retain_kv=True, transfer_id=prompt_id))
        return prepared

    def admit(
        self,
        adds: Sequence[AddRequest],
        ready: EngineReady,
        kv_transfer_params: object = None,
    ) -> Callable[[], None]:
        """Record a request's transfer id, and reserve KV blocks for several prompts.

        The prompts of one request keep their blocks until all these prompts are
        computed. If requests with several prompts could use all blocks, they could
        deadlock: each would wait for blocks of the others. If this server refuses the
        request, the proxy sends the request only to a decode server.

        Returns:
            A callback that frees the reservation.

        Raises:
            Overloaded: the requests with several prompts would together hold more than
                half of the blocks.
        """
        if not adds[0].retain_kv:
            return no_op
        if transfer_id := kv_params.transfer_id(kv_transfer_params):
            # A proxy that retries a leg sends several requests with the same id.
            request_ids = self._request_ids.setdefault(
                transfer_id, deque(maxlen=MAX_TRANSFERS)
            )
            request_ids.extend(add.request_id for add in adds)
            self._request_ids.move_to_end(transfer_id)
            if len(self._request_ids) > MAX_TRANSFERS:
                self._request_ids.popitem(last=False)
        if len(adds) == 1:
            return no_op
        num_blocks = sum(-(-len(add.token_ids) // ready.block_size) for add in adds)
        limit = ready.num_blocks // 2
        if self._num_multi_prompt_blocks + num_blocks > limit:
            raise Overloaded(
                f"the request's {len(adds)} prompts need {num_blocks} KV blocks at "
                f"once; the limit for all requests with several prompts is {limit}, "
                f"and {self._num_multi_prompt_blocks} blocks are in use; send fewer "
                "prompts at once, or try again later"
            )
        self._num_multi_prompt_blocks += num_blocks

        def release() -> None:
            self._num_multi_prompt_blocks -= num_blocks

        return release

    def release_messages(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        """Forget a transfer id, and return messages that abort its requests.

        This is called when the proxy no longer waits for the transfer.
        """
        transfer_id = kv_params.transfer_id(kv_transfer_params)
        return [
            AbortRequest(request_id)
            for request_id in self._request_ids.pop(transfer_id or "", ())
        ]

    def response_members(self, last_deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        """Return the `kv_transfer_params` if the KV of every prompt is retained."""
        params = [delta.kv_transfer_params for delta in last_deltas]
        if any(param is None for param in params):
            return {}
        return {"kv_transfer_params": params[0] if len(params) == 1 else params}

"""Which engine requests belong to which prefill leg, by the `transfer_id` that a proxy gave it.

A proxy that gives up a prefill leg cannot know whether the answer, which alone names the leased KV,
is on its way. With the `transfer_id` it can cancel the requests of that leg.
"""

from collections import OrderedDict
from collections.abc import Sequence

MAX_REQUESTS = 16384  # that are remembered: an answer on its way is there, or lost, within seconds


class Transfers:
    """The last requests by the name of their transfer."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._requests: OrderedDict[str, list[str]] = OrderedDict()
        self._num_requests = 0

    def add(self, transfer_id: str, request_ids: Sequence[str]) -> None:
        """Remembers requests, beside others of this name: a proxy may have to ask twice."""
        self._requests.setdefault(transfer_id, []).extend(request_ids)
        self._requests.move_to_end(transfer_id)
        self._num_requests += len(request_ids)
        while self._num_requests > self._max_requests and len(self._requests) > 1:
            _, forgotten = self._requests.popitem(last=False)
            self._num_requests -= len(forgotten)

    def take(self, transfer_id: str) -> list[str]:
        """The requests of this name, which are forgotten then; none where it is unknown."""
        found = self._requests.pop(transfer_id, [])
        self._num_requests -= len(found)
        return found

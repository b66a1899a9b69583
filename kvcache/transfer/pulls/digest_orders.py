"""Digests of this engine's KV. Every rank computes a part of each digest."""

from collections.abc import Callable

from kvcache.transfer.pulls.messages import DigestOrder, RankEnded
from kvcache.verify.scope import DigestPart
from kvcache.verify.scope import OnSums as OnSums
from kvcache.verify.scope import Scope as Scope


class DigestOrders:
    """The DigestOrders in progress. Only the coordinator's thread uses this object.

    Args:
        broadcast: sends an order to every rank.
    """

    def __init__(
        self,
        num_ranks: int,
        total_kv_heads: int,
        broadcast: Callable[[DigestOrder], None],
    ) -> None:
        self._num_ranks = num_ranks
        self._total_kv_heads = total_kv_heads
        self._broadcast = broadcast
        # By id of the order: scope, `reply`, and the parts that have arrived so far.
        self._open: dict[str, tuple[Scope, OnSums, list[DigestPart | None]]] = {}

    def begin(self, order: DigestOrder, reply: OnSums) -> None:
        """Sends an order. `reply` is called with the sums of the parts of all ranks."""
        self._open[order.pull_id] = (order.scope, reply, [])
        self._broadcast(order)

    def on_report(self, report: RankEnded) -> None:
        """Adds a rank's part. After the last part, calls the `reply` of the order.

        Ignores the report if it belongs to no open order.
        """
        if report.pull_id not in self._open:
            return
        scope, reply, parts = self._open[report.pull_id]
        parts.append(report.part)
        if len(parts) == self._num_ranks:
            del self._open[report.pull_id]
            reply(scope.merge(parts, self._total_kv_heads))

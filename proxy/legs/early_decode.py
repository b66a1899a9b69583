"""The decode leg that is opened together with a prefill leg.

The decode server subscribes to the prompt's KV at the prefill server, and begins its
answer when the first token arrives. If the prefill leg is retried at another server, a
new decode leg replaces the first decode leg.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from proxy.body import error_of
from proxy.failover import FailoverState
from proxy.legs.call import Leg, LegFailed
from proxy.legs.upstreams import Upstreams
from proxy.membership import Kind, Server

# A decode server that refuses an offer names this parameter in its error.
_OFFER_PARAM = "kv_transfer_params.subscribe"


class EarlyDecode:
    """The decode leg of one request while its prefill leg runs.

    Args:
        open_leg: opens a decode leg that subscribes at the given prefill server. Raises
            LegFailed if that is not possible.
        failover: counts the decode servers that failed after receiving an offer.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        open_leg: Callable[[Server], Coroutine[Any, Any, Leg]],
        failover: FailoverState,
    ) -> None:
        self._upstreams = upstreams
        self._open_leg = open_leg
        self._failover = failover
        self._leg_done = asyncio.Event()
        self._is_decided = False
        self._is_taken = False
        self._leg: asyncio.Task[Leg] | None = None

    def follow(self, prefill: Server) -> None:
        """Open a new decode leg for a prefill leg that is about to start.

        Raises:
            asyncio.CancelledError: the decode leg was taken and no longer needs the
                prefill leg, which must not start again.
        """
        if self._is_taken:
            raise asyncio.CancelledError
        if self._is_decided:
            return
        self.close()
        self._leg = asyncio.create_task(self._open_leg(prefill))
        self._leg.add_done_callback(self._on_done)

    async def take(self, prefill: asyncio.Task[Any]) -> asyncio.Task[Leg] | None:
        """Return the decode leg when it has an answer, or a failure that is final.

        If the prefill leg succeeds first, this method still waits for the decode leg:
        the leg now has the KV that it waited for, and will have an answer soon.

        Returns:
            None if there is no usable decode leg. The answer of the prefill leg then
            decides what follows.
        """
        prefill.add_done_callback(self._on_done)
        while not (prefill.done() or (self._leg and self._leg.done())):
            self._leg_done.clear()
            await self._leg_done.wait()
        self._is_decided = True
        # A prefill leg that is still running will lend its KV.
        has_kv = not prefill.done() or lender_of(prefill) is not None
        if self._leg is None or not has_kv or await self._await_failure(self._leg):
            self.close()
            return None
        self._is_taken = True
        leg = self._leg
        self._leg = None
        return leg

    async def _await_failure(self, leg: asyncio.Task[Leg]) -> bool:
        """Wait for the decode leg; return True if it failed and may be replaced.

        If the server refused the offer, its trust circuit is opened. If the server
        failed after receiving the offer, `failover` counts the failure.
        """
        await asyncio.wait({leg})
        if error := leg.exception():
            if not isinstance(error, LegFailed):
                return False
            if not self._failover.count_and_check_retry(error.failure):
                return False
            if error.failure is None:
                return True
            return bool(self._upstreams.fleet.ready(Kind.DECODE))
        result = leg.result()
        param = error_of(result.response.body or b"", "param")
        if not param.startswith(_OFFER_PARAM):
            return False
        self._upstreams.open_trust_circuit(result.server)
        return True

    def _on_done(self, leg: asyncio.Task[Any]) -> None:
        self._leg_done.set()
        if not leg.cancelled():
            # This marks the exception as retrieved, so asyncio does not warn if `take`
            # never awaits this leg.
            leg.exception()

    def close(self) -> None:
        """End the decode leg if it was not taken."""
        leg = self._leg
        self._leg = None
        if leg is None or leg.cancel() or leg.cancelled() or leg.exception():
            return
        self._upstreams.close_leg(leg.result())


def lender_of(prefill: asyncio.Task[Any]) -> Server | None:
    """Return the server that computed the prompt, if the prefill leg succeeded."""
    if not prefill.done() or prefill.cancelled() or prefill.exception():
        return None
    leg = prefill.result()
    if isinstance(leg, Leg) and leg.response.status == 200:
        return leg.server
    return None

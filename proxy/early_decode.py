"""The decode leg that is opened together with a prefill leg: the decode server is told of the
prefill server, subscribes there to the prompt's KV, and begins its answer with the first token.

Where the prefill leg goes on to another server, another decode leg follows it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from proxy.body import error_of
from proxy.membership import Kind, Server
from proxy.relay import Losses
from proxy.upstream_call import Leg, LegFailed, Upstreams

_OFFER = (
    "kv_transfer_params.subscribe"  # what a decode server names that refuses an offer
)


class EarlyDecode:
    """
    Args:
        ask: asks decode servers, which a prefill server is named to. Raises LegFailed where that
            cannot be.
        losses: count those that failed with an offer.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        ask: Callable[[Server], Coroutine[Any, Any, Leg]],
        losses: Losses,
    ) -> None:
        self._upstreams, self._ask, self._losses = upstreams, ask, losses
        self._news = asyncio.Event()
        self._is_over = self._is_taken = False
        self._answer: asyncio.Task[Leg] | None = None

    def follow(self, prefill: Server) -> None:
        """The prompt is to be computed there now. Raises CancelledError where nobody wants it."""
        if (
            self._is_taken
        ):  # it goes on by itself, whatever became of the prefill server
            raise asyncio.CancelledError
        if self._is_over:
            return
        self.end()
        self._answer = asyncio.create_task(self._ask(prefill))
        self._answer.add_done_callback(self._on_done)

    async def take(
        self, prefill: "asyncio.Task[Leg | str]"
    ) -> "asyncio.Task[Leg] | None":
        """The decode leg, as soon as either leg has an answer: it has one, or is about to, as the
        prefill is done. None: the prefill leg's answer decides, and no decode leg is left."""
        prefill.add_done_callback(self._on_done)
        while not (prefill.done() or (self._answer and self._answer.done())):
            self._news.clear()
            await self._news.wait()
        self._is_over = True
        is_lent = (
            not prefill.done() or lender_of(prefill) is not None
        )  # or is about to be
        if self._answer is None or not is_lent or await self._is_refused(self._answer):
            self.end()
            return None
        self._is_taken = True
        answer, self._answer = self._answer, None
        return answer

    async def _is_refused(self, answer: asyncio.Task[Leg]) -> bool:
        """Whether the decode server does not take an offer, or has failed with it, and another one
        may be given the request."""
        await asyncio.wait({answer})
        if failed := answer.exception():
            if not isinstance(failed, LegFailed) or not self._losses.take_failure(
                failed.failure
            ):
                return False
            return failed.failure is None or bool(
                self._upstreams.fleet.ready(Kind.DECODE)
            )
        leg = answer.result()
        if not error_of(leg.response.body or b"", "param").startswith(_OFFER):
            return False
        self._upstreams.distrust(leg.server)
        return True

    def _on_done(self, leg: "asyncio.Task[Any]") -> None:
        self._news.set()
        if not leg.cancelled():
            leg.exception()  # whoever awaits it hears of it, or nobody does

    def end(self) -> None:
        """Nobody takes the decode leg that there is."""
        answer, self._answer = self._answer, None
        if (
            answer is None
            or answer.cancel()
            or answer.cancelled()
            or answer.exception()
        ):
            return
        self._upstreams.end(answer.result())


def lender_of(prefill: "asyncio.Task[Leg | str]") -> Server | None:
    """Who has computed the prompt, if the leg has ended well."""
    if not prefill.done() or prefill.cancelled() or prefill.exception():
        return None
    leg = prefill.result()
    return leg.server if isinstance(leg, Leg) and leg.response.status == 200 else None

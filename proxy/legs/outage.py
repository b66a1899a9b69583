"""Lets a request wait while no decode server is ready.

With `baton up`, a decode server that dies is restarted. The longest wait depends on
what has happened to the request:

    a server was lost during its answer --> `--resume-wait-s`; see `wait_after_loss`
    a server was lost before its answer --> `--resume-wait-s`; see `Outage.outlast`
    no server was ready ------------------> `--resume-wait-s`, but not longer than
                                            `--max-queue-s`; see `Outage.outlast`
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence

from protocol.errors import BatonError, NoServerAvailable
from proxy.errors import DecodeServerLost
from proxy.failover import FailoverState
from proxy.legs.upstreams import Upstreams
from proxy.membership import Kind, Pool, Server
from proxy.relay import Reply

# A request waits at most this long for a server other than the lost one. After that, it
# also accepts the lost server, which is ready again after its next health check if it
# only broke a connection.
MAX_OTHER_WAIT_S = 3.0
_POLL_S = 0.02
# Pause between two attempts to continue an answer, so that servers that fail at once do
# not keep the proxy busy.
RETRY_PAUSE_S = 0.1


class Outage:
    """The wait of one request that no decode server has begun to answer."""

    def __init__(
        self, upstreams: Upstreams, reply: Reply, failover: FailoverState
    ) -> None:
        self._upstreams = upstreams
        self._reply = reply
        self._failover = failover
        self._has_waited = False

    async def outlast(self, error: BatonError, pool: Pool) -> None:
        """Wait for a decode server, if the request failed because no server is left.

        Returns when the request may be sent again.

        Raises:
            BatonError: `error`, if the request cannot be sent again in time.
        """
        wait_s = self._upstreams.restart_wait_s
        if isinstance(error, NoServerAvailable):
            wait_s = min(wait_s, self._upstreams.max_queue_s)
        elif not isinstance(error, DecodeServerLost):
            raise error
        has_begun = self._reply.status is not None or bool(self._reply.frame_history)
        may_retry = self._failover.is_enabled and self._failover.count_and_check_retry(
            None
        )
        # A request waits only once. Otherwise it might never end while servers flap.
        if has_begun or not may_retry or self._has_waited or pool.ready(Kind.DECODE):
            raise error
        self._has_waited = True
        if not await wait_for_decode_server(pool, (), wait_s):
            raise error


def may_wait_again(error: BatonError, pool: Pool, until_s: float) -> bool:
    """Return whether a failed attempt to continue an answer may wait and try again.

    It may if no server refused to continue (the servers are lost or not ready), and the
    wait has not ended.

    Args:
        until_s: when the wait for another server ends (monotonic time).
    """
    is_outage = isinstance(error, DecodeServerLost)
    if isinstance(error, NoServerAvailable):
        is_outage = not pool.ready(Kind.DECODE)  # any ready server has refused
    return is_outage and time.monotonic() < until_s


async def wait_after_loss(
    pool: Pool, avoided: Sequence[Server], wait_s: float, *, has_begun: bool
) -> None:
    """Wait until a decode server can continue an answer that broke off.

    Args:
        avoided: servers that have failed the request or would refuse to continue.
        has_begun: the client has part of the answer.
    """
    other_wait_s = min(wait_s, MAX_OTHER_WAIT_S)
    if await wait_for_decode_server(pool, avoided, other_wait_s):
        return
    # The next ready server may be the lost server after a restart. If the answer has
    # begun, `avoided` has the servers of other models, which still cannot continue it.
    await wait_for_decode_server(
        pool, avoided if has_begun else (), wait_s - other_wait_s
    )


async def wait_for_decode_server(
    pool: Pool, avoided: Sequence[Server], timeout_s: float
) -> bool:
    """Wait for a ready decode server. Return False if there is none in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not pool.ready(Kind.DECODE, avoided):
                await asyncio.sleep(_POLL_S)
            return True
    return False

"""The connection of an engine to the KV store of its host.

A thread opens a region of the store, and repeats the request as long as the engine
runs. The requests show the store that the engine still uses the region. They also show
the engine whether the store has ended or was restarted. Without the store, the engine
continues, and the thread tries to connect again.
"""

import select
import socket
import threading
import time
from dataclasses import dataclass

from kvcache.stripe import PlanError, Stripe
from kvcache.transfer.pulls.lease_client import Address, new_id
from protocol.handshake import MessageError
from protocol.ipc.kv_store import (
    MAX_MESSAGE_BYTES,
    OpenRegion,
    RegionOpened,
    RegionPending,
    RegionRefused,
    RegionSpec,
    read_store_reply,
    seal_open_region,
)
from protocol.ipc.wire import Wire, WireClosed, tune_socket
from protocol.messages import KVHint
from protocol.process.logging import get_logger
from protocol.process.vital_threads import VitalThread

logger = get_logger(__name__)

RENEW_INTERVAL_S = 2.0
_CONNECT_TIMEOUT_S = 2.0
# The first answer of a store takes long, because the store first loads its libraries.
_OPEN_TIMEOUT_S = 30.0
_RENEW_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.5
_PENDING_INTERVAL_S = 0.25  # between two requests while the store opens the region
_MIN_RETRY_S = 0.5
_MAX_RETRY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class StoreRegion:
    """The region of a store that this engine uses.

    Attributes:
        address: host and port of the region's side channel.
        num_tokens: tokens that the region can hold.
        local_host: the address at which the store can reach this engine's host.
    """

    address: Address
    engine_id: str
    incarnation: str
    block_size: int
    num_tokens: int
    local_host: str = "127.0.0.1"

    def hint(self) -> KVHint:
        """The hint with which prompts are looked up in the region."""
        return KVHint(
            host=self.address[0],
            port=self.address[1],
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            num_tokens=self.num_tokens,
        )


class StoreUnusable(Exception):
    """The store refuses this engine, or does not answer. The message is the reason."""


class StoreLink:
    """Keeps a region of the store at `address` open.

    Args:
        engine_id: the id of this engine.
        dcp: number of this engine's ranks that share the tokens of a sequence.

    Attributes:
        region: the open region; None while the store cannot be used.
        stats: the latest values of the region, by metric series.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        engine_id: str,
        spec: RegionSpec,
        dcp: int = 1,
    ) -> None:
        self._address = address
        self._secret = secret
        self._engine_id = engine_id
        self._spec = spec
        self._stripe = Stripe(0, dcp, spec.block_size)
        self.region: StoreRegion | None = None
        self.stats: dict[str, float] = {}
        self._last_problem = ""
        self._is_pending = False  # the last answer was RegionPending
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, "store-link")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, without waiting for an answer of the store."""
        self._stopping.set()

    def _run(self) -> None:
        retry_s = _MIN_RETRY_S
        while not self._stopping.is_set():
            try:
                self._serve_connection()
                problem = "the store has ended"
            except (
                OSError,
                WireClosed,
                StoreUnusable,
                MessageError,
                PlanError,
            ) as error:
                problem = str(error) or type(error).__name__
            if self.region is not None:
                self.region = None
                self.stats = {}
                retry_s = _MIN_RETRY_S
            self._report(problem)
            self._stopping.wait(retry_s)
            retry_s = min(retry_s * 2, _MAX_RETRY_S)

    def _report(self, problem: str) -> None:
        """Logs a problem, unless it is the same as the last one."""
        if problem == self._last_problem or self._stopping.is_set():
            return
        self._last_problem = problem
        logger.warning(
            "The KV store at %s:%d cannot be used: %s; continuing without it and "
            "trying again.",
            *self._address,
            problem,
        )

    def _serve_connection(self) -> None:
        """Opens the region, and renews it until the connection ends.

        Raises:
            OSError, WireClosed: the connection is lost.
            StoreUnusable, MessageError, PlanError: the store refuses this engine, or
                its answer or region is unusable.
        """
        with socket.create_connection(self._address, _CONNECT_TIMEOUT_S) as sock:
            tune_socket(sock)
            local_host = str(sock.getsockname()[0])
            wire = Wire(sock, MAX_MESSAGE_BYTES)
            timeout_s = _OPEN_TIMEOUT_S
            while not self._stopping.is_set():
                reply = self._request(wire, timeout_s)
                timeout_s = _RENEW_TIMEOUT_S
                if isinstance(reply, RegionOpened):
                    self._set_region(reply, local_host)
                    interval_s = RENEW_INTERVAL_S
                else:
                    self._report_pending(reply)
                    interval_s = _PENDING_INTERVAL_S
                # No reply is outstanding, so a readable socket means that the store has
                # closed the connection. `receive` then raises WireClosed.
                if _wait_for(wire, interval_s):
                    wire.receive()

    def _report_pending(self, reply: RegionPending) -> None:
        """Records that the store is still opening the region, and logs this once."""
        self.region = None
        if not self._is_pending:
            self._is_pending = True
            logger.info(
                "The KV store at %s:%d allocates %.2f GiB of host memory for KV; "
                "continuing without it until that is done.",
                *self._address,
                reply.nbytes / 2**30,
            )

    def _request(self, wire: Wire, timeout_s: float) -> RegionOpened | RegionPending:
        """Sends OpenRegion, and returns the answer."""
        request = OpenRegion(nonce=new_id(), engine_id=self._engine_id, spec=self._spec)
        wire.send(seal_open_region(request, self._secret))
        deadline_s = time.monotonic() + timeout_s
        while not self._stopping.is_set():
            if time.monotonic() >= deadline_s:
                raise StoreUnusable(f"it did not answer for {timeout_s:g} s")
            _wait_for(wire, _POLL_INTERVAL_S)
            wire.flush()
            for message in wire.receive():
                reply = read_store_reply(message, self._secret)
                if isinstance(reply, RegionRefused):
                    raise StoreUnusable(reply.reason)
                if reply.nonce == request.nonce:
                    return reply
        raise StoreUnusable("this engine ends")

    def _set_region(self, reply: RegionOpened, local_host: str) -> None:
        """Records the region that the store has opened.

        Raises:
            PlanError: this engine cannot read blocks of the region's size.
        """
        self._stripe.check_remote(reply.block_size)
        region = StoreRegion(
            address=(self._address[0], reply.port),
            engine_id=reply.engine_id,
            incarnation=reply.incarnation,
            block_size=reply.block_size,
            num_tokens=reply.num_tokens,
            local_host=local_host,
        )
        self.stats = reply.stats
        self._is_pending = False
        if region != self.region:
            self.region = region
            self._last_problem = ""
            logger.info(
                "KV of this server is also kept in the KV store at %s:%d, which holds "
                "%d tokens",
                *self._address,
                region.num_tokens,
            )


def _wait_for(wire: Wire, timeout_s: float) -> bool:
    """Waits until a wire can be read, or written if it has unsent messages. Returns
    False after `timeout_s`."""
    poller = select.poll()
    events = select.POLLIN | (select.POLLOUT if wire.has_unsent else 0)
    poller.register(wire, events)
    return bool(poller.poll(timeout_s * 1000))

"""The link that reads from one prefill engine.

Each link has its own transport agent. A READ consists of runs (contiguous ranges of
bytes). A READ may hang, or fail while some of its runs continue. Only closing the agent
ends such a READ (invariant I7 in docs/design.md), because that closes the agent's
sockets, queues and registrations.

Connecting may block for minutes if the network drops packets, and closing may take
seconds. Each link has its own thread for connecting and closing, so that pulls from
other engines continue.
"""

import threading
import time
from collections.abc import Sequence

import torch

from kvcache.transfer.agent import MemoryKind, ReadHandle, ReadState, TransferAgent
from kvcache.transfer.local_rank import SCRATCH_BYTES, LocalRank
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import CostModel, Sample, fit_costs, measure_link
from kvcache.transfer.plan.endpoint import Endpoint
from kvcache.transports import UcxRead, ucx_log
from protocol.errors import BatonError, PeerUnreachable, TransferFailed
from protocol.handshake import EngineMetadata
from protocol.ipc.wire import allow_short_naps
from protocol.process.logging import get_logger

logger = get_logger(__name__)

# Largest number of bytes in a READ that measures the link (the long probe of cost.py),
# by the kind of this rank's memory. Larger READs do not measure the link better.
_MAX_PROBE_BYTES = {"DRAM": 4 << 20, "VRAM": 16 << 20}
_MIN_NAP_S = 0.00001
_MAX_NAP_S = 0.01
_CLOSE_TIMEOUT_S = 5.0  # longest wait in `join` for a link's thread to end
_FIX = (
    "Open the prefill server's UCX ports to this host (UCX_TCP_PORT_RANGE sets them), "
    "and set UCX_NET_DEVICES on both hosts to interfaces that reach the other host; "
    "docker0 and other interfaces with the same address on both hosts do not"
)


class PeerLink:
    """The agent that reads from one engine, and a thread to connect and close it.

    A new link begins to connect at once. Only the worker's thread calls a link's
    methods. The link's thread wakes the worker when connecting has succeeded or failed,
    and when the link is closed.

    Args:
        rank: this rank of the decode server. The link is in `rank.links` until the
            link's agent is closed.
        ranks: the ranks of the prefill server to read from.
        probes: measure the link, with READs of the null block of the first rank in
            `ranks`.

    Attributes:
        is_connecting: the link's thread still connects or measures, perhaps even after
            the deadline.
        is_ready: connected, and measured if `probes`.
        is_closed: the agent is closed, so none of its READs can write any more.
        costs: the measured costs; None if the link was not measured.
        deadline: when connecting times out, by time.monotonic.
        num_active: number of active READs of jobs that are not stopping; the jobs
            maintain this number.
    """

    def __init__(
        self,
        rank: LocalRank,
        metadata: EngineMetadata,
        ranks: Sequence[Endpoint],
        *,
        probes: bool,
    ) -> None:
        self.is_connecting = True
        self.is_ready = False
        self.is_closed = False
        self.costs: CostModel | None = None
        self.deadline = time.monotonic() + rank.connect_timeout_s
        self.num_active = 0
        # A placeholder: the link's thread sets the link's own agent.
        self.agent: TransferAgent = rank.agent
        self._error: BatonError | None = None
        self._rank = rank
        self._metadata = metadata
        self._ranks = ranks
        self._probes = probes
        on_gpu = metadata.ranks[0].device_kind == "cuda"
        self._kinds: tuple[MemoryKind, MemoryKind] = (
            rank.kind,
            "VRAM" if on_gpu else "DRAM",
        )
        self.between_gpus = self._kinds == ("VRAM", "VRAM")
        self._agent_names: dict[int, str] = {}  # by rank of the prefill server
        self._closing = threading.Event()
        name = f"link-{metadata.engine_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        rank.links.add(self)
        self._thread.start()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    @property
    def error(self) -> BatonError | None:
        """Why the link cannot be used; None while it is usable or still connecting."""
        has_expired = time.monotonic() >= self.deadline
        if self._error is None and not self.is_ready and has_expired:
            limit = f"{self._rank.connect_timeout_s:g} s (--connect-timeout-s)"
            self._error = self._unreachable(f"no connection within {limit}")
        return self._error

    def read(self, read: ReadDescriptors, base_address: int) -> ReadHandle:
        """Posts a READ. Raises the errors of TransferAgent.read.

        Args:
            base_address: address of the local memory; local offsets count from here.
        """
        remote = self._metadata.ranks[read.remote_rank]
        return self.agent.read(
            self._agent_names[read.remote_rank],
            read.local_offsets + base_address,
            read.remote_offsets + remote.base_address,
            read.lengths,
            local_device=self._rank.pool.device_id,
            remote_device=remote.device_id,
            kinds=self._kinds,
        )

    @property
    def transport(self) -> UcxRead | None:
        """UCX's latest choice of a transport for this link's two kinds of memory.

        UCX may have made the choice for a different link. None if UCX has not reported
        a choice.
        """
        local_kind, remote_kind = self._kinds
        return ucx_log.read_between(
            gpu_here=local_kind == "VRAM", gpu_there=remote_kind == "VRAM"
        )

    def close(self, error: BatonError | None = None) -> None:
        """Begins to close the link. READs may still write until `is_closed`.

        Args:
            error: why the link is closed, for the log and for `error`; None: the link
                is not needed any more.
        """
        if error is not None and not self.is_closing:
            logger.warning(
                "prefill server %s: %s", self._metadata.engine_id, error.message
            )
            self._error = error
        self._closing.set()

    def join(self) -> None:
        """Waits up to _CLOSE_TIMEOUT_S for the thread of a closing link.

        Returns at once if the link is still connecting.
        """
        if not self.is_connecting:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        allow_short_naps()
        agent = None
        try:
            agent = self._rank.agent.new_sibling()
            self.agent = agent
            self._rank.register_with(agent)
            self._connect(agent)
            self.is_ready = True
        except Exception as error:  # NIXL's exceptions share no base class
            self._error = self._unreachable(str(error) or repr(error))
        self.is_connecting = False
        self._rank.wake()
        self._closing.wait()
        try:
            if agent is not None:
                agent.close()
                if self._rank.kind == "VRAM":
                    # The agent's last copies may continue for milliseconds.
                    torch.cuda.synchronize(self._rank.pool.device)
        except Exception:
            # `is_closed` stays false: the blocks that READs may write to remain
            # quarantined.
            logger.exception(
                "cannot close the link to prefill server %s", self._metadata.engine_id
            )
            return
        self.is_closed = True
        self._rank.links.discard(self)
        self._rank.wake()

    def _connect(self, agent: TransferAgent) -> None:
        """Connects to all `ranks`, and measures the link if `probes`."""
        for endpoint in self._ranks:
            agent_metadata = self._metadata.ranks[endpoint.rank].agent_metadata
            self._agent_names[endpoint.rank] = agent.add_peer(agent_metadata)
        if not self._probes:
            return
        name = self._metadata.engine_id
        long, short = measure_link(
            self._ranks[0],
            SCRATCH_BYTES,
            _MAX_PROBE_BYTES[self._rank.kind],
            self._probe,
        )
        try:
            costs = fit_costs(long, short, on_gpu=self._rank.kind == "VRAM")
        except ValueError as error:  # both probes have runs of the same length
            logger.info(
                "cannot measure the link to prefill server %s: %s; using default costs",
                name,
                error,
            )
            return
        transport = self.transport
        logger.info(
            "prefill server %s: NIXL by %s, %s",
            name,
            transport or "unknown transport",
            costs,
        )
        warning = transport.warning() if transport else None
        if warning:
            logger.warning("prefill server %s: %s", name, warning)
        self.costs = costs

    def _probe(self, read: ReadDescriptors) -> Sample:
        """Carries out a probe (cost.py) and measures its time.

        Raises:
            TransferFailed: the READ fails, or has not ended at the deadline or when the
                link is closed.
        """
        began_s = time.perf_counter()
        handle = self.read(read, self._rank.scratch_address)
        ended_at_once = handle.has_ended
        while self.agent.poll(handle) is ReadState.ACTIVE:
            if self.is_closing or time.monotonic() >= self.deadline:
                raise TransferFailed("a READ that measures the link does not end")
            # A nap delays the end of the measurement. Each nap is a fraction of the
            # elapsed time, which limits the relative error.
            nap_s = (time.perf_counter() - began_s) / 16
            time.sleep(min(max(nap_s, _MIN_NAP_S), _MAX_NAP_S))
        seconds = time.perf_counter() - began_s
        if handle.state is ReadState.ERROR:
            raise TransferFailed("a READ that measures the link has failed")
        self.agent.release(handle)
        return Sample(
            num_descriptors=len(read.lengths),
            nbytes=read.nbytes,
            seconds=seconds,
            ended_at_once=ended_at_once,
        )

    def _unreachable(self, reason: str) -> PeerUnreachable:
        name = self._metadata.engine_id
        hosts = ", ".join(self._metadata.hosts)
        where = f" on {hosts}" if hosts else ""
        return PeerUnreachable(
            f"prefill server {name}{where} cannot be read over NIXL: {reason}. {_FIX}."
        )

"""The TransferAgent over NIXL with its UCX backend: shared memory, TCP, RDMA, CUDA IPC.

The agent uses NIXL's bindings, not NIXL's Python wrapper. The wrapper starts each
agent's progress thread with a delay of 0, so that the thread uses 100 % of a core even
when idle. With a delay above 0, the thread sleeps on UCX's events and wakes at once for
a peer's first contact. The progress thread is necessary: without it, an agent would
answer a peer only while a method of the agent is running.
"""

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# NIXL and UCX read these variables when the libraries are loaded.
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
os.environ.setdefault("UCX_LOG_LEVEL", "error")
# By default, UCX keeps an unlimited number of registrations of freed memory.
os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")

from kvcache.stripe import IntArray
from kvcache.transfer.agent import MemoryKind, ReadHandle, ReadState, TransferAgent
from kvcache.transports import ucx_log
from protocol.errors import TransferFailed
from protocol.process.logging import get_logger

ucx_log.start()  # before UCX is loaded

from nixl import _bindings as nixl  # noqa: E402

logger = get_logger(__name__)

# Variables that this file and transports.py set, not the operator.
_INTERNAL_VARIABLES = (
    "UCX_LOG_FILE",
    "UCX_LOG_LEVEL",
    "UCX_PROTO_INFO",
    "UCX_RCACHE_MAX_UNRELEASED",
)
_PROGRESS_DELAY_US = 100_000  # longest sleep of the progress thread; events wake it
# GPUs copy short runs faster than one thread can post them, so two threads post. READs
# of fewer than `split_batch_size` runs are posted by the calling thread alone.
_GPU_OPTIONS = {"num_threads": "2", "split_batch_size": "64"}
_SEGMENTS = {"DRAM": nixl.DRAM_SEG, "VRAM": nixl.VRAM_SEG}
_STATES = {nixl.NIXL_SUCCESS: ReadState.DONE, nixl.NIXL_IN_PROG: ReadState.ACTIVE}


class CannotStart(ValueError):
    """UCX cannot be started on this machine; the message has the reason."""


class NixlAgent(TransferAgent):
    """One NIXL agent with a unique name.

    Args:
        prefix: start of the agent's name, for logs.
        device_id: the agent moves memory of this CUDA device; None: host memory. UCX
            requires that the device is current on each thread that uses the agent.

    Raises:
        CannotStart: UCX does not start.
    """

    def __init__(self, prefix: str = "baton", *, device_id: int | None = None) -> None:
        self.name = f"{prefix}-{uuid.uuid4().hex}"
        self._prefix = prefix
        self._device_id = device_id
        self.bind_thread()
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        # Only one thread at a time uses an agent.
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        self._agent: Any = nixl.nixlAgent(self.name, config)
        options = {} if device_id is None else _GPU_OPTIONS
        try:
            self._backend = self._agent.createBackend("UCX", options)
        except Exception as error:
            raise CannotStart(_start_failure(error)) from error
        self._regions: list[Any] = []
        self._peers: set[str] = set()
        self._num_active = 0  # number of READs that have not ended
        self._has_failed = False  # whether any READ has failed

    def new_sibling(self) -> "NixlAgent":
        return NixlAgent(self._prefix, device_id=self._device_id)

    def bind_thread(self) -> None:
        if self._device_id is not None:
            torch.cuda.set_device(self._device_id)

    def register(
        self,
        address: int,
        nbytes: int,
        *,
        device_id: int = 0,
        kind: MemoryKind = "DRAM",
    ) -> None:
        runs = [(address, nbytes, device_id, "")]
        with _as_transfer_failed(f"cannot register {nbytes} bytes of {kind}"):
            descriptors = nixl.nixlRegDList(_SEGMENTS[kind], runs)
            self._agent.registerMem(descriptors, [self._backend])
        self._regions.append(descriptors)

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def add_peer(self, metadata: bytes) -> str:
        with _as_transfer_failed("cannot use the peer's agent metadata"):
            name = self._agent.loadRemoteMD(metadata)
        peer = name.decode() if isinstance(name, bytes) else str(name)
        self._peers.add(peer)
        return peer

    def read(
        self,
        peer: str,
        local_addresses: IntArray,
        remote_addresses: IntArray,
        lengths: IntArray,
        *,
        local_device: int = 0,
        remote_device: int = 0,
        kinds: Sequence[MemoryKind] = ("DRAM", "DRAM"),
    ) -> ReadHandle:
        local = _descriptors(kinds[0], local_addresses, lengths, local_device)
        remote = _descriptors(kinds[1], remote_addresses, lengths, remote_device)
        with _as_transfer_failed(f"cannot read {len(lengths)} runs from {peer}"):
            request = self._agent.createXferReq(
                nixl.NIXL_READ, local, remote, peer, b"", [self._backend]
            )
        try:
            status = self._agent.postXferReq(request, b"")
            state = _STATES.get(status, ReadState.ERROR)
        # Some runs may have been posted, so this is a failed READ, not an exception.
        except Exception as error:
            logger.warning("cannot read %d runs from %s: %s", len(lengths), peer, error)
            state = ReadState.ERROR
        self._num_active += state is ReadState.ACTIVE
        self._has_failed |= state is ReadState.ERROR
        return ReadHandle(peer, state, request)

    def poll(self, handle: ReadHandle) -> ReadState:
        if handle.has_ended:
            return handle.state
        try:
            status = self._agent.getXferStatus(handle.key)
            handle.state = _STATES.get(status, ReadState.ERROR)
        except Exception as error:
            logger.warning("READ from %s failed: %s", handle.peer, error)
            handle.state = ReadState.ERROR
        self._num_active -= handle.has_ended
        if handle.state is ReadState.ERROR:
            self._has_failed = True
            ucx_log.update()
        return handle.state

    def release(self, handle: ReadHandle) -> None:
        if not handle.has_ended:
            raise RuntimeError(f"released an active READ from {handle.peer}")
        _call_and_log_failure(self._agent.releaseXferReq, handle.key)

    def close(self) -> None:
        if self._agent is None:
            return
        agent, self._agent = self._agent, None
        # After a failure, or while READs are active, only deleting the agent closes the
        # connections.
        if not (self._num_active or self._has_failed):
            for peer in self._peers:
                _call_and_log_failure(agent.invalidateRemoteMD, peer)
            for region in self._regions:
                _call_and_log_failure(agent.deregisterMem, region, [self._backend])
        # This deletes the agent, because it is the last reference. UCX's sockets,
        # queues and threads end with the agent.
        del agent


def _descriptors(
    kind: MemoryKind, addresses: IntArray, lengths: IntArray, device: int
) -> Any:
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    rows[:, 2] = device
    return nixl.nixlXferDList(_SEGMENTS[kind], rows)


def _call_and_log_failure(call: Callable[..., Any], *args: Any) -> None:
    """Calls a function of NIXL that frees a resource. A failure is only logged."""
    try:
        call(*args)
    except Exception as error:
        logger.debug("NIXL failed to release a resource: %s", error)


def _start_failure(error: Exception) -> str:
    """The message for the operator if UCX does not start."""
    failure = f"NIXL cannot start UCX ({error or type(error).__name__})"
    names = sorted(
        name
        for name in os.environ
        if name.startswith("UCX_") and name not in _INTERNAL_VARIABLES
    )
    if not names:
        return f"{failure}; start the server with UCX_LOG_LEVEL=info to see details"
    settings = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return f"{failure} with {settings}: correct or unset these variables"


@contextmanager
def _as_transfer_failed(failure: str) -> Iterator[None]:
    """Turns NIXL's exceptions, which share no base class, into TransferFailed.

    Args:
        failure: the start of the message.
    """
    try:
        yield
    except Exception as error:
        raise TransferFailed(f"{failure}: {error}") from error

"""The links between the ranks of an engine: sockets from rank 0 to every other rank.

The sockets to ranks of other hosts are TCP connections, which engine/nodes has
authenticated before this process started.

During the start, the ranks agree on values: that all have started, the number of blocks
that all can hold, and the location of each rank's KV. Each rank sends its value to rank
0, which sends the combined value to all ranks. After the start, rank 0 sends steps. An
empty message makes the other ranks stop.

The other ranks send no answer after a step. Rank 0 takes part in every step, and the
collectives of the forward pass synchronize all ranks. When a step has ended on rank 0,
the KV of the step is written on all ranks, because the last layer adds up results of
all ranks that depend on this KV. If a rank dies, the engine ends, because the parent
process watches every rank.
"""

import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import TypeVar

import msgspec

from engine.config import EngineConfig
from engine.core.batch import PendingStep, StepInput, step_from_bytes, step_to_bytes
from engine.core.budget.step_target import StepTarget
from engine.core.budget.step_times import StepTimes
from engine.worker.runner import ModelRunner
from engine.worker.step_timer import measure_steps
from model.parallel import Parallel, tcp_store

_JOIN_TIMEOUT_S = 600.0  # includes loading the model
# How long a failed rank waits before it checks whether another rank is exiting. A
# collective may fail a little before the exit of the other rank is visible.
_EXIT_DELAY_S = 0.1
_OTHER_NODES_DELAY_S = 2.0  # see let_other_nodes_report
_TEARDOWN_TIMEOUT_S = 10.0  # longest wait for the exit of another rank
_PF_EXITING = 0x4  # Linux's flag of a process that is exiting

_T = TypeVar("_T")


class RankTimeout(Exception):
    """A rank sent no value within the timeout."""


class RankLost(Exception):
    """Another rank has exited, which ends the engine. The error that this rank noticed
    is only a consequence."""


class RankLinks:
    """The links of one rank. Rank 0 has a link to every other rank; every other rank
    has one link, to rank 0.

    Args:
        sockets: two for each link, one after the other: one for this class, one for
            pulls.
        timeout_s: longest time that rank 0 waits for another rank's value.

    Attributes:
        pulls: the sockets for pulls, which only the transfer thread uses.
    """

    def __init__(
        self,
        rank: int,
        sockets: Sequence[socket],
        *,
        timeout_s: float = _JOIN_TIMEOUT_S,
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._links = [Connection(link.detach()) for link in sockets[::2]]
        self.pulls = sockets[1::2]

    def agree(self, value: _T, kind: type[_T], combine: Callable[[list[_T]], _T]) -> _T:
        """Combines one value of each rank. Returns the combined value, on all ranks.

        Args:
            value: this rank's value.
            kind: the type of the values and of the combined value.
            combine: called on rank 0 with the values of all ranks, in any order.

        Raises:
            RankTimeout: a rank sent no value within the timeout. Only on rank 0.
            RankLost: a rank has exited.
        """
        if self._rank:
            self.send(msgspec.msgpack.encode(value))
            return msgspec.msgpack.decode(self._receive(), type=kind)
        values = [value]
        for index in range(len(self._links)):
            message = self._receive(index, self._timeout_s)
            values.append(msgspec.msgpack.decode(message, type=kind))
        agreed = combine(values)
        self.send(msgspec.msgpack.encode(agreed))
        return agreed

    def send(self, message: bytes) -> None:
        """Sends a message over every link. Raises OSError if a rank has exited."""
        for link in self._links:
            link.send_bytes(message)

    def run_steps(self, runner: ModelRunner) -> None:
        """Executes the steps that rank 0 sends, until rank 0 sends an empty message. As
        on rank 0, up to `runner.depth` launched steps may be unfinished when the next
        step is received."""
        launched: deque[PendingStep] = deque()
        while data := self._receive():
            launched.append(_launch(runner, step_from_bytes(data)))
            while len(launched) > runner.depth:
                launched.popleft().result()

    def close(self) -> None:
        """Closes the links. On rank 0, ends `run_steps` of the other ranks first."""
        for link in self._links:
            if not self._rank:
                with suppress(OSError):
                    link.send_bytes(b"")
            link.close()

    def _receive(self, index: int = 0, timeout_s: float | None = None) -> bytes:
        """Returns the next message of a link. Raises RankTimeout or RankLost.

        Waits before it raises RankLost, so that the parent process receives the cause
        from the other rank before this rank exits as well.
        """
        link = self._links[index]
        peer = "rank 0" if self._rank else "a rank"
        try:
            if timeout_s is not None and not link.poll(timeout_s):
                raise RankTimeout(f"{peer} sent nothing for {timeout_s:g} s")
            return link.recv_bytes()
        except (EOFError, OSError) as error:
            time.sleep(_TEARDOWN_TIMEOUT_S)
            raise RankLost(f"{peer} has ended") from error


def connect_ranks(config: EngineConfig, rank: int, links: RankLinks) -> Parallel:
    """Joins the process group of all ranks of the engine."""
    device: str = config.device
    if config.device == "cuda":
        device = f"cuda:{config.device_of(rank)}"
    # Wait until all ranks have started. The links wait ten minutes for a rank, but the
    # process group below waits only one minute.
    links.agree(0, int, max)
    store = None
    interface = None
    if config.nnodes > 1:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        store = tcp_store(
            config.rendezvous_address[0],
            config.store_port,
            config.tp,
            listen_fd=None if rank else config.store_fd,
        )
    return Parallel.connect(
        rank,
        config.tp,
        rendezvous_file=config.rendezvous_file,
        store=store,
        host=config.node_host or "127.0.0.1",
        interface=interface,
        device=device,
        dcp=config.dcp,
        ep=config.ep,
    )


class RankExecutor:
    """The executor of rank 0: sends each step to the other ranks, then runs the share
    of rank 0.

    If a launch fails after the other ranks have received the step, all later launches
    raise the same error, because the collectives of the ranks no longer match.
    """

    def __init__(self, runner: ModelRunner, links: RankLinks) -> None:
        self._runner = runner
        self._links = links
        self._num_others = runner.model.parallel.size - 1
        self._failure: Exception | None = None
        self.depth = runner.depth

    def launch(self, step: StepInput) -> PendingStep:
        if not self._num_others:
            return _launch(self._runner, step)
        if self._failure is not None:
            raise self._failure
        try:
            self._links.send(step_to_bytes(step))
            return _launch(self._runner, step)
        except Exception as error:
            self._failure = error
            raise

    def measure_steps(self, target: StepTarget | None) -> StepTimes | None:
        """Measures the durations of steps. Returns None if the engine has no target
        duration for steps. Called once, while no block is in use and the other ranks
        wait for steps."""
        return None if target is None else measure_steps(self._runner, self, target)


def _launch(runner: ModelRunner, step: StepInput) -> PendingStep:
    """Launches a step on the draft model if `step.is_draft`, else on the engine's
    model."""
    if step.is_draft:
        assert runner.draft is not None, "a draft step without a draft model"
        runner = runner.draft
    return runner.launch(step)


def raise_if_rank_lost(
    error: Exception,
    failed_rank: int,
    pids: Sequence[int | None],
    *,
    has_other_nodes: bool = False,
) -> None:
    """Raises RankLost from `error` if another rank has exited or is exiting, because
    the exit has then caused the error.

    Before it raises, waits until the other rank has exited, at most
    _TEARDOWN_TIMEOUT_S. The parent process then receives the cause from the other rank
    before the failed rank exits as well.

    Args:
        error: the error that the failed rank raised.
        failed_rank: the number of the rank in this process.
        pids: process ids, by rank; None for ranks of other nodes.
        has_other_nodes: whether the engine has ranks on other nodes.
    """
    if has_other_nodes:
        let_other_nodes_report()
    else:
        time.sleep(_EXIT_DELAY_S)
    for rank, pid in enumerate(pids):
        if rank == failed_rank or pid is None or not is_exiting(pid):
            continue
        with suppress(OSError), open(os.pidfd_open(pid), "rb", buffering=0) as process:
            poller = select.poll()
            poller.register(process, select.POLLIN)
            poller.poll(_TEARDOWN_TIMEOUT_S * 1000)
        raise RankLost(f"rank {rank} has ended") from error


def let_other_nodes_report() -> None:
    """Waits before this rank reports an error. If a rank on another node has caused the
    error, the other node reports the cause first."""
    time.sleep(_OTHER_NODES_DELAY_S)


def is_exiting(pid: int) -> bool:
    """Whether a process has exited or is exiting.

    Exiting takes seconds if the process holds GPU memory. The connections of the
    process break only when the exit is complete.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    fields = text[text.rindex(")") + 2 :].split()  # the fields after the process's name
    state = fields[0]
    flags = int(fields[6])
    return state in "ZX" or bool(flags & _PF_EXITING)

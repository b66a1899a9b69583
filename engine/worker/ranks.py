"""The links between the ranks of an engine: sockets from rank 0 to each other one.

First the ranks agree: that all have started, on the blocks that all can hold, on where everybody's
KV lies. Each tells rank 0, which tells all of them the outcome. Then come steps,
and at the end an empty one. Steps are not answered: rank 0 takes part in each of them, and the
collectives of the forward pass keep all ranks together: when a step has ended on rank 0, its KV is
written on all, as the last layer adds up what follows from it. A rank that dies ends the engine
(its parent watches every rank).
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

from engine.core.batch import PendingStep, StepInput, step_from_bytes, step_to_bytes
from engine.worker.runner import ModelRunner

_JOIN_TIMEOUT_S = 600.0  # loading the model included
_END_DELAY_S = 0.1  # for a rank to begin to end, where a collective heard of it first
_TORN_DOWN_S = 10.0
_PF_EXITING = 0x4  # of the kernel's flags of a process

_T = TypeVar("_T")


class RankTimeout(Exception):
    """A rank did not answer in time."""


class RankLost(Exception):
    """Another rank has ended, and with it the engine; what failed here came of that."""


class RankLinks:
    """One rank's: rank 0 has a link to every other rank, each of them one to rank 0.

    Args:
        sockets: two to each of them in turn, for what is said here and for pulls.

    Attributes:
        pulls: sockets for another thread, which has them to itself.
    """

    def __init__(
        self,
        rank: int,
        sockets: Sequence[socket],
        *,
        timeout_s: float = _JOIN_TIMEOUT_S,
    ) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._links = [Connection(link.detach()) for link in sockets[::2]]
        self.pulls = sockets[1::2]

    def agree(self, own: _T, kind: type[_T], combine: Callable[[list[_T]], _T]) -> _T:
        """What rank 0's `combine` makes of all ranks' `own`, in any order.

        Raises:
            RankTimeout: a rank tells nothing.
            RankLost: one has ended.
        """
        if self._rank:
            self.send(msgspec.msgpack.encode(own))
            return msgspec.msgpack.decode(self._receive(), type=kind)
        told = [
            self._receive(index, self._timeout_s) for index in range(len(self._links))
        ]
        agreed = combine(
            [own, *(msgspec.msgpack.decode(one, type=kind) for one in told)]
        )
        self.send(msgspec.msgpack.encode(agreed))
        return agreed

    def send(self, message: bytes) -> None:
        """Raises OSError: a rank has ended."""
        for link in self._links:
            link.send_bytes(message)

    def follow(self, runner: ModelRunner) -> None:
        """Executes steps until rank 0 has no more, launching ahead as rank 0 does."""
        launched: deque[PendingStep] = deque()
        while data := self._receive():
            launched.append(runner.launch(step_from_bytes(data)))
            while len(launched) > runner.depth:
                launched.popleft().result()

    def close(self) -> None:
        for link in self._links:
            if not self._rank:
                with suppress(OSError):
                    link.send_bytes(b"")
            link.close()

    def _receive(self, index: int = 0, timeout_s: float | None = None) -> bytes:
        """The next message of a link. Whoever started the ranks has time to hear why one ended."""
        link, peer = self._links[index], "rank 0" if self._rank else "a rank"
        try:
            if timeout_s is not None and not link.poll(timeout_s):
                raise RankTimeout(f"{peer} said nothing for {timeout_s:g} s")
            return link.recv_bytes()
        except (EOFError, OSError) as error:
            time.sleep(_TORN_DOWN_S)
            raise RankLost(f"{peer} has ended") from error


class RankExecutor:
    """Rank 0's: sends a step to the other ranks, then runs its own share."""

    def __init__(self, runner: ModelRunner, links: RankLinks) -> None:
        self._runner = runner
        self._links = links
        self._num_others = runner.model.parallel.size - 1
        self.depth = runner.depth

    def launch(self, step: StepInput) -> PendingStep:
        if self._num_others:
            self._links.send(step_to_bytes(step))
        return self._runner.launch(step)


def blame(error: Exception, own: int, pids: Sequence[int | None]) -> None:
    """To be called when something has failed on rank `own`: raises RankLost, from `error`, where
    another rank has ended. One that is being torn down is waited for, so that whoever started the
    ranks knows why it ended before this one ends of it. `pids` are by rank."""
    time.sleep(_END_DELAY_S)
    for rank, pid in enumerate(pids):
        if rank == own or pid is None or not is_ending(pid):
            continue
        with suppress(OSError), open(os.pidfd_open(pid), "rb", buffering=0) as process:
            ending = select.poll()
            ending.register(process, select.POLLIN)
            ending.poll(_TORN_DOWN_S * 1000)
        raise RankLost(f"rank {rank} has ended") from error


def is_ending(pid: int) -> bool:
    """Whether a process has ended or is being torn down, which takes seconds where it holds a GPU's
    memory. Its connections break only then."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    fields = text[text.rindex(")") + 2 :].split()  # those after its name
    return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)

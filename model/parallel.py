"""Tensor parallelism: the ranks' shares of heads, and the collectives between ranks.

Process groups are explicit objects and not torch's process-wide default group, so that
one process can contain two engines.
"""

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from kvcache.transfer.plan.endpoint import heads_of

# torch's stubs lack the explicit group classes that this file uses.
distributed: Any = torch.distributed


class Ranks:
    """One rank's view of a process group.

    Args:
        rank: the index of this rank, below `size`.
        group: a ProcessGroupGloo or ProcessGroupNCCL.
    """

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank = rank
        self.size = size
        self.group = group

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns [size, ...] on every rank: the `tensor` [...] of each rank.

        `tensor` must be contiguous.
        """
        parts = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        self.group._allgather_base(parts, tensor).wait()
        return parts.view(self.size, *tensor.shape)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends `tensor[i]` to rank i. `tensor` must be contiguous, [size, ...].

        Returns:
            [size, ...], the part that each rank sent to this rank.
        """
        parts = torch.empty_like(tensor)
        self.group.alltoall_base(parts, tensor, [], []).wait()
        return parts


class Parallel(Ranks):
    """One rank's view of a tensor-parallel group.

    The collectives of a group of size 1 do nothing.

    Args:
        group: the process group, which `connect` makes; None only for size 1.
        context: this rank's context-parallel group: neighboring ranks that hold the
            same KV heads and split the tokens. None: every rank stores all tokens.
        ep: number of parts into which the experts are divided. `size / ep` ranks share
            each part.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: Any = None,
        context: Ranks | None = None,
        ep: int = 1,
    ) -> None:
        super().__init__(rank, size, group)
        self.context = context
        self.ep = ep

    @property
    def dcp(self) -> int:
        """Number of ranks among which the tokens of every sequence are divided."""
        return self.context.size if self.context else 1

    def kv_heads(self, total_heads: int) -> range:
        """Returns the KV heads that this rank stores.

        All ranks of a context group store the same heads.
        """
        return heads_of(self.rank // self.dcp, self.size // self.dcp, total_heads)

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        *,
        rendezvous_file: str = "",
        store: Any = None,
        host: str = "127.0.0.1",
        interface: str | None = None,
        device: torch.device | str = "cpu",
        dcp: int = 1,
        ep: int = 1,
        timeout_s: float = 60.0,
    ) -> "Parallel":
        """Joins a group of processes; blocks until all ranks have joined.

        Args:
            rendezvous_file: path of the file through which ranks of one host find each
                other. The file must not exist before the first rank joins.
            store: the store through which the ranks find each other (`tcp_store`);
                None: `rendezvous_file`.
            host: the address of this host to which gloo of other ranks connects.
            interface: the network interface that gloo uses; None: that of `host`.
            device: "cpu" selects gloo, "cuda:N" selects NCCL on that GPU.
            dcp: size of the context-parallel groups, a divisor of `size`.
            ep: number of parts into which the experts are divided, a divisor of `size`.
            timeout_s: limit for joining, and for each collective after that.
        """
        if size == 1:
            return cls(rank, size)
        if store is None:
            store = distributed.FileStore(rendezvous_file, size)
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        make_group = partial(
            _make_group,
            device=torch.device(device),
            address={"interface": interface} if interface else {"hostname": host},
            timeout=timeout,
        )
        group = make_group(store, rank, size)
        if dcp == 1:
            return cls(rank, size, group, ep=ep)
        context_store = distributed.PrefixStore(f"context-{rank // dcp}", store)
        context_group = make_group(context_store, rank % dcp, dcp)
        context = Ranks(rank % dcp, dcp, context_group)
        return cls(rank, size, group, context, ep)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks in place and returns it.

        The result is bit-identical on every rank.
        """
        if self.group is not None:
            self.group.allreduce([tensor]).wait()
        return tensor

    def all_gather_last_dim(self, tensor: Tensor) -> Tensor:
        """Concatenates `tensor` [rows, n] of all ranks to [rows, size * n]."""
        if self.group is None:
            return tensor
        parts = self.all_gather(tensor.contiguous())
        return parts.transpose(0, 1).reshape(len(tensor), self.size * tensor.shape[1])

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Overwrites `tensor` with the `tensor` of rank `root`, and returns it."""
        if self.group is not None:
            self.group.broadcast(tensor, root).wait()
        return tensor

    def close(self) -> None:
        """Leaves the group. Every rank must call this after its last collective."""
        groups = [self.context.group if self.context else None, self.group]
        self.context = self.group = None
        for group in groups:
            if group is not None:
                group.shutdown()


def tcp_store(
    host: str, port: int, size: int, *, listen_fd: int | None, timeout_s: float = 60.0
) -> Any:
    """Returns a store through which ranks on several hosts find each other.

    Args:
        host, port: where rank 0 serves the store.
        listen_fd: on rank 0, the descriptor of the socket that listens there; None on
            other ranks.
    """
    return distributed.TCPStore(
        host,
        port,
        size,
        is_master=listen_fd is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def _make_group(
    store: Any,
    rank: int,
    size: int,
    *,
    device: torch.device,
    address: dict[str, str],
    timeout: timedelta,
) -> Any:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl_options = distributed.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        # Collectives get the same priority as the steps, which run on a high-priority
        # stream.
        nccl_options.is_high_priority_stream = True
        return distributed.ProcessGroupNCCL(store, rank, size, nccl_options)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timeout
    # By default gloo binds to the address of the host name, which may be unreachable.
    options._devices = [distributed.ProcessGroupGloo.create_device(**address)]
    return distributed.ProcessGroupGloo(store, rank, size, options)

"""Tensor parallelism: which part of what a rank owns, and the collectives between ranks.

Process groups are explicit objects, never torch's process-wide default, so that two engines can
live in one process.
"""

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from kvcache.transfer.plan.endpoint import heads_of

# torch's stubs lack the explicit group classes, which are what this file is about.
distributed: Any = torch.distributed


class Ranks:
    """One rank's end of a group: `rank` of `size`, in a ProcessGroupGloo or ProcessGroupNCCL."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank = rank
        self.size = size
        self.group = group

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Contiguous [...] of each rank -> [size, ...] on every rank."""
        parts = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        self.group._allgather_base(parts, tensor).wait()
        return parts.view(self.size, *tensor.shape)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Contiguous [size, ...], a part for each rank -> [size, ...], each rank's for this one."""
        parts = torch.empty_like(tensor)
        self.group.alltoall_base(parts, tensor, [], []).wait()
        return parts


class Parallel(Ranks):
    """One rank's end of a tensor-parallel group. A group of size 1 does nothing.

    Args:
        group: None only for size 1. `connect` makes one.
        context: the ranks, neighbours of this one, that hold the same KV heads and share the
            tokens; None where every rank keeps all tokens.
        ep: parts that the experts of a mixture are in, each shared by `size / ep` ranks.
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
        """Ranks that share every sequence's tokens."""
        return self.context.size if self.context else 1

    def kv_heads(self, total_heads: int) -> range:
        """The KV heads of this rank's context group, or of this rank without one."""
        return heads_of(self.rank // self.dcp, self.size // self.dcp, total_heads)

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        *,
        meeting: str,
        device: torch.device | str = "cpu",
        dcp: int = 1,
        ep: int = 1,
        timeout_s: float = 60.0,
    ) -> "Parallel":
        """Joins a group of this host; blocks until all ranks are there.

        Args:
            meeting: path of a file that is not there yet, by which the ranks find each other.
            device: "cpu" uses gloo, "cuda:N" NCCL on that GPU.
            dcp: size of the context-parallel groups, a divisor of `size`.
            ep: parts of the experts, a divisor of `size`.
            timeout_s: for joining, and afterwards for each collective.
        """
        if size == 1:
            return cls(rank, size)
        store = distributed.FileStore(meeting, size)
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        make = partial(_make_group, device=torch.device(device), timeout=timeout)
        group = make(store, rank, size)
        if dcp == 1:
            return cls(rank, size, group, ep=ep)
        context_store = distributed.PrefixStore(f"context-{rank // dcp}", store)
        context = Ranks(rank % dcp, dcp, make(context_store, rank % dcp, dcp))
        return cls(rank, size, group, context, ep)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks in place and returns it; bit-identical on every rank."""
        if self.group is not None:
            self.group.allreduce([tensor]).wait()
        return tensor

    def all_gather_last_dim(self, tensor: Tensor) -> Tensor:
        """Joins the ranks' [rows, n] into [rows, size * n], in rank order, on every rank."""
        if self.group is None:
            return tensor
        parts = self.all_gather(tensor.contiguous())
        return parts.transpose(0, 1).reshape(len(tensor), self.size * tensor.shape[1])

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Overwrites `tensor` with rank `root`'s and returns it."""
        if self.group is not None:
            self.group.broadcast(tensor, root).wait()
        return tensor

    def close(self) -> None:
        """Leaves the group; every rank calls it, after its last collective."""
        groups = [self.context.group if self.context else None, self.group]
        self.context = self.group = None
        for group in groups:
            if group is not None:
                group.shutdown()


def _make_group(
    store: Any, rank: int, size: int, *, device: torch.device, timeout: timedelta
) -> Any:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl_options = distributed.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        nccl_options.is_high_priority_stream = True  # like the stream that steps run on
        return distributed.ProcessGroupNCCL(store, rank, size, nccl_options)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timeout
    # Left alone, gloo binds to what the host name resolves to, which need not be reachable.
    options._devices = [
        distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    ]
    return distributed.ProcessGroupGloo(store, rank, size, options)

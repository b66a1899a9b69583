"""The base class of the two FlashInfer backends: workspace, slots, CUDA graph buffers.

FlashInfer's kernels are planned on the host once a step and run once a layer. Decode
steps can be planned for a CUDA graph (`plan_for_graph`). All data that a captured
`forward` reads is then in buffers with fixed addresses, and a plan only writes to them.

Step n + 1 may be planned while step n runs. On the device, the stream orders the plan's
copies after step n. On the host, FlashInfer writes each plan to the same pinned memory,
from which the device copies it. So `planning` waits until the device has copied the
plan of step n. The device copies that plan as soon as step n - 1 ends, so the wait is
short.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionKind,
    Int32s,
    Int64s,
    Pages,
)
from attention.flashinfer_workspace import Gpu, Workspace, explain_overflow
from attention.support import DEFAULT_LIMITS, AttentionSpec, StepLimits, check_supported
from kvcache.pool import KVPool

# Factor that converts the kernels' base-2 log-sum-exps to natural logarithms.
LN_2: Final = math.log(2)


class GraphPlan(NamedTuple):
    """A plan of a captured kernel.

    Attributes:
        data: What the caller must copy to the buffer `plan`.
        has_runs: Whether the step has runs; see `AttentionBackend.plan_for_graph`.
    """

    data: Int32s
    has_runs: bool = False


class CapturedBuffers:
    """The slots, pages and plans that captured graphs read, at fixed addresses.

    All buffers are parts of one allocation, so that `upload` fills them with a single
    copy.

    Args:
        max_seqs: Sequences of the largest step.
        max_blocks: Blocks of the longest sequence.
        plan_size: Elements of the largest plan.
    """

    def __init__(
        self, max_seqs: int, max_blocks: int, plan_size: int, device: torch.device
    ) -> None:
        sizes = [max_seqs, max_seqs, max_seqs + 1, plan_size, max_seqs * max_blocks]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.slots, self.last_page_lens, self.indptr, self.plan, self.indices = (
            torch.split_with_sizes(self._all, sizes)
        )

    def upload(self, slots: Int64s, pages: Pages, plan: Int32s) -> None:
        """Copies a step's indices to the device without waiting for the copy."""
        parts: list[Int32s | Int64s] = [
            slots,
            pages.last_page_lens,
            pages.indptr,
            plan,
            pages.indices,
        ]
        size = self._starts[4] + len(pages.indices)
        host = torch.empty(size, dtype=torch.int32, pin_memory=True)
        target = host.numpy()
        for start, part in zip(self._starts, parts, strict=False):
            target[start : start + len(part)] = part
        self._all[: len(host)].copy_(host, non_blocking=True)


def _spec_of(
    pool: KVPool, dtype: torch.dtype | None, num_q_heads: int
) -> AttentionSpec:
    """Returns the spec of a backend over `pool` for queries of `dtype`.

    Without `dtype`, queries have the pool's dtype.
    """
    layout = pool.layout
    return AttentionSpec(
        device=pool.device.type,
        dtype=str(dtype).removeprefix("torch.") if dtype else layout.dtype,
        kv_dtype=layout.dtype,
        head_dim=layout.head_dim,
        num_components=layout.num_components,
        num_q_heads=num_q_heads,
    )


class FlashInferBase(AttentionBackend):
    """See AttentionBackend.

    All kernels share one workspace, so steps must not run concurrently.

    Args:
        dtype: The queries' dtype; by default the pool's.
        limits: The largest steps; they determine the size of the workspace.
        shared_with: A backend for the same heads and steps. This backend uses its
            workspace, so the two must not run concurrently.
        sizes: num_q_heads, head_dim, scale and layers, as in AttentionBackend.

    Raises:
        UnsupportedPool: The kernels cannot serve the pool; attention/support.py lists
            their limits.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        dtype: torch.dtype | None = None,
        limits: StepLimits = DEFAULT_LIMITS,
        shared_with: "FlashInferBase | None" = None,
        **sizes: Any,
    ) -> None:
        spec = _spec_of(pool, dtype, sizes["num_q_heads"])
        check_supported("flashinfer", spec, limits)
        super().__init__(pool, **sizes)
        self.device = pool.device
        self.dtype = dtype or pool.tensor.dtype
        self.kv_dtype = pool.tensor.dtype
        self.block_size = pool.layout.block_size
        # In the order of the arguments of the kernels' `plan` methods.
        self.heads = (self.num_q_heads, self.num_kv_heads, self.head_dim)
        self._limits = limits
        properties = torch.cuda.get_device_properties(self.device)
        self.gpu = Gpu(properties.multi_processor_count, properties.major)
        self.sizes = self.workspace_sizes(limits, self.gpu)
        self.workspace: torch.Tensor
        if shared_with is not None:
            self.workspace = shared_with.workspace
        else:
            self.workspace = torch.zeros(
                self.sizes.floats, dtype=torch.uint8, device=self.device
            )
        self._buffers: dict[AttentionKind, CapturedBuffers] = {}
        self._captured: dict[tuple[AttentionKind, int], Any] = {}
        new_event: Any = torch.cuda.Event
        self._last_plan = new_event()

    @abstractmethod
    def workspace_sizes(self, limits: StepLimits, gpu: Gpu) -> Workspace:
        """Returns the workspace that steps of up to `limits` need."""

    @property
    def workspace_bytes(self) -> int:
        return self.sizes.floats

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Encloses the calls that write a plan.

        Entering the context waits until the device has copied the previous plan.

        Raises:
            WorkspaceTooSmall: The plan needs more workspace than was computed.
        """
        self._last_plan.synchronize()
        with explain_overflow(self.sizes, self._limits):
            yield
        self._last_plan.record(torch.cuda.current_stream(self.device))

    def set_slots(self, slots: Int64s) -> None:
        """Sets the slots in which the step's T tokens are stored."""
        self.slots = pinned(slots.astype(np.int32)).to(self.device, non_blocking=True)

    def upload_block_list(self, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
        """Uploads the step's blocks, as arguments of the kernel `widen`.

        Returns:
            The block ids, int32, and a tensor with their number as its first element.
        """
        count_and_blocks = np.concatenate((pages.indptr[-1:], pages.indices))
        host = pinned(count_and_blocks.astype(np.int32))
        uploaded = host.to(self.device, non_blocking=True)
        return uploaded[1:], uploaded

    def reserve_graph_buffers(self, max_seqs: int, max_blocks: int) -> None:
        for kind in self.kinds:
            seen_blocks = max_blocks
            if kind.window is not None:
                seen_blocks = min(max_blocks, kind.window // self.block_size + 2)
            self._buffers[kind] = CapturedBuffers(
                max_seqs, seen_blocks, self.graph_plan_size(max_seqs), self.device
            )
        self._captured.clear()  # these kernels read the buffers that were replaced

    def plan_for_graph(
        self, batch: AttentionBatch, num_rows: int, *, captures_runs: bool = False
    ) -> bool:
        assert self._buffers, (
            "reserve_graph_buffers must be called before plan_for_graph"
        )
        is_decode_step = bool((batch.query_lens == 1).all())
        assert is_decode_step, "only steps of single tokens are captured"
        padded = batch.padded_to(num_rows, self.block_size)
        has_runs = False
        for kind, buffers in self._buffers.items():
            kernel = self._captured.get((kind, num_rows))
            if kernel is None:
                kernel = self.make_graph_kernel(kind, num_rows, buffers)
                self._captured[kind, num_rows] = kernel
            seen = padded.limit_to_window(kind.window, self.block_size)
            pages = seen.pages(self.block_size)
            plan = self.plan_graph_kernel(kind, kernel, seen, pages)
            if plan.has_runs:
                has_runs = True
            if captures_runs:
                kernel.has_runs = True
            buffers.upload(padded.slot_mapping, pages, plan.data)
            self.slots = buffers.slots[:num_rows]
        return has_runs

    @abstractmethod
    def graph_plan_size(self, max_seqs: int) -> int:
        """Returns the largest number of elements that `plan_graph_kernel` returns for
        steps of up to `max_seqs` sequences."""

    @abstractmethod
    def make_graph_kernel(
        self, kind: AttentionKind, num_rows: int, buffers: CapturedBuffers
    ) -> Any:
        """Makes a kernel for the layers of `kind` in steps of `num_rows` single tokens.

        The kernel reads `buffers` only.
        """

    @abstractmethod
    def plan_graph_kernel(
        self, kind: AttentionKind, kernel: Any, batch: AttentionBatch, pages: Pages
    ) -> GraphPlan:
        """Plans a captured kernel and makes `forward` use it in the layers of `kind`.

        Args:
            batch: Has exactly as many rows as the kernel was made for.
            pages: The batch's blocks, which the caller uploads.
        """


def indptr_of(lens: Int32s) -> torch.Tensor:
    """Returns int32 [S + 1]: 0, then the sums of the first 1, 2, .. S of `lens` [S]."""
    indptr = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=indptr[1:])
    return torch.from_numpy(indptr)


def pinned(array: Int32s) -> torch.Tensor:
    """Copies `array` to pinned memory, so that uploads are asynchronous."""
    return torch.from_numpy(array).pin_memory()

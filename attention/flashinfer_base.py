"""What the two FlashInfer backends share: the workspace, where tokens are stored, captured buffers.

FlashInfer's kernels are planned on the host once a step and run once a layer. Decode steps can be
planned for a CUDA graph (`plan_captured`): all that a captured forward reads then lies in buffers
that do not move, and a plan only writes to them.

A step may be planned while the one before it runs. On the device the stream orders them; on the
host a plan is written to pinned memory that the device copies from, and `planning` waits until the
device has copied the last plan. That is so once the step before the last has ended, so the wait is
short.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from attention.base import AttentionBackend, AttentionBatch, Int32s, Int64s, Kind, Pages
from attention.flashinfer_workspace import Gpu, Workspace, explaining
from attention.support import DEFAULT_LIMITS, StepLimits, Wanted, check
from kvcache.pool import KVPool

LN_2: Final = math.log(
    2
)  # from the kernels' log-sum-exps, in powers of two, to natural ones


class CapturedBuffers:
    """What captured graphs read, for up to S sequences of up to M blocks.

    All lie in one allocation, in the order in which `upload` fills them with one copy.
    """

    def __init__(self, max_seqs: int, max_blocks: int, device: torch.device) -> None:
        sizes = [max_seqs, max_seqs, max_seqs + 1, max_seqs * max_blocks]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.slots, self.last_page_lens, self.indptr, self.indices = (
            torch.split_with_sizes(self._all, sizes)
        )

    def upload(self, slots: Int64s, pages: Pages) -> None:
        """Copies a step's indices to the device without waiting for it."""
        parts: list[Int32s | Int64s] = [
            slots,
            pages.last_page_lens,
            pages.indptr,
            pages.indices,
        ]
        host = torch.empty(
            self._starts[3] + len(pages.indices), dtype=torch.int32, pin_memory=True
        )
        target = host.numpy()
        for start, part in zip(self._starts, parts, strict=False):
            target[start : start + len(part)] = part
        self._all[: len(host)].copy_(host, non_blocking=True)


def _wanted(pool: KVPool, dtype: torch.dtype | None, num_q_heads: int) -> Wanted:
    """What a backend over `pool` is to read, with queries of `dtype`, else of the pool's own."""
    layout = pool.layout
    return Wanted(
        device=pool.device.type,
        dtype=str(dtype).removeprefix("torch.") if dtype else layout.dtype,
        kv_dtype=layout.dtype,
        head_dim=layout.head_dim,
        num_components=layout.num_components,
        num_q_heads=num_q_heads,
    )


class FlashInferBase(AttentionBackend):
    """See AttentionBackend. Owns the workspace that all its kernels share: one step at a time.

    Args:
        dtype: of the queries; the pool's where not given.
        limits: of the steps to come, which the workspace is made for.
        beside: another one for the same heads and steps, never run meanwhile: its scratch memory is
            used.

    Raises:
        UnsupportedPool: what the kernels lack; attention/support.py has the list.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        dtype: torch.dtype | None = None,
        limits: StepLimits = DEFAULT_LIMITS,
        beside: "FlashInferBase | None" = None,
        **sizes: Any,
    ) -> None:
        check("flashinfer", _wanted(pool, dtype, sizes["num_q_heads"]), limits)
        super().__init__(pool, **sizes)
        self.device = pool.device
        self.dtype, self.kv_dtype = dtype or pool.tensor.dtype, pool.tensor.dtype
        self.block_size = pool.layout.block_size
        # As the kernels' plans take them.
        self.heads = (self.num_q_heads, self.num_kv_heads, self.head_dim)
        self._limits = limits
        gpu = torch.cuda.get_device_properties(self.device)
        self.gpu = Gpu(gpu.multi_processor_count, gpu.major)
        self.sizes = self.workspace_sizes(limits, self.gpu)
        self.workspace: torch.Tensor = (
            torch.zeros(self.sizes.floats, dtype=torch.uint8, device=self.device)
            if beside is None else beside.workspace
        )  # fmt: skip
        self._buffers: dict[Kind, CapturedBuffers] = {}
        self._captured: dict[tuple[Kind, int], Any] = {}
        self._last_plan = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]

    @abstractmethod
    def workspace_sizes(self, limits: StepLimits, gpu: Gpu) -> Workspace:
        """What the plans of such steps take at most."""

    @property
    def workspace_bytes(self) -> int:
        return self.sizes.floats

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around the calls that write a plan."""
        self._last_plan.synchronize()
        with explaining(self.sizes, self._limits):
            yield
        self._last_plan.record(torch.cuda.current_stream(self.device))

    def set_slots(self, slots: Int64s) -> None:
        """Where the step's T tokens are stored."""
        self.slots = pinned(slots.astype(np.int32)).to(self.device, non_blocking=True)

    def listed(self, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's blocks, int32, and their number, as `widen` takes them."""
        listed = np.concatenate((pages.indptr[-1:], pages.indices)).astype(np.int32)
        read = pinned(listed).to(self.device, non_blocking=True)
        return read[1:], read

    def reserve_captured(self, max_seqs: int, max_blocks: int) -> None:
        for kind in self.kinds:
            of_window = (
                max_blocks
                if kind.window is None
                else kind.window // self.block_size + 2
            )
            most = min(max_blocks, of_window)
            self._buffers[kind] = CapturedBuffers(max_seqs, most, self.device)
        self._captured.clear()  # kernels of other buffers

    def plan_captured(self, batch: AttentionBatch, num_rows: int) -> None:
        assert self._buffers, "reserve_captured comes first"
        assert bool((batch.query_lens == 1).all()), (
            "only steps of single tokens are captured"
        )
        padded = batch.padded_to(num_rows, self.block_size)
        plans = []
        for kind, buffers in self._buffers.items():
            if (kernel := self._captured.get((kind, num_rows))) is None:
                kernel = self.captured_kernel(kind, num_rows, buffers)
                self._captured[kind, num_rows] = kernel
            seen = padded.within(kind.window, self.block_size)
            pages = seen.pages(self.block_size)
            buffers.upload(padded.slot_mapping, pages)
            self.slots = buffers.slots[:num_rows]
            plans.append((kind, kernel, seen, pages))
        with self.planning():
            for plan in plans:
                self.plan_captured_kernel(*plan)

    @abstractmethod
    def captured_kernel(
        self, kind: Kind, num_rows: int, buffers: CapturedBuffers
    ) -> Any:
        """A kernel for a kind's layers in steps of `num_rows` single tokens, that reads `buffers`
        only."""

    @abstractmethod
    def plan_captured_kernel(
        self, kind: Kind, kernel: Any, batch: AttentionBatch, pages: Pages
    ) -> None:
        """Plans it for a batch of exactly its rows, whose pages the buffers hold already, and
        makes `forward` use it in that kind's layers."""


def indptr_of(lens: Int32s) -> torch.Tensor:
    """int32 [S + 1]: where each of S runs of `lens` begins, and the end of the last."""
    indptr = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=indptr[1:])
    return torch.from_numpy(indptr)


def pinned(array: Int32s) -> torch.Tensor:
    """A copy that the device can take without anybody waiting."""
    return torch.from_numpy(array).pin_memory()

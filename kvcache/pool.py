"""The memory of a rank's KV cache: one allocation with strided views."""

from collections.abc import Sequence

import torch

from kvcache.groups import ONE_GROUP, KVGroups
from kvcache.layout import KVLayout
from kvcache.shared_memory import SharedMemory
from protocol.handshake import AXES

# A drafter's pool in the same allocation begins at a multiple of this number of bytes.
# Torch aligns its GPU allocations to the same number.
ALIGN_BYTES = 512


class KVPool:
    """One zero-filled allocation that holds all layers' KV of one rank.

    The allocation may have more memory behind this KV, for the pool of a drafter. Peers
    then access both pools through one registration or mapping.

    On the CPU the allocation is a mapped memory file (`shared`), which other processes
    may map too. It starts at a page boundary. A page takes memory only after its first
    write, so unused parts of a large pool take no memory. On a GPU the pool is one
    torch allocation, aligned to at least 512 bytes, or to 2 MiB if it is large.

    Args:
        layout: Order, sizes and dtype. Every view below has this dtype.
        device: "cpu", "cuda", "cuda:1", or a torch.device.
        scales: Scales of FP8 elements (kvcache/fp8.py), by layer and component; empty:
            all are 1.
        groups: The model's layer groups (kvcache/groups.py), which share the pool's
            blocks. `layout.num_layers` counts the layers of one group.
        extra_bytes: Size in bytes of the additional memory behind the KV.
        memory: uint8: Memory to use instead of a new allocation. Its size must be
            layout.nbytes, or `extra_offset + extra_bytes` if there are extra bytes.

    Attributes:
        memory: uint8: the whole allocation, including the memory behind the KV.
        extra: uint8 [extra_bytes]: the memory behind the KV, which begins
            `extra_offset` bytes after the start of `memory`.
        flat_bytes: uint8 [nbytes]: the KV, as bytes.
        device: The device of the memory, including the index of a GPU.
        shared: The pool's file, for other processes; None on a GPU.
        tensor: dtype [six axes in layout.order].
        canonical: dtype [B, H, L, C, N, D], whatever layout.order is; a view of
            `tensor`.
        highest_block: The highest block id that steps and pulls have used since the
            last `mark_unused`; -1: none.

    Raises:
        MemoryError, torch.OutOfMemoryError: The allocation does not fit into memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: str | torch.device = "cpu",
        scales: Sequence[float] = (),
        groups: KVGroups = ONE_GROUP,
        *,
        extra_bytes: int = 0,
        memory: torch.Tensor | None = None,
    ) -> None:
        num_scales = layout.num_layers * layout.num_components
        assert len(scales) in (0, num_scales), len(scales)
        self.layout = layout
        self.groups = groups
        self.scales = tuple(scales)
        self.extra_offset = -(-layout.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        nbytes = self.extra_offset + extra_bytes if extra_bytes else layout.nbytes
        self.shared: SharedMemory | None = None
        if memory is not None:
            assert len(memory) == nbytes, (len(memory), nbytes)
        elif torch.device(device).type == "cpu":
            self.shared = SharedMemory(nbytes)
            # The tensor keeps the mapping alive.
            memory = torch.frombuffer(
                self.shared.mapping, dtype=torch.uint8, count=nbytes
            )
        else:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.memory = memory
        self.flat_bytes = memory[: layout.nbytes]
        self.extra = memory[self.extra_offset :]
        self.device = memory.device
        dtype = getattr(torch, layout.dtype)
        self.tensor = self.flat_bytes.view(dtype).view(layout.shape)
        self.canonical = self.tensor.permute(
            [layout.order.index(axis) for axis in AXES]
        )
        self.highest_block = -1

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def base_address(self) -> int:
        """Address of the first byte, in the address space of `device`."""
        return int(self.flat_bytes.data_ptr())

    @property
    def device_id(self) -> int:
        """Index of the GPU; 0 on the CPU."""
        return self.device.index or 0

    def scale(self, layer: int, component: int) -> float:
        """The scale of a layer's keys (component 0) or values (component 1).

        The original number is the stored element times the scale. Component -1 is the
        last component.
        """
        count = self.layout.num_components
        index = layer * count + component % count
        return self.scales[index] if self.scales else 1.0

    def mark_used(self, block: int) -> None:
        """Records that a step or a pull uses blocks up to the id `block`."""
        self.highest_block = max(self.highest_block, block)

    def mark_unused(self) -> None:
        """Records that no block is in use, because no sequence has KV in the pool."""
        self.highest_block = -1

    def view(self, layer: int) -> torch.Tensor:
        """A strided view of one layer, of shape [B, C, H, N, D]. Nothing is copied.

        The axes are those of kvcache/layout.py.
        """
        return self.canonical[:, :, layer].transpose(1, 2)

    def component(self, layer: int, component: int) -> torch.Tensor:
        """A strided view of a layer's keys (component 0) or values (component 1).

        The shape of the view is [B, H, N, D]. Nothing is copied.
        """
        return self.canonical[:, :, layer, component]

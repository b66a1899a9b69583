"""The memory of a rank's KV cache: one allocation, and strided views of it for every order."""

from collections.abc import Sequence

import torch

from kvcache.groups import ONE_GROUP, KVGroups
from kvcache.layout import KVLayout
from kvcache.shared_memory import SharedMemory
from protocol.handshake import AXES


class KVPool:
    """One zero-filled allocation that holds all layers' KV of one rank.

    On the CPU it is a mapping of its own: it begins on a page, and a page costs memory from its
    first write on, so a large pool that is not used is free. `shared` is its file, which other
    processes may map. On a GPU it is one torch allocation, which torch aligns to at least 512
    bytes, and to 2 MiB for a pool of some size.

    Args:
        layout: order, sizes and dtype; every view below has its dtype.
        device: "cpu", "cuda", "cuda:1", or a torch.device.
        scales: of FP8 elements (kvcache/fp8.py), by layer and component; empty: all 1.
        groups: of layers, whose blocks these are; the layout's layers are those of one group.

    Raises:
        MemoryError, torch.OutOfMemoryError: the allocation does not fit.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: str | torch.device = "cpu",
        scales: Sequence[float] = (),
        groups: KVGroups = ONE_GROUP,
    ) -> None:
        assert len(scales) in (0, layout.num_layers * layout.num_components), len(
            scales
        )
        self.layout, self.groups = layout, groups
        self.scales = tuple(scales)
        nbytes = layout.nbytes
        self.shared = (
            SharedMemory(nbytes) if torch.device(device).type == "cpu" else None
        )
        # zeroed uint8[nbytes], the allocation as transfers see it; it keeps the mapping alive
        if self.shared is None:
            self.flat_bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        else:
            self.flat_bytes = torch.frombuffer(
                self.shared.mapping, dtype=torch.uint8, count=nbytes
            )
        self.device = self.flat_bytes.device  # with its index
        dtype = getattr(torch, layout.dtype)
        # dtype[...six axes in layout.order]
        self.tensor = self.flat_bytes.view(dtype).view(layout.shape)
        # dtype[B, H, L, C, N, D] whatever the order
        self.canonical = self.tensor.permute(
            [layout.order.index(axis) for axis in AXES]
        )
        self.highest_block = -1  # of those that steps and pulls have used

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
        """What an element of this layer's keys (0) or values (1) is multiplied by when read; -1 is
        the last component there is."""
        count = self.layout.num_components
        index = layer * count + component % count
        return self.scales[index] if self.scales else 1.0

    def use(self, block: int) -> None:
        """A step or a pull uses blocks up to this one."""
        self.highest_block = max(self.highest_block, block)

    def view(self, layer: int) -> torch.Tensor:
        """[B, C, H, N, D] of one layer, strided, no copy."""
        return self.canonical[:, :, layer].transpose(1, 2)

    def component(self, layer: int, component: int) -> torch.Tensor:
        """[B, H, N, D] of one layer's keys (0) or values (1), strided, no copy."""
        return self.canonical[:, :, layer, component]

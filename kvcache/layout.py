"""Where each element of a rank's KV cache lies: one six-axis array, in any axis order.

    B block   H KV head on this rank   L layer   C component   N token in block
    D element

Components are K and V; MLA has one component, the latent. D always comes last. The
order and the sizes decide everything: element (b, h, l, c, n, d) lies at the sum of
index x stride, and the stride of an axis is the product of the sizes to its right.
Block 0 is the reserved null block.

Byte maps, lowest address first, of 2 blocks x 2 heads x 2 layers x (K, V) x N tokens. A
box is one contiguous run; `h1 L0 K` is the keys of head 1 in layer 0; `n0..` counts the
tokens of one block.

BHLCND (default): everything that one head has in one block is ONE run. So a head slice
of a block needs one descriptor for all layers, and so does a complete block.

    block 0                                                     block 1
    [ h0: L0 K n0.. | L0 V | L1 K | L1 V ][ h1: L0 K n0.. | .. ][ h0: .. ][ h1: .. ]

BLCHND: cross-layer blocks. A complete block is one run. The slice of one head is L x C
runs of N x D elements.

    block 0                                               block 1
    [ L0: K h0 n0.. | K h1 | V h0 | V h1 ][ L1: K h0 .. ][ L0: .. ][ L1: .. ]

LBCHND (FlashInfer): a region per layer; in each block V follows K.

    layer 0                                               layer 1
    [ b0: K h0 n0.. | K h1 | V h0 | V h1 ][ b1: K h0 .. ][ b0: .. ][ b1: .. ]

LCBHND (FlashAttention, heads first): a region per layer and component.

    layer 0, K                         layer 0, V         layer 1, K
    [ b0: h0 n0.. | h1 ][ b1: h0 .. ]  [ b0 ][ b1 ]       [ b0 ][ b1 ]  ..

LBCNHD, LCBNHD (token-major, "NHD"): like LBCHND and LCBHND, but the heads of each token
lie side by side. A slice of the heads is L x C x N runs of heads x D elements.

    layer 0                                                   layer 1
    [ b0: K n0 h0 | n0 h1 | n1 h0 | n1 h1 | .. | V n0 h0 .. ][ b1 ]  [ b0 ][ b1 ]

This module does not import torch, because processes that only plan or communicate use
it.
"""

from functools import cached_property

import msgspec

from protocol.handshake import AXES, ITEMSIZE, LayoutRecord

NAMED_ORDERS = ("BHLCND", "BLCHND", "LBCHND", "LCBHND", "LBCNHD", "LCBNHD")
MAX_BLOCK_SIZE_TOKENS = 256


class KVLayout(LayoutRecord, frozen=True, dict=True):
    """The order, the sizes and the dtype of one rank's KV cache.

    The values were checked when options and handshakes were parsed. Properties that a
    plan reads dozens of times are cached: do not change the dictionaries that these
    properties return.
    """

    @classmethod
    def from_record(cls, record: LayoutRecord) -> "KVLayout":
        """The layout that a peer announced."""
        return cls(*msgspec.structs.astuple(record))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, by letter, in the canonical order BHLCND."""
        return {
            axis: getattr(self, name)
            for axis, name in zip(AXES, _SIZE_FIELDS, strict=True)
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in this layout's own order: the shape of the allocation."""
        sizes = self.sizes
        return tuple(sizes[axis] for axis in self.order)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance between neighbors along each axis, by letter, in ELEMENTS."""
        sizes = self.sizes
        stride = 1
        strides = {}
        for axis in reversed(self.order):
            strides[axis] = stride
            stride *= sizes[axis]
        return {axis: strides[axis] for axis in AXES}

    @cached_property
    def byte_strides(self) -> dict[str, int]:
        """Distance between neighbors along each axis, by letter, in bytes."""
        return {axis: stride * self.itemsize for axis, stride in self.strides.items()}

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token: all heads, layers and components of this rank."""
        num_vectors = self.num_heads * self.num_layers * self.num_components
        return num_vectors * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Number of bytes of one block. The bytes need not be contiguous."""
        return self.block_size * self.token_bytes


_SIZE_FIELDS = LayoutRecord.__struct_fields__[1:-1]  # in the order of AXES

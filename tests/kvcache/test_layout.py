"""Strides and sizes of KVLayout, compared with those of numpy arrays."""

import itertools

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvcache.layout import AXES, KVLayout
from protocol.handshake import ITEMSIZE, LayoutRecord
from tests.rigs.examples import examples

ALL_ORDERS = ["".join(head) + "D" for head in itertools.permutations("BHLCN")]
NUMPY_DTYPE = {1: np.int8, 2: np.int16, 4: np.int32}  # by item size

BASE = KVLayout("BHLCND", 5, 2, 3, 2, 4, 8, "float32")


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    return KVLayout(
        order=draw(st.sampled_from(ALL_ORDERS)),
        num_blocks=draw(st.integers(1, 5)),
        num_heads=draw(st.integers(1, 4)),
        num_layers=draw(st.integers(1, 4)),
        num_components=draw(st.integers(1, 2)),
        block_size=draw(st.integers(1, 6) | st.just(256)),
        head_dim=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(sorted(ITEMSIZE))),
    )


@given(layouts())
@examples(200)
def test_strides_and_shape_equal_those_of_a_contiguous_array(layout):
    array = np.zeros(layout.shape, NUMPY_DTYPE[layout.itemsize])
    by_axis = dict(zip(layout.order, array.strides, strict=True))
    assert layout.nbytes == array.nbytes
    for axis in AXES:
        # numpy also has strides for axes of size 1, so every axis can be compared.
        assert layout.byte_strides[axis] == by_axis[axis]
        assert layout.strides[axis] * layout.itemsize == by_axis[axis]


def test_sizes_in_bytes():
    assert BASE.block_bytes == 1536
    assert BASE.nbytes == 5 * 1536
    assert BASE.token_bytes == 2 * 3 * 2 * 8 * 4
    assert replace(BASE, dtype="float8_e4m3fn").nbytes * 4 == BASE.nbytes


def test_record_carries_every_field_across_the_wire():
    # This computes a cached property, which must not become part of the record.
    assert BASE.strides

    record = msgspec.msgpack.decode(msgspec.msgpack.encode(BASE), type=LayoutRecord)
    assert KVLayout.from_record(record) == BASE
    assert msgspec.to_builtins(BASE) == msgspec.structs.asdict(record)

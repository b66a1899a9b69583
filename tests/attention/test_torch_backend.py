"""The torch backend equals plain attention for all layouts, dtypes and batches."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.base import AttentionKind, LayerAttention
from kvcache.layout import NAMED_ORDERS
from tests.attention.reference import (
    FP8,
    NUM_LAYERS,
    SPECIAL,
    Shape,
    check_step,
    check_steps,
    forward,
    make,
    make_batch,
    make_sequences,
    reference,
    rows_of,
    run_step,
    stored,
)
from tests.rigs.examples import examples

LATENT = Shape(num_kv_heads=1, num_q_heads=5, head_dim=24, rope_dim=8)
# Scales of K and V of layer 0, then of layer 1. The third scale is so small that the
# largest keys are clamped.
SCALES = (0.02, 0.5, 0.003, 1.0)
SHAPES = {
    "grouped heads": Shape(),
    **{
        f"{q} heads over {kv}": Shape(num_q_heads=q, num_kv_heads=kv)
        for q, kv in ((1, 1), (4, 4), (9, 3), (8, 1), (14, 2))
    },
    "one key outweighs all others": Shape(steepness=10.0),
    "a pool of 16 bits": Shape(kv_dtype="bfloat16"),
    "a pool of 8 bits": Shape(kv_dtype=FP8, scales=SCALES),
    "latents": LATENT,
    "latents of 8 bits": replace(LATENT, kv_dtype=FP8, scales=(0.02, 0.7)),
    "bfloat16": Shape(dtype="bfloat16"),
    "float16": Shape(dtype="float16"),
    "bfloat16 over 8 bits": Shape(dtype="bfloat16", kv_dtype=FP8, scales=SCALES),
    "windows and soft caps in 16 bits": Shape(
        dtype="bfloat16",
        num_q_heads=8,
        num_kv_heads=2,
        layers=(
            LayerAttention(AttentionKind(4, 0.5)),
            LayerAttention(AttentionKind(None, 2.0)),
        ),
    ),
    **{name: Shape(layers=layers) for name, layers in SPECIAL.items()},
    **{
        f"{name}, copied, of 8 bits": Shape(
            num_kv_heads=1, kv_dtype=FP8, scales=SCALES, layers=layers
        )
        for name, layers in SPECIAL.items()
    },
}
# The backend has two implementations. If few query heads share a KV head, it reads keys
# in place. Otherwise it copies them.
both_implementations = pytest.mark.parametrize(
    "num_kv_heads", [1, 4], ids=["copied", "in place"]
)


def tolerance_of(shape: Shape) -> float:
    return 5e-6 if shape.dtype == "float32" else 2e-2


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_equal_the_reference(name):
    shape = SHAPES[name]
    seqs = make_sequences(shape, [11, 3, 17, 1])
    backend = make(shape)
    tolerance = tolerance_of(shape)
    prompts = [(0, 0, 10), (1, 0, 2)]
    mixed = [(0, 10, 11), (2, 0, 7), (3, 0, 1), (1, 2, 3)]
    check_steps(backend, shape, seqs, prompts, mixed, tolerance=tolerance)
    chunk = [(2, 7, 16)]
    decode = [(2, 16, 17)]
    check_steps(backend, shape, seqs, chunk, decode, num_padding=3, tolerance=tolerance)


@both_implementations
def test_very_different_lengths_share_a_step(num_kv_heads):
    shape = Shape(
        num_q_heads=8, num_kv_heads=num_kv_heads, block_size=8, num_blocks=400
    )
    lens = [1500, 2, 40, 41, 300, 1, 290]
    seqs = make_sequences(shape, lens)
    backend = make(shape)
    run_step(backend, shape, seqs, [(i, 0, n - 1) for i, n in enumerate(lens) if n > 1])
    check_step(backend, shape, seqs, [(i, n - 1, n) for i, n in enumerate(lens)])


@both_implementations
def test_prompts_longer_than_the_window_arrive_in_chunks(num_kv_heads):
    shape = Shape(
        num_q_heads=8,
        num_kv_heads=num_kv_heads,
        block_size=8,
        num_blocks=100,
        head_dim=8,
        layers=(
            LayerAttention(AttentionKind(40)),
            LayerAttention(AttentionKind(280, 2.0)),
        ),
    )
    seqs = make_sequences(shape, [600, 90])
    backend = make(shape)
    steps = [(0, 520), (520, 559), (559, 598), (598, 599), (599, 600)]
    for i, (start, stop) in enumerate(steps):
        check_step(backend, shape, seqs, [(0, start, stop), (1, i * 18, (i + 1) * 18)])


@examples(30)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    order=st.sampled_from(NAMED_ORDERS),
    block_size=st.integers(1, 16),
    lens=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_output_does_not_depend_on_how_prompts_are_divided_into_steps(
    name, order, block_size, lens, seed
):
    shape = replace(SHAPES[name], order=order, block_size=block_size)
    rng = random.Random(seed)
    seqs = make_sequences(shape, lens, seed)
    backend = make(shape)
    computed = [0] * len(lens)
    while computed != lens:
        stops = [
            start + min(rng.choice([0, 1, 1, 2, 5]), length - start)
            for start, length in zip(computed, lens, strict=True)
        ]
        bounds = zip(computed, stops, strict=True)
        spans = [
            (seq, start, stop)
            for seq, (start, stop) in enumerate(bounds)
            if stop > start
        ]
        if spans:
            num_padding = rng.randrange(3)
            check_step(backend, shape, seqs, spans, num_padding, tolerance_of(shape))
        computed = stops


def test_nan_in_one_sequence_affects_no_other_sequence_and_no_later_step():
    shape = Shape()
    seqs = make_sequences(shape, [6, 6])
    seqs.q[0][:, 5] = float("nan")
    backend = make(shape)
    run_step(backend, shape, seqs, [(0, 0, 5), (1, 0, 5)])
    outs = run_step(backend, shape, seqs, [(0, 5, 6), (1, 5, 6)])
    assert outs[0].isnan().all()
    expected, _ = reference(shape, seqs, 1, 5, 6)
    torch.testing.assert_close(outs[1].double(), expected, atol=2e-6, rtol=0)
    check_step(backend, shape, seqs, [(1, 5, 6)])


@pytest.mark.parametrize(
    "shape",
    [
        Shape(order="LBCNHD"),
        # Values must be rounded directly to 8 bits. If they were rounded to 16 bits
        # first, some would become ties, and the second rounding would differ.
        Shape(dtype="bfloat16", kv_dtype=FP8, scales=(0.003,) * 4),
    ],
    ids=["exact", "16 bits rounded once to 8"],
)
def test_step_writes_only_the_slots_of_its_tokens(shape):
    seqs = make_sequences(shape, [7])
    backend = make(shape)
    run_step(backend, shape, seqs, [(0, 0, 7)], num_padding=1)
    written = torch.zeros(shape.num_blocks, shape.block_size, dtype=torch.bool)
    for t in range(7):
        written[seqs.tables[0][t // 4], t % 4] = True
    for layer in range(NUM_LAYERS):
        for component, values in enumerate((seqs.k, seqs.v)):
            rows = backend.pool.component(layer, component).transpose(
                1, 2
            )  # [B, N, H, D]
            table = seqs.tables[0]
            actual = torch.stack([rows[table[t // 4], t % 4] for t in range(7)])
            scale = backend.pool.scale(layer, component)
            expected = stored(shape, values[0], component)[layer]
            torch.testing.assert_close(
                actual.double() * scale, expected, atol=0, rtol=1e-7
            )
            assert rows[~written].float().isnan().all()


@both_implementations
def test_inputs_may_be_slices_of_one_projection(num_kv_heads):
    shape = Shape(num_q_heads=8, num_kv_heads=num_kv_heads)
    seqs = make_sequences(shape, [6, 4])
    backend = make(shape)
    for spans in ([(0, 0, 5), (1, 0, 3)], [(0, 5, 6), (1, 3, 4)]):
        backend.plan(make_batch(shape, seqs, spans))
        parts = rows_of(shape, seqs, 0, spans)
        sliced = torch.cat(parts, dim=1).split([x.shape[1] for x in parts], dim=1)
        assert not sliced[0].is_contiguous()
        expected = forward(backend, shape, 0, parts)
        torch.testing.assert_close(backend.forward(0, *sliced), expected)


def test_rounding_to_eight_bits_changes_the_output_slightly():
    exact = Shape()
    rounded = Shape(kv_dtype=FP8, scales=(0.01, 0.01, 0.02, 0.05))
    seqs = make_sequences(exact, [60])
    out = run_step(make(rounded), rounded, seqs, [(0, 0, 60)])[0]
    error = (out - reference(exact, seqs, 0, 0, 60)[0]).norm() / out.norm()
    assert 1e-3 < error < 5e-2

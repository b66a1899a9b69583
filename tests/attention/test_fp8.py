"""Attention over KV of 8 bits is attention over the rounded keys and values."""

import math

import pytest
import torch

from attention.torch_backend import TorchBackend
from kvcache import fp8
from kvcache.pool import KVPool
from tests.attention.test_torch_backend import (
    LATENT,
    NUM_LAYERS,
    Sequences,
    Shape,
    check_latents,
    make_batch,
    make_pool,
    make_sequences,
    reference,
    reference_lse,
    run_step,
    with_lse,
)

SCALES = [0.02, 0.5, 0.003, 1.0]  # K and V of two layers; the third cuts the largest keys off


def rounded(exact: Sequences, scales: list[float], num_components: int = 2) -> Sequences:
    """The sequences as a pool of these scales holds them."""

    def stored(values: torch.Tensor, component: int) -> torch.Tensor:
        each = torch.tensor(scales).double().view(NUM_LAYERS, -1)[:, component, None, None, None]
        return fp8.stored_as(values * (1 / each).float(), fp8.DTYPE).float() * each.float()

    k = [stored(values, 0) for values in exact.k]
    v = [stored(values, num_components - 1) for values in exact.v]
    return Sequences(exact.q, k, v, exact.tables)


def fp8_backend(
    shape: Shape, scales: list[float], dtype: torch.dtype = torch.float32
) -> TorchBackend:
    pool = KVPool(make_pool(shape).layout, shape.device, scales)
    pool.tensor.fill_(float("nan"))
    scale = 1 / math.sqrt(shape.head_dim)
    heads = {"num_q_heads": shape.num_q_heads, "head_dim": shape.head_dim}
    return TorchBackend(pool, **heads, scale=scale, dtype=dtype)


@pytest.mark.parametrize("order", ["BHLCND", "LBCNHD", "LCBHND"])
def test_any_step_equals_the_reference_over_rounded_kv(order: str) -> None:
    shape = Shape(order=order, dtype="float8_e4m3fn")
    exact = make_sequences(Shape(order=order), [11, 30, 17, 1])
    seqs = rounded(exact, SCALES)
    backend = fp8_backend(shape, SCALES)
    for spans in (
        [(0, 0, 10), (1, 0, 20)],
        [(0, 10, 11), (2, 0, 7), (3, 0, 1), (1, 20, 29)],
        [(1, 29, 30)],
    ):
        outs = run_step(backend, shape, exact, spans, num_padding=2)
        for span, out in zip(spans, outs, strict=True):
            assert out.dtype == torch.float32
            expected = reference(shape, seqs, *span)
            torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=5e-6)


def test_rounding_to_eight_bits_moves_the_output_a_little() -> None:
    shape = Shape(dtype="float8_e4m3fn")
    exact = make_sequences(Shape(), [60])
    out = run_step(fp8_backend(shape, [0.01, 0.01, 0.02, 0.05]), shape, exact, [(0, 0, 60)])[0]
    error = (out - reference(shape, exact, 0, 0, 60)).norm() / out.norm()
    assert 1e-3 < error < 5e-2


def test_elements_of_sixteen_bits_are_rounded_once() -> None:
    """Divided in 16 bits first, some would lie on a tie that was none."""
    shape = Shape(dtype="float8_e4m3fn")
    backend = fp8_backend(shape, [0.003] * 4, torch.bfloat16)
    seqs = make_sequences(Shape(dtype="bfloat16"), [60])
    run_step(backend, shape, seqs, [(0, 0, 60)])
    keys = backend.pool.component(0, 0).transpose(1, 2)  # [B, N, H, D]
    stored = torch.stack([keys[seqs.tables[0][t // 4], t % 4] for t in range(60)])
    wanted = fp8.stored_as(seqs.k[0][0].float() * (1 / 0.003), fp8.DTYPE)
    assert torch.equal(stored.float(), wanted.float())


def test_log_sum_exp_counts_the_keys_scale() -> None:
    shape = Shape(dtype="float8_e4m3fn")
    exact = make_sequences(Shape(), [9])
    backend = fp8_backend(shape, SCALES)
    run_step(backend, shape, exact, [(0, 0, 8)])
    backend.plan(make_batch(shape, exact, [(0, 8, 9)]))
    _, lse = with_lse(backend, 0, *(x[0][0, 8:9] for x in (exact.q, exact.k, exact.v)))
    expected = reference_lse(shape, rounded(exact, SCALES), 0, 8, 9)
    torch.testing.assert_close(lse, expected, atol=1e-5, rtol=1e-5)


def test_latents_have_one_scale_as_keys_and_as_values() -> None:
    shape, scales = Shape(**LATENT, dtype="float8_e4m3fn"), [0.02, 0.7]
    exact = make_sequences(Shape(**LATENT), [13, 6])
    stored = rounded(exact, scales, num_components=1)
    check_latents(fp8_backend(shape, scales), shape, exact, stored)


def test_queries_of_eight_bits_are_refused() -> None:
    shape = Shape(dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match=r"queries of torch\.float8_e4m3fn.*float32"):
        TorchBackend(make_pool(shape), num_q_heads=6, head_dim=16, scale=1.0)

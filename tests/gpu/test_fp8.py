"""KV in FP8 on a GPU: stored and read as the torch backend does, captured, and what is refused."""

import pytest
import torch

from attention.base import AttentionBackend
from attention.registry import create_backend
from kvcache import fp8
from kvcache.pool import KVPool
from model.config import load_config
from tests.attention.test_torch_backend import (
    NUM_LAYERS,
    Sequences,
    Shape,
    make_batch,
    make_pool,
    make_sequences,
    with_lse,
)
from tests.gpu.test_flashinfer import in_graph
from tests.gpu.test_runner import MODELS, SERVED, assert_same_but_for_ties, decode, runner_for

pytestmark = pytest.mark.gpu
SCALES = [0.02, 0.5, 0.003, 1.0]  # K and V of two layers; the third cuts the largest keys off
TOLERANCE = 2e-2  # bfloat16
LENS = [70, 300, 17, 1, 40]


def make(name: str, shape: Shape, scales: list[float]) -> AttentionBackend:
    pool = KVPool(make_pool(shape).layout, "cuda", scales)
    pool.tensor.copy_(torch.full(pool.tensor.shape, float("nan"), device="cuda"))
    heads = {"num_q_heads": shape.num_q_heads, "head_dim": shape.head_dim}
    scale = shape.head_dim**-0.5
    return create_backend(name, pool, **heads, scale=scale, dtype=torch.bfloat16)


def gpu_shape(**sizes: object) -> tuple[Shape, Sequences]:
    fields = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 16, **sizes}
    seqs = make_sequences(Shape(dtype="bfloat16", **fields), LENS)
    return Shape(dtype="float8_e4m3fn", device="cuda", **fields), seqs


def rows_of(seqs: Sequences, layer: int, spans: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    return [
        torch.cat([part[seq][layer, start:stop] for seq, start, stop in spans]).cuda()
        for part in (seqs.q, seqs.k, seqs.v)
    ]


def assert_same_pools(*backends: AttentionBackend) -> None:
    stored = [fp8.numbers(each.pool.tensor, torch.float32).nan_to_num(1e9) for each in backends]
    assert torch.equal(*stored)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("order", "block_size"), [("BHLCND", 64), ("LBCNHD", 16), ("LCBHND", 16)])
def test_flashinfer_stores_and_reads_what_torch_does(
    order: str, block_size: int, head_dim: int
) -> None:
    shape, seqs = gpu_shape(order=order, block_size=block_size, head_dim=head_dim)
    backends = [make(name, shape, SCALES) for name in ("flashinfer", "torch")]
    firsts = [(i, 0, n // 2) for i, n in enumerate(LENS) if n > 1]
    seconds = [(i, n // 2, n - 1) for i, n in enumerate(LENS) if n > 1]
    lasts = [(i, n - 1, n) for i, n in enumerate(LENS)]
    for spans in (firsts, [lasts[3], *seconds], lasts):
        batch = make_batch(shape, seqs, spans)
        for layer in range(NUM_LAYERS):
            results = []
            for backend in backends:
                backend.plan(batch)
                results.append(with_lse(backend, layer, *rows_of(seqs, layer, spans)))
            (out, lse), (expected, expected_lse) = results
            torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=TOLERANCE)
            torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=2e-2)
    assert_same_pools(*backends)


def test_a_long_new_prompt_reads_what_is_stored_of_it() -> None:
    """By other kernels than one with context, and yet the same numbers."""
    sizes = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 16}
    sizes["num_blocks"] = 300
    seqs = make_sequences(Shape(dtype="bfloat16", **sizes), [800, 40, 600])
    shape = Shape(dtype="float8_e4m3fn", device="cuda", **sizes)
    ours, paged, plain = (
        make(name, shape, SCALES) for name in ("flashinfer", "flashinfer", "torch")
    )
    paged._takes_fresh = False
    spans = [(1, 0, 40), (0, 0, 800), (2, 0, 512)]
    batch = make_batch(shape, seqs, spans)
    for layer in range(NUM_LAYERS):
        outs = []
        for backend in (ours, paged, plain):
            backend.plan(batch)
            outs.append(backend.forward(layer, *rows_of(seqs, layer, spans)))
        torch.testing.assert_close(outs[0], outs[2], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(outs[0], outs[1], atol=1e-2, rtol=1e-2)
    if torch.cuda.get_device_capability()[0] == 9:
        assert [part.is_fresh for part in ours._parts] == [False, True]
    assert_same_pools(ours, plain)


def test_a_captured_step_reads_the_scales_too() -> None:
    shape, seqs = gpu_shape()
    captured, eager = make("flashinfer", shape, SCALES), make("torch", shape, SCALES)
    prompts = [(i, 0, n - 1) for i, n in enumerate(LENS) if n > 1]
    for backend in (captured, eager):
        backend.plan(make_batch(shape, seqs, prompts))
        backend.forward(0, *rows_of(seqs, 0, prompts))
    spans = [(i, n - 1, n) for i, n in enumerate(LENS) if n > 1]
    batch, rows = make_batch(shape, seqs, spans), rows_of(seqs, 0, spans)
    captured.reserve_captured(len(spans), 32)
    captured.plan_captured(batch, len(spans))
    graph, out = in_graph(lambda: captured.forward(0, *rows))
    out.zero_()
    captured.plan_captured(batch, len(spans))
    graph.replay()
    eager.plan(batch)
    torch.testing.assert_close(out, eager.forward(0, *rows), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in SERVED if "mla" not in name][:1])
def test_a_model_in_graphs_continues_like_torch(name: str) -> None:
    layers = load_config(MODELS[name]).num_layers
    options = {"kv_cache_dtype": "float8_e4m3fn", "scales": [0.03] * 2 * layers}
    with runner_for(MODELS[name], **options) as runner:
        assert runner.graphs is not None
        tokens, logits = decode(runner, 24)
    torch_options = {**options, "attention_backend": "torch", "enforce_eager": True}
    with runner_for(MODELS[name], **torch_options) as runner:
        _, expected = decode(runner, 24, forced=tokens)
    assert_same_but_for_ties(tokens, logits, expected)


@pytest.mark.parametrize(
    ("sizes", "dtype", "message"),
    [
        (
            {"num_kv_heads": 1, "num_components": 1, "head_dim": 576},
            torch.bfloat16,
            r"latents of float8_e4m3fn.*--kv-cache-dtype auto.*--attention-backend torch",
        ),
        ({}, torch.float32, r"float32 over KV of float8_e4m3fn: use --dtype bfloat16"),
        ({}, None, r"queries of float8_e4m3fn"),
    ],
)
def test_what_the_kernels_lack_is_refused(
    sizes: dict[str, object], dtype: torch.dtype | None, message: str
) -> None:
    shape, _ = gpu_shape(**sizes)
    heads = {"num_q_heads": shape.num_q_heads, "head_dim": shape.head_dim}
    with pytest.raises(ValueError, match=message):
        create_backend("flashinfer", make_pool(shape), **heads, scale=0.1, dtype=dtype)

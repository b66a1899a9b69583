"""Attention's own kernels in Triton's interpreter equal plain attention in float64.

The backend over FlashInfer runs on the CPU here: its steps of single tokens need none of
FlashInfer, whose place something takes that does nothing.
"""

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.base import Kind, LayerAttention, Turn
from attention.support import UnsupportedPool
from kvcache import fp8
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from model.architectures.rotation import RopeConfig
from model.rope import Rope
from tests.attention import reference as plain
from tests.rigs.examples import examples
from tests.rigs.interpreted import interpreter

dcp, decode, storing, widening = (
    importlib.import_module(f"attention.kernels.{name}")
    for name in ("dcp", "decode", "store", "widen")
)
SCALES = (0.02, 0.5, 0.003, 1.0)


@pytest.fixture(scope="module", autouse=True)
def _no_gpu():
    empty, gpu = torch.empty, SimpleNamespace(multi_processor_count=1, major=9)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("", ".utils", ".mla", ".mla._core"):
            patch.setitem(sys.modules, f"flashinfer{name}", MagicMock())
        sys.modules["flashinfer.utils"].is_sm90a_supported = lambda device: False
        patch.setattr("attention.flashinfer_base.check", lambda *wanted: None)
        patch.setattr("attention.proofs._CONTEXTS", (5, 64))
        patch.setattr("attention.pieces.SPARE_PIECES", 3)  # of several tiles, then
        patch.setattr(
            torch, "empty", lambda *size, pin_memory=False, **of: empty(*size, **of)
        )
        patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        for name in ("Event", "current_stream"):
            patch.setattr(torch.cuda, name, MagicMock())
        yield


def eight_bits(**sizes):
    defaults = {
        "dtype": "float16",
        "kv_dtype": plain.FP8,
        "head_dim": 64,
        "block_size": 16,
    }
    return plain.Shape(**{**defaults, "num_blocks": 60, "scales": SCALES, **sizes})


@st.composite
def problems(draw):
    group, num_kv = draw(
        st.sampled_from([(1, 1), (3, 2), (7, 2), (4, 1), (1, 3), (20, 1)])
    )
    kinds = st.builds(
        Kind, st.sampled_from([None, 1, 60, 65]), st.sampled_from([0.0, 0.7])
    )
    sinks = st.sampled_from([None, torch.linspace(-2.0, 3.0, group * num_kv)])
    block_size, head_dim = draw(
        st.sampled_from([(16, 64), (48, 16), (64, 128), (128, 32)])
    )
    of_pool = draw(st.sampled_from([{}, {"kv_dtype": "", "scales": ()}]))
    shape = eight_bits(
        num_q_heads=group * num_kv, num_kv_heads=num_kv, block_size=block_size, head_dim=head_dim,
        **of_pool,
        layers=tuple(LayerAttention(draw(kinds), draw(sinks)) for _ in range(2)),
        order=draw(st.sampled_from(["BHLCND", "LBCNHD", "LCBHND"])),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
    )  # fmt: skip
    at_edges = st.sampled_from([1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 193, 330])
    return shape, draw(st.lists(at_edges, min_size=1, max_size=3))


def last(lens):
    return [(seq, length - 1, length) for seq, length in enumerate(lens)]


def after_prompts(shape, seqs, lens):
    """The backend over a pool that has all but the last token of each sequence."""
    pool, prompts = (
        plain.make_pool(shape),
        [(seq, 0, n - 1) for seq, n in enumerate(lens) if n > 1],
    )
    if prompts:
        plain.run_step(plain.make(shape, pool=pool), shape, seqs, prompts)
    return plain.make(shape, "flashinfer", pool=pool)


@examples(12)
@given(problems())
def test_single_tokens_are_those_of_plain_attention(problem):
    shape, lens = problem
    seqs, torchs = plain.make_sequences(shape, lens), plain.make(shape)
    backend = after_prompts(shape, seqs, lens)
    tolerance = 4e-3 if shape.dtype == "float16" else 1.6e-2
    plain.check_step(
        backend, shape, seqs, last(lens), num_padding=2, tolerance=tolerance
    )
    plain.run_step(
        torchs, shape, seqs, [(seq, 0, length) for seq, length in enumerate(lens)]
    )
    pools = (each.pool.view(1)[1:].view(torch.uint8) for each in (backend, torchs))
    assert torch.equal(*pools)


@pytest.mark.parametrize("window", [None, 30])
def test_what_was_captured_serves_other_steps(window, monkeypatch):
    shape, lens = (
        eight_bits(layers=(LayerAttention(Kind(window)),) * 2),
        [130, 65, 400, 7],
    )
    seqs, launches = plain.make_sequences(shape, lens), []
    backend, run = after_prompts(shape, seqs, lens), interpreter.InterpretedFunction.run
    backend.reserve_captured(6, 30)
    static = [torch.zeros(6, heads, 64, dtype=torch.float16) for heads in (6, 2, 2)]
    backend.plan_captured(plain.make_batch(shape, seqs, last(lens)[:1]), 6)
    with monkeypatch.context() as patch:
        patch.setattr(
            interpreter.InterpretedFunction, "run",
            lambda *args, **options: launches.append((args, options)),
        )  # fmt: skip
        out = backend.forward(0, *static)
    for spans in (last(lens), last(lens)[2:], last(lens)[::-1]):
        for given_rows, target in zip(
            plain.rows_of(shape, seqs, 0, spans), static, strict=True
        ):
            target[: len(spans)] = given_rows
        backend.plan_captured(plain.make_batch(shape, seqs, spans), 6)
        for (
            args,
            options,
        ) in launches:  # as a graph does: with the tensors of the capture
            run(*args, **options)
        for span, found in zip(spans, out, strict=False):
            expected = plain.reference(shape, seqs, *span)[0][0, 0]
            torch.testing.assert_close(found.double(), expected, atol=4e-3, rtol=4e-3)


@examples(12)
@given(
    st.sampled_from([(9, 3, 64), (1, 1, 32), (20, 10, 128)]),
    st.sampled_from(["BHLCND", "LCBNHD"]), *[st.booleans()] * 4, st.sampled_from([4, 33]),
)  # fmt: skip
def test_what_is_stored_normed_and_rotated(
    heads, order, eight, rotates, normed, back, count
):
    sizes, dim = [heads[0], heads[1], heads[1]], heads[2]
    layout = KVLayout(
        order, 6, heads[1], 2, 2, 16, dim, plain.FP8 if eight else "bfloat16"
    )
    pool, expected = (KVPool(layout, "cpu", SCALES * eight) for _ in range(2))
    rows, angle = (
        torch.randn(count, sum(sizes), dim).bfloat16(),
        torch.rand(count, dim // 2),
    )
    rows = rows.sign() if normed else rows  # of which the norm is exact
    norms = (torch.rand(dim), torch.rand(dim)) if normed else None
    (q, k, v), now = rows.clone().split(sizes, 1), rows.split(sizes, 1)
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    scales = (pool.scale(1, 0), pool.scale(1, 1))
    slots = (95 + 37 * torch.arange(count)) % 96
    caches = pool.component(1, 0), pool.component(1, 1)
    options = {
        "q": q,
        "turn": Turn(cos_sin, norms, 1e-20) if rotates else None,
        "read_back": back,
    }
    storing.store(k, v, slots.int(), caches, scales, **options)
    weights = torch.stack(norms * 2)[:3] if norms else torch.ones(3, dim)
    each = weights.repeat_interleave(torch.tensor(sizes), 0)
    low, high = (rows * each).bfloat16().float().chunk(2, dim=-1)
    cos, sin = (part[:, None] for part in cos_sin.chunk(2, dim=-1))
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], -1).bfloat16()
    for i, (found, old, new) in enumerate(
        zip((q, k, v), now, turned.split(sizes, 1), strict=True)
    ):
        right = new if rotates and i < 2 else old
        if i:
            stored = fp8.stored_as(right, pool.tensor.dtype, scales[i - 1])
            expected.component(1, i - 1)[slots // 16, :, slots % 16] = stored
            right = (stored.float() * scales[i - 1]).bfloat16() if back else old
        assert torch.equal(found, right)
    assert torch.equal(*(each.tensor.view(torch.uint8) for each in (pool, expected)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_turned_in_place(interleaved, monkeypatch):
    """A part of each head of queries, and of a row of latents."""
    config = RopeConfig(dim=64, theta=500.0, interleaved=interleaved)
    q, latent, positions = (
        torch.randn(5, 9, 192),
        torch.randn(5, 576),
        torch.arange(0, 500, 100),
    )
    plain_rope = Rope(config, dtype=torch.float32, device="cpu")
    parts = q[..., 128:], latent[:, None, 512:]
    right = plain_rope.rotate_pair(*parts, plain_rope.angles(positions))
    monkeypatch.setattr("model.fused_ops.works", lambda device, dtype: True)
    rope = Rope(config, dtype=torch.bfloat16, device="cpu")
    small_q, small_latent = q.bfloat16(), latent.bfloat16()
    parts = small_q[..., 128:], small_latent[:, None, 512:]
    rotated = rope.rotate_pair(*parts, rope.angles(positions))
    for found, part, expected in zip(rotated, parts, right, strict=True):
        assert found.data_ptr() == part.data_ptr()
        torch.testing.assert_close(found.float(), expected, atol=4e-2, rtol=1e-2)
    assert torch.equal(small_q[..., :128], q[..., :128].bfloat16())
    assert torch.equal(small_latent[:, :512], latent[:, :512].bfloat16())


@pytest.mark.parametrize("order", ["BHLCND", "LBCNHD", "BNHLCD"])
@pytest.mark.parametrize("block_size", [1, 16, 40])
def test_listed_blocks_are_widened_and_no_others(block_size, order):
    pool = KVPool(
        KVLayout(order, 6, 3, 2, 1, block_size, 64, plain.FP8), "cpu", (0.5, 0.3)
    )
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    stored, listed = pool.component(1, 0), torch.tensor([3, 1, 3, 5])
    for packed, places in ((False, (3, 1, 3)), (True, (0, 1, 2))):
        wide = torch.full((6, block_size, 3, 64), 7.0).bfloat16().transpose(1, 2)
        expected = wide.clone()
        for place, block in zip(places, listed.tolist(), strict=False):
            expected[place] = (stored[block].float() * 0.3).bfloat16()
        widening.widen(
            stored, wide, listed.int(), torch.tensor([3]).int(), 0.3, packed=packed
        )
        assert torch.equal(wide, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "own_heads", "dim"), [(2, 3, 64), (4, 1, 96)])
def test_what_ranks_found_apart_is_put_together(size, own_heads, dim, dtype):
    rows, heads = 5, size * own_heads
    found, lses = (
        torch.randn(size, rows, heads, dim).to(dtype),
        3 * torch.randn(size, rows, heads),
    )
    absent = torch.rand(size, rows) < 0.5
    absent[torch.arange(rows) % size, torch.arange(rows)] = (
        False  # some rank has tokens
    )
    found[absent] = float("nan")
    packed = [dcp.pack(*parts, size) for parts in zip(found, lses, absent, strict=True)]
    weights = lses.masked_fill(absent[..., None], float("-inf")).softmax(0)
    expected = (found.nan_to_num().float() * weights[..., None]).sum(0)
    for rank, theirs in enumerate(expected.split(own_heads, dim=1)):
        merged = dcp.merge(torch.stack([part[rank] for part in packed]))
        torch.testing.assert_close(merged.float(), theirs, atol=5e-3, rtol=8e-3)


def test_a_kernel_that_does_not_prove_itself_is_refused(monkeypatch):
    monkeypatch.setattr("attention.proofs._CONTEXTS", (5, 64, 4500))
    latents = plain.Shape(
        dtype="bfloat16", num_q_heads=4, num_kv_heads=1, head_dim=576, rope_dim=64
    )
    small_latents = replace(latents, kv_dtype=plain.FP8)
    for shape in (eight_bits(num_q_heads=4, num_kv_heads=1), latents, small_latents):
        pool = plain.make_pool(shape)
        before = pool.tensor.clone().view(torch.uint8)
        plain.make(shape, "flashinfer", pool=pool)
        assert torch.equal(pool.tensor.view(torch.uint8), before)
    attend = decode.attend

    def deviating(*args, **named):
        attend(*args, **named)
        args[4].mul_(1.02)

    shape = eight_bits()
    for wrong, told in ((deviating, "deviates by 0.0"), (None, "raises TypeError")):
        monkeypatch.setattr(decode, "attend", wrong)
        with pytest.raises(
            UnsupportedPool, match=f"decodes {told}.*--attention-backend torch"
        ):
            plain.make(shape, "flashinfer")
    with monkeypatch.context() as patch:
        patch.setattr("attention.proofs.widen", lambda *args, **named: None)
        with pytest.raises(
            UnsupportedPool, match=r"reads KV .*--attention-backend torch"
        ):
            plain.make(small_latents, "flashinfer")
    monkeypatch.setattr("attention.proofs.store", lambda *args, **named: None)
    for shape in (eight_bits(), plain.Shape(dtype="float16"), latents):
        with pytest.raises(
            UnsupportedPool, match=r"deviates .* --attention-backend torch"
        ):
            plain.make(shape, "flashinfer")

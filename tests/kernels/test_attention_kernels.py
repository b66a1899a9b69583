"""Baton's attention kernels, run by Triton's interpreter, equal plain attention in
float64.
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

from attention.base import AttentionKind, LayerAttention, RopeNormArgs
from attention.support import StepLimits, UnsupportedPool
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
# Kernels also compute with uninitialized rows, which may cause warnings. They ignore
# the results.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SCALES = (0.02, 0.5, 0.003, 1.0)


@pytest.fixture(scope="module", autouse=True)
def _no_gpu():
    empty = torch.empty
    gpu = SimpleNamespace(multi_processor_count=1, major=9)

    def empty_unpinned(*size, pin_memory=False, **options):
        return empty(*size, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("", ".utils", ".mla", ".mla._core"):
            patch.setitem(sys.modules, f"flashinfer{name}", MagicMock())
        sys.modules["flashinfer.utils"].is_sm90a_supported = lambda device: False
        patch.setattr("attention.flashinfer_base.check_supported", lambda *args: None)
        patch.setattr("attention.self_test._CONTEXTS", (5, 64))
        # With few pieces, each piece of a context has several tiles.
        patch.setattr("attention.pieces.SPARE_PIECES", 3)
        patch.setattr(torch, "empty", empty_unpinned)
        patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        for name in ("Event", "current_stream"):
            patch.setattr(torch.cuda, name, MagicMock())
        yield
    # Later tests of this process must not see modules that imported the mock.
    for name in ("flashinfer_backend", "flashinfer_mla"):
        sys.modules.pop(f"attention.{name}", None)


def fp8_shape(**sizes):
    defaults = {
        "dtype": "float16",
        "kv_dtype": plain.FP8,
        "head_dim": 64,
        "block_size": 16,
        "num_blocks": 60,
        "scales": SCALES,
    }
    return plain.Shape(**{**defaults, **sizes})


@st.composite
def problems(draw):
    heads = st.sampled_from([(1, 1), (3, 2), (7, 2), (4, 1), (1, 3), (20, 1)])
    group, num_kv = draw(heads)
    windows = st.sampled_from([None, 1, 60, 65])
    soft_caps = st.sampled_from([0.0, 0.7])
    kinds = st.builds(AttentionKind, windows, soft_caps)
    sinks = st.sampled_from([None, torch.linspace(-2.0, 3.0, group * num_kv)])
    sizes = st.sampled_from([(16, 64), (48, 16), (64, 128), (128, 32)])
    block_size, head_dim = draw(sizes)
    pool_options = draw(st.sampled_from([{}, {"kv_dtype": "", "scales": ()}]))
    shape = fp8_shape(
        num_q_heads=group * num_kv,
        num_kv_heads=num_kv,
        block_size=block_size,
        head_dim=head_dim,
        **pool_options,
        layers=tuple(LayerAttention(draw(kinds), draw(sinks)) for _ in range(2)),
        order=draw(st.sampled_from(["BHLCND", "LBCNHD", "LCBHND"])),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
    )
    edge_lens = st.sampled_from([1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 193, 330])
    return shape, draw(st.lists(edge_lens, min_size=1, max_size=3))


def last_tokens(lens):
    """Returns the span (sequence, start, stop) of the last token of each sequence."""
    return [(seq, length - 1, length) for seq, length in enumerate(lens)]


def make_backend(shape, pool, *, has_proposals=True):
    limits = StepLimits(has_proposals=has_proposals)
    return plain.make(shape, "flashinfer", pool=pool, limits=limits)


def backend_after_prompts(shape, seqs, lens):
    """Returns a backend. Its pool has the KV of all tokens except the last token of
    each sequence.
    """
    pool = plain.make_pool(shape)
    prompts = [(seq, 0, length - 1) for seq, length in enumerate(lens) if length > 1]
    if prompts:
        plain.run_step(plain.make(shape, pool=pool), shape, seqs, prompts)
    return make_backend(shape, pool)


def assert_same_bytes(pool, other):
    """Asserts that layer 1 of two pools is equal, except in the null block."""
    blocks, other_blocks = (
        each.view(1)[1:].view(torch.uint8) for each in (pool, other)
    )
    assert torch.equal(blocks, other_blocks)


@examples(12)
@given(problems())
def test_single_tokens_equal_plain_attention(problem):
    shape, lens = problem
    seqs = plain.make_sequences(shape, lens)
    torch_backend = plain.make(shape)
    backend = backend_after_prompts(shape, seqs, lens)
    plain.check_step(
        backend,
        shape,
        seqs,
        last_tokens(lens),
        num_padding=2,
        tolerance=4e-3 if shape.dtype == "float16" else 1.6e-2,
    )
    all_tokens = [(seq, 0, length) for seq, length in enumerate(lens)]
    plain.run_step(torch_backend, shape, seqs, all_tokens)
    assert_same_bytes(backend.pool, torch_backend.pool)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_kv_before_the_window_is_not_used(is_fp8):
    """A pull copies no KV before the window. So the window's first block may still have
    non-finite KV of an earlier request.
    """
    window = 30
    kv = {} if is_fp8 else {"kv_dtype": "", "scales": ()}
    shape = fp8_shape(layers=(LayerAttention(AttentionKind(window)),) * 2, **kv)
    lens = [130, 65, 400, 7]
    seqs = plain.make_sequences(shape, lens)
    backend = backend_after_prompts(shape, seqs, lens)
    for seq, length in enumerate(lens):
        if length > window:
            before = plain.make_batch(shape, seqs, [(seq, 0, length - window)])
            for slot in before.slot_mapping.tolist():
                block, offset = divmod(slot, shape.block_size)
                backend.pool.canonical[block, :, :, :, offset] = float("nan")
    plain.check_step(backend, shape, seqs, last_tokens(lens), tolerance=4e-3)


@examples(12)
@given(problems(), st.lists(st.integers(0, 9), min_size=3, max_size=3), st.booleans())
def test_rows_that_verify_proposals_equal_plain_attention(
    problem, num_proposals, has_proposals
):
    """A step that verifies proposals has a row for each of them. All rows of a sequence
    have the same blocks, and each row sees one token more than the row before it. With
    has_proposals, these rows share a program.
    """
    shape, lens = problem
    lens = [length + count for length, count in zip(lens, num_proposals, strict=False)]
    seqs = plain.make_sequences(shape, lens)
    pool = plain.make_pool(shape)
    prompts = []
    rows = []
    for seq, length in enumerate(lens):
        first = length - 1 - num_proposals[seq]
        if first:
            prompts.append((seq, 0, first))
        rows += [(seq, token, token + 1) for token in range(first, length)]
    if prompts:
        plain.run_step(plain.make(shape, pool=pool), shape, seqs, prompts)
    plain.check_step(
        make_backend(shape, pool, has_proposals=has_proposals),
        shape,
        seqs,
        rows,
        num_padding=2,
        tolerance=4e-3 if shape.dtype == "float16" else 1.6e-2,
    )


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("num_tokens", [39, 64])
def test_proposal_with_non_finite_values_changes_no_row_before_it(num_tokens, is_fp8):
    """With 64 tokens, the proposal is the first token of a piece of the context."""
    shape = fp8_shape(**({} if is_fp8 else {"kv_dtype": "", "scales": ()}))
    seqs = plain.make_sequences(shape, [num_tokens + 2])
    pool = plain.make_pool(shape)
    prompt = [(0, 0, num_tokens - 1)]
    plain.run_step(plain.make(shape, pool=pool), shape, seqs, prompt)
    backend = make_backend(shape, pool)
    tokens = range(num_tokens - 1, num_tokens + 2)
    rows = [(0, token, token + 1) for token in tokens]
    backend.plan(plain.make_batch(shape, seqs, rows))
    q, k, v = plain.rows_of(shape, seqs, 0, rows)
    v[1] = float("nan")
    actual = plain.forward(backend, shape, 0, (q, k, v))
    expected = plain.reference(shape, seqs, *rows[0])[0][0, 0]
    torch.testing.assert_close(actual[0].double(), expected, atol=4e-3, rtol=4e-3)
    assert not actual[1:].isfinite().any(), "a row does not see the proposal"


@pytest.mark.parametrize("window", [None, 30])
def test_captured_step_can_be_replayed_for_other_batches(window, monkeypatch):
    """Instead of a CUDA graph, the test records the kernel launches and repeats them
    with the captured tensors.
    """
    shape = fp8_shape(layers=(LayerAttention(AttentionKind(window)),) * 2)
    lens = [130, 65, 400, 7]
    seqs = plain.make_sequences(shape, lens)
    backend = backend_after_prompts(shape, seqs, lens)
    run = interpreter.InterpretedFunction.run
    backend.reserve_graph_buffers(6, 30)
    static = [torch.zeros(6, heads, 64, dtype=torch.float16) for heads in (6, 2, 2)]
    first_batch = plain.make_batch(shape, seqs, last_tokens(lens)[:1])

    def capture(captures_runs):
        launches = []
        backend.plan_for_graph(first_batch, 6, captures_runs=captures_runs)
        with monkeypatch.context() as patch:
            patch.setattr(
                interpreter.InterpretedFunction,
                "run",
                lambda *args, **options: launches.append((args, options)),
            )
            return launches, backend.forward(0, *static)

    captured = [capture(captures_runs) for captures_runs in (False, True)]
    assert len(captured[0][0]) < len(captured[1][0])
    all_spans = last_tokens(lens)
    proposals = [(0, token, token + 1) for token in (127, 128, 129)]
    for spans in (all_spans, all_spans[2:], proposals, all_spans[::-1]):
        inputs = plain.rows_of(shape, seqs, 0, spans)
        for rows, target in zip(inputs, static, strict=True):
            target[: len(spans)] = rows
        batch = plain.make_batch(shape, seqs, spans)
        has_runs = backend.plan_for_graph(batch, 6)
        assert has_runs == (spans is proposals)
        launches, out = captured[has_runs]
        for args, options in launches:
            run(*args, **options)
        for span, actual in zip(spans, out, strict=False):
            expected = plain.reference(shape, seqs, *span)[0][0, 0]
            torch.testing.assert_close(actual.double(), expected, atol=4e-3, rtol=4e-3)


def rotate_halves(x, cos_sin):
    """Returns `x` [T, H, D], rotated in float32 by cos_sin [T, D] and rounded to
    bfloat16.
    """
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = (part[:, None] for part in cos_sin.chunk(2, dim=-1))
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).bfloat16()


@examples(12)
@given(
    heads=st.sampled_from([(9, 3, 64), (1, 1, 32), (20, 10, 128)]),
    order=st.sampled_from(["BHLCND", "LCBNHD"]),
    is_fp8=st.booleans(),
    rotates=st.booleans(),
    has_norms=st.booleans(),
    read_back=st.booleans(),
    count=st.sampled_from([4, 33]),
)
def test_keys_and_values_are_normed_rotated_and_stored(
    heads, order, is_fp8, rotates, has_norms, read_back, count
):
    num_q, num_kv, dim = heads
    sizes = [num_q, num_kv, num_kv]
    dtype = plain.FP8 if is_fp8 else "bfloat16"
    layout = KVLayout(order, 6, num_kv, 2, 2, 16, dim, dtype)
    pool_scales = SCALES if is_fp8 else ()
    pool = KVPool(layout, "cpu", pool_scales)
    expected_pool = KVPool(layout, "cpu", pool_scales)
    scales = (pool.scale(1, 0), pool.scale(1, 1))
    slots = (95 + 37 * torch.arange(count)) % 96
    rows = torch.randn(count, sum(sizes), dim).bfloat16()
    angles = torch.rand(count, dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    norms = None
    weights = torch.ones(sum(sizes), dim)
    if has_norms:
        rows = rows.sign()  # the norm of rows of -1 and 1 is exact
        norms = (torch.rand(dim), torch.rand(dim))
        by_component = torch.stack([norms[0], norms[1], norms[0]])
        weights = by_component.repeat_interleave(torch.tensor(sizes), 0)

    q, k, v = rows.clone().split(sizes, 1)
    storing.store(
        k,
        v,
        slots.int(),
        (pool.component(1, 0), pool.component(1, 1)),
        scales,
        q=q,
        rope_norm=RopeNormArgs(cos_sin, norms, 1e-20) if rotates else None,
        read_back=read_back,
    )

    rotated = rotate_halves((rows * weights).bfloat16(), cos_sin).split(sizes, 1)
    original_q, original_k, original_v = rows.split(sizes, 1)
    assert torch.equal(q, rotated[0] if rotates else original_q)
    stored_values = [rotated[1] if rotates else original_k, original_v]
    pairs = [(k, original_k), (v, original_v)]
    for component, (actual, original) in enumerate(pairs):
        scale = scales[component]
        stored = fp8.to_stored(stored_values[component], pool.tensor.dtype, scale)
        target = expected_pool.component(1, component)
        target[slots // 16, :, slots % 16] = stored
        expected = (stored.float() * scale).bfloat16() if read_back else original
        assert torch.equal(actual, expected)
    assert torch.equal(
        pool.tensor.view(torch.uint8), expected_pool.tensor.view(torch.uint8)
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_of_heads_and_latents_are_rotated_in_place(interleaved, monkeypatch):
    config = RopeConfig(dim=64, theta=500.0, interleaved=interleaved)
    q = torch.randn(5, 9, 192)
    latent = torch.randn(5, 576)
    positions = torch.arange(0, 500, 100)
    plain_rope = Rope(config, dtype=torch.float32, device="cpu")
    expected_parts = plain_rope.rotate_pair(
        q[..., 128:], latent[:, None, 512:], plain_rope.angles(positions)
    )
    monkeypatch.setattr("model.fused_ops.is_supported", lambda device, dtype: True)
    rope = Rope(config, dtype=torch.bfloat16, device="cpu")
    small_q = q.bfloat16()
    small_latent = latent.bfloat16()
    q_part = small_q[..., 128:]
    latent_part = small_latent[:, None, 512:]
    rotated = rope.rotate_pair(q_part, latent_part, rope.angles(positions))
    parts = (q_part, latent_part)
    for actual, part, expected in zip(rotated, parts, expected_parts, strict=True):
        assert actual.data_ptr() == part.data_ptr()
        torch.testing.assert_close(actual.float(), expected, atol=4e-2, rtol=1e-2)
    assert torch.equal(small_q[..., :128], q[..., :128].bfloat16())
    assert torch.equal(small_latent[:, :512], latent[:, :512].bfloat16())


@pytest.mark.parametrize("order", ["BHLCND", "LBCNHD", "BNHLCD"])
@pytest.mark.parametrize("block_size", [1, 16, 40])
def test_only_listed_blocks_are_widened(block_size, order):
    layout = KVLayout(order, 6, 3, 2, 1, block_size, 64, plain.FP8)
    pool = KVPool(layout, "cpu", (0.5, 0.3))
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    stored = pool.component(1, 0)
    blocks = torch.tensor([3, 1, 3, 5])
    count = torch.tensor([3]).int()
    for packed, targets in ((False, (3, 1, 3)), (True, (0, 1, 2))):
        wide = torch.full((6, block_size, 3, 64), 7.0).bfloat16().transpose(1, 2)
        expected = wide.clone()
        for target, block in zip(targets, blocks.tolist(), strict=False):
            expected[target] = (stored[block].float() * 0.3).bfloat16()
        widening.widen(stored, wide, blocks.int(), count, 0.3, packed=packed)
        assert torch.equal(wide, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "rank_heads", "dim"), [(2, 3, 64), (4, 1, 96)])
def test_partial_results_of_ranks_are_merged(size, rank_heads, dim, dtype):
    rows = 5
    heads = size * rank_heads
    outs = torch.randn(size, rows, heads, dim).to(dtype)
    lses = 3 * torch.randn(size, rows, heads)
    absent = torch.rand(size, rows) < 0.5
    # For each row, at least one rank has tokens.
    absent[torch.arange(rows) % size, torch.arange(rows)] = False
    outs[absent] = float("nan")
    packed = [
        dcp.pack(out, lse, is_absent, size)
        for out, lse, is_absent in zip(outs, lses, absent, strict=True)
    ]
    weights = lses.masked_fill(absent[..., None], float("-inf")).softmax(0)
    expected = (outs.nan_to_num().float() * weights[..., None]).sum(0)
    for rank, expected_heads in enumerate(expected.split(rank_heads, dim=1)):
        merged = dcp.merge(torch.stack([part[rank] for part in packed]))
        torch.testing.assert_close(merged.float(), expected_heads, atol=5e-3, rtol=8e-3)


def test_kernel_that_fails_its_self_test_is_not_used(monkeypatch):
    monkeypatch.setattr("attention.self_test._CONTEXTS", (5, 64, 4500))
    latents = plain.Shape(
        dtype="bfloat16", num_q_heads=4, num_kv_heads=1, head_dim=576, rope_dim=64
    )
    fp8_latents = replace(latents, kv_dtype=plain.FP8)
    few_heads = fp8_shape(num_q_heads=4, num_kv_heads=1)
    for shape in (few_heads, latents, fp8_latents):
        pool = plain.make_pool(shape)
        before = pool.tensor.clone().view(torch.uint8)
        make_backend(shape, pool)
        assert torch.equal(pool.tensor.view(torch.uint8), before)
    attend = decode.attend

    def deviating_attend(*args, **options):
        attend(*args, **options)
        out = args[4]
        out.mul_(1.02)

    shape = fp8_shape()
    cases = (
        (deviating_attend, "has a relative error of 0.0"),
        (None, "raises TypeError"),
    )
    for broken, problem in cases:
        monkeypatch.setattr(decode, "attend", broken)
        message = f"decodes {problem}.*--attention-backend torch"
        with pytest.raises(UnsupportedPool, match=message):
            plain.make(shape, "flashinfer")
    with monkeypatch.context() as patch:
        patch.setattr("attention.self_test.widen", lambda *args, **options: None)
        message = r"reads KV .*--attention-backend torch"
        with pytest.raises(UnsupportedPool, match=message):
            plain.make(fp8_latents, "flashinfer")
    monkeypatch.setattr("attention.self_test.store", lambda *args, **options: None)
    for shape in (fp8_shape(), plain.Shape(dtype="float16"), latents):
        message = r"computes .* wrong elements; use --attention-backend torch"
        with pytest.raises(UnsupportedPool, match=message):
            plain.make(shape, "flashinfer")

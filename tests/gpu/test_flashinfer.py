"""FlashInfer equals plain attention in float64, for all layouts and kinds of steps.

One GPU is needed. Unwritten rows of the pool are NaN, so that a kernel that reads
beyond the tokens of a sequence returns NaN.
"""

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from attention.base import AttentionBackend, AttentionBatch
from attention.support import StepLimits
from kvcache import fp8
from kvcache.layout import NAMED_ORDERS
from tests.attention import reference as plain
from tests.attention.reference import (
    FP8,
    Shape,
    check_steps,
    make_batch,
    make_pool,
    make_sequences,
    reference,
    run_step,
)

pytestmark = pytest.mark.gpu
TOLERANCE = 2e-2  # bfloat16
# Scales of K and V of layer 0, then of layer 1. The third scale is so small that the
# largest keys are clamped.
SCALES = (0.02, 0.5, 0.003, 1.0)
make = partial(plain.make, name="flashinfer")
check_step = partial(plain.check_step, tolerance=TOLERANCE)


def gpu_shape(**sizes: object) -> Shape:
    defaults = {
        "dtype": "bfloat16",
        "head_dim": 128,
        "block_size": 16,
        "device": "cuda",
    }
    return Shape(**{"num_q_heads": 8, "num_kv_heads": 2, **defaults, **sizes})


def latents(**sizes: object) -> Shape:
    defaults = {"num_kv_heads": 1, "head_dim": 576, "rope_dim": 64, "steepness": 3**0.5}
    return gpu_shape(**{**defaults, **sizes})


@pytest.fixture
def requires_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 needs a Hopper GPU")


def make_shapes() -> dict[str, Shape]:
    shapes = {}
    for order, size, dim in itertools.product(NAMED_ORDERS, (16, 64), (64, 128)):
        name = f"{order}, blocks of {size}, heads of {dim}"
        shapes[name] = gpu_shape(order=order, block_size=size, head_dim=dim)
    for q, kv in ((1, 1), (4, 4), (9, 3), (8, 1), (14, 2)):
        shapes[f"{q} heads over {kv}"] = gpu_shape(num_q_heads=q, num_kv_heads=kv)
    for order, dim in itertools.product(("BHLCND", "LBCNHD", "LCBHND"), (64, 128)):
        shapes[f"8 bits, {order}, heads of {dim}"] = gpu_shape(
            order=order, head_dim=dim, kv_dtype=FP8, scales=SCALES
        )
    for q, kv in ((1, 1), (14, 2), (40, 1), (128, 1)):
        shapes[f"8 bits, {q} heads over {kv}"] = gpu_shape(
            num_q_heads=q, num_kv_heads=kv, kv_dtype=FP8, scales=SCALES, block_size=48
        )
    for name, layers in plain.SPECIAL.items():
        shapes[f"8 bits, {name}"] = gpu_shape(
            num_q_heads=6, layers=layers, kv_dtype=FP8, scales=SCALES
        )
        shapes[name] = gpu_shape(num_q_heads=6, layers=layers)
    for order, heads in itertools.product(("BHLCND", "LCBHND", "LBCNHD"), (4, 16)):
        name = f"latents, {order}, {heads} heads"
        shapes[name] = latents(order=order, num_q_heads=heads)
    fp8_latents = (("BHLCND", 16, 4), ("LCBHND", 64, 16), ("LBCNHD", 48, 128))
    for order, size, heads in fp8_latents:
        name = f"latents of 8 bits, {order}, blocks of {size}, {heads} heads"
        shapes[name] = latents(
            order=order,
            num_q_heads=heads,
            block_size=size,
            kv_dtype=FP8,
            scales=(0.02, 0.5),
        )
    return shapes


SHAPES = make_shapes()

LENS = [70, 300, 17, 1, 40]
FIRST_CHUNKS = [(i, 0, n // 2) for i, n in enumerate(LENS) if n > 1]
SECOND_CHUNKS = [(i, n // 2, n - 1) for i, n in enumerate(LENS) if n > 1]
LAST_TOKENS = [(i, n - 1, n) for i, n in enumerate(LENS)]


@pytest.mark.parametrize("prefill", ["fa2", "fa3"])
@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_equal_the_reference(name, prefill, request):
    shape = SHAPES[name]
    options = {} if shape.rope_dim else {"prefill": prefill}
    if prefill == "fa3":
        if shape.rope_dim:
            pytest.skip("the kernel for latents has no option `prefill`")
        request.getfixturevalue("requires_hopper")
    seqs = make_sequences(shape, LENS)
    backend = make(shape, **options)
    last = LAST_TOKENS
    # Single tokens are before, between and after chunks of prompts.
    mixed = [last[0], last[1], (2, 8, 17), last[4], last[3]]
    check_steps(
        backend,
        shape,
        seqs,
        FIRST_CHUNKS,
        [last[3], *SECOND_CHUNKS],
        last,
        mixed,
        num_padding=3,
        tolerance=TOLERANCE,
        with_lse=not shape.rope_dim,
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 5e-6), ("bfloat16", TOLERANCE)]
)
@pytest.mark.parametrize("order", ["BHLCND", "LBCNHD"])
def test_torch_backend_on_a_gpu_equals_the_reference(order, dtype, tolerance):
    shape = Shape(order=order, dtype=dtype, head_dim=64, block_size=16, device="cuda")
    check_steps(
        plain.make(shape),
        shape,
        make_sequences(shape, LENS),
        FIRST_CHUNKS,
        SECOND_CHUNKS,
        LAST_TOKENS,
        num_padding=3,
        tolerance=tolerance,
    )


@pytest.mark.usefixtures("requires_hopper")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads"), [(8, 2), (4, 4), (8, 1), (2, 1)]
)
def test_long_fresh_prompts_read_the_kv_of_the_step(
    num_q_heads, num_kv_heads, head_dim, monkeypatch
):
    monkeypatch.setattr("attention.flashinfer_backend._MIN_FRESH_TOKENS_EACH", 550)
    shape = gpu_shape(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_blocks=300,
    )
    lens = [700, 513, 300, 1100, 40]
    seqs = make_sequences(shape, lens)
    backend = make(shape)
    check_step(backend, shape, seqs, [(2, 0, 150), (4, 0, 39)])
    assert fresh_prompts(backend) == []
    # The step has a decode, a chunk with context, a complete prompt, and the first
    # chunk of a second prompt. Rows of padding are NaN.
    mixed = [(4, 39, 40), (2, 150, 300), (0, 0, 700), (3, 0, 600)]
    check_step(backend, shape, seqs, mixed, num_padding=3)
    assert fresh_prompts(backend) == [700, 600]
    # In the next step, a decode and a chunk read the KV that the prompts have stored.
    check_step(backend, shape, seqs, [(0, 699, 700), (3, 600, 1100)])
    # Several fresh prompts (without context) read the KV of the step if all of them are
    # long. Otherwise only the last prompt may do so. A last prompt of 513 tokens is
    # long enough.
    check_step(backend, shape, seqs, [(0, 0, 700), (1, 0, 513)])
    assert fresh_prompts(backend) == [513]
    check_step(backend, shape, seqs, [(1, 0, 513)])
    assert fresh_prompts(backend) == [513]
    # The KV of a long prompt that is followed by a short prompt is read from the pool.
    check_step(backend, shape, seqs, [(0, 0, 700), (2, 0, 300)])
    assert fresh_prompts(backend) == []


def fresh_prompts(backend: AttentionBackend) -> list[int]:
    """Returns the number of tokens of each fresh prompt in the planned step."""
    kernels, *_ = backend._kernels.values()
    return [part.stop - part.start for part in kernels.parts if part.is_fresh]


@pytest.mark.usefixtures("requires_hopper")
def test_nan_in_a_fresh_prompt_does_not_affect_its_neighbours(monkeypatch):
    monkeypatch.setattr("attention.flashinfer_backend._MIN_FRESH_TOKENS_EACH", 512)
    shape = gpu_shape(num_blocks=300)
    seqs = make_sequences(shape, [600, 530, 700])
    for part in (seqs.k, seqs.v):
        part[1].fill_(float("nan"))
    backend = make(shape)
    rows = [(0, 0, 600), (1, 0, 530), (2, 0, 700)]
    first, middle, last = run_step(backend, shape, seqs, rows, num_padding=2)
    assert fresh_prompts(backend) == [600, 530, 700]
    assert middle.isnan().all()
    for seq, out in ((0, first), (2, last)):
        expected, _ = reference(shape, seqs, seq, 0, out.shape[1])
        torch.testing.assert_close(
            out.double(), expected, atol=TOLERANCE, rtol=TOLERANCE
        )


@pytest.mark.parametrize("max_context", [304, 288])
def test_fp8_blocks_are_copied_for_prompts_if_they_fit(max_context, requires_hopper):
    shape = gpu_shape(kv_dtype=FP8, scales=SCALES)
    seqs = make_sequences(shape, [300])
    backend = make(shape, limits=StepLimits(4, 512, max_context))
    check_steps(
        backend, shape, seqs, [(0, 0, 150)], [(0, 150, 300)], tolerance=TOLERANCE
    )
    (kernels,) = backend._kernels.values()
    is_copied = [part.copied is not None for part in kernels.parts]
    assert is_copied == [max_context > 300]


@pytest.mark.alone  # 64 GiB
@pytest.mark.parametrize("kv_dtype", ["", FP8])
def test_pool_of_more_than_2_to_the_32_elements_is_read_correctly(kv_dtype):
    """The pool has more than 2**32 elements, so 32-bit offsets of blocks would
    overflow.
    """
    shape = gpu_shape(
        num_kv_heads=8, num_blocks=140_000, block_size=64, kv_dtype=kv_dtype
    )
    pool = make_pool(shape)
    assert pool.tensor.numel() > 2**32
    seqs = make_sequences(shape, [130, 70])
    for index, table in enumerate(seqs.tables):
        table[:] = [139_999 - 5 * index - i for i in range(len(table))]
    backend = make(shape, pool=pool)
    check_step(backend, shape, seqs, [(0, 0, 129), (1, 0, 69)])
    check_step(backend, shape, seqs, [(0, 129, 130), (1, 69, 70)])


SPECIAL = {"num_q_heads": 6, "layers": plain.SPECIAL["soft caps, windows, sinks"]}
both_pools = pytest.mark.parametrize(
    "options",
    [{}, {"kv_dtype": FP8, "scales": SCALES}, SPECIAL],
    ids=["16", "8", "special"],
)


@both_pools
def test_captured_step_serves_later_batches_of_its_size(options):
    shape = gpu_shape(**options)
    lens = [90, 33, 300, 5, 64]
    seqs = make_sequences(shape, lens)
    backend = make(shape)
    # This stores all tokens except the last one of each sequence.
    for seq, length in enumerate(lens):
        if length > 1:
            check_step(backend, shape, seqs, [(seq, 0, length - 1)])
    captured = _CapturedStep(backend, shape, seqs, 4, (3, 4))
    for rows in (
        [(0, 89)],
        [(1, 32), (2, 299), (4, 63)],
        [(2, 299), (0, 89), (1, 32), (3, 4)],
    ):
        captured.check(rows)
        # A longer eager step between replays must not change what the graph reads.
        check_step(backend, shape, seqs, [(2, 0, 299)])


@pytest.mark.parametrize("num_seqs", [17, 18, 40])
@pytest.mark.parametrize("kv_dtype", ["", FP8])
def test_captured_step_cuts_long_contexts_among_short_ones(num_seqs, kv_dtype):
    shape = gpu_shape(
        num_q_heads=16, num_kv_heads=8, block_size=16, num_blocks=300, kv_dtype=kv_dtype
    )
    lens = [9 + seq % 40 for seq in range(num_seqs)]
    lens[0] = 900
    lens[num_seqs // 2] = 700
    lens[-1] = 1000
    seqs = make_sequences(shape, lens)
    backend = make(shape)
    rows = [(seq, length - 1) for seq, length in enumerate(lens)]
    run_step(backend, shape, seqs, [(seq, 0, last) for seq, last in rows])
    captured = _CapturedStep(backend, shape, seqs, num_seqs + 3, rows[1])
    captured.check(rows)
    captured.check(rows[: num_seqs // 2])
    captured.check(rows[::-1])


@both_pools
def test_captured_step_with_proposals(options):
    shape = gpu_shape(**options)
    lens = [90, 300]
    seqs = make_sequences(shape, lens)
    backend = make(shape, limits=StepLimits(16, 1024, has_proposals=True))
    run_step(backend, shape, seqs, [(0, 0, 90), (1, 0, 300)])
    captured = _CapturedStep(backend, shape, seqs, 8, (0, 89))
    captured.check([(0, 89), (1, 299)])
    captured.check([(0, 87), (0, 88), (0, 89), (1, 298), (1, 299)], has_runs=True)
    captured.check([(1, 250), (0, 89)])


def in_graph(
    call: Callable[[], torch.Tensor],
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Runs `call` once, then captures it in a CUDA graph. Returns the graph and its
    result.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


class _CapturedStep:
    """Two CUDA graphs of a step with `num_rows` single tokens: without and with the
    kernels for runs.

    The graphs are captured with one sequence: `first` is (sequence, position).
    """

    def __init__(
        self, backend, shape: Shape, seqs, num_rows: int, first: tuple[int, int]
    ) -> None:
        self.backend = backend
        self.shape = shape
        self.seqs = seqs
        self.num_rows = num_rows
        backend.reserve_graph_buffers(num_rows, 80)
        heads = (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)
        self.static = [
            torch.zeros(num_rows, n, 128, dtype=torch.bfloat16, device="cuda")
            for n in heads
        ]
        self.graphs = []
        for captures_runs in (False, True):
            backend.plan_for_graph(
                _decode_batch(shape, seqs, [first]),
                num_rows,
                captures_runs=captures_runs,
            )
            self.graphs.append(in_graph(lambda: backend.forward(0, *self.static)))

    def check(self, rows: list[tuple[int, int]], *, has_runs: bool = False) -> None:
        """Replays a graph with these rows, (sequence, position), and checks the output.

        Args:
            has_runs: Whether the backend must find runs.
        """
        parts = (self.seqs.q, self.seqs.k, self.seqs.v)
        for part, target in zip(parts, self.static, strict=True):
            for row, (seq, position) in enumerate(rows):
                target[row] = part[seq][0, position].cuda()
        batch = _decode_batch(self.shape, self.seqs, rows)
        assert self.backend.plan_for_graph(batch, self.num_rows) == has_runs
        graph, out = self.graphs[has_runs]
        graph.replay()
        for row, (seq, position) in enumerate(rows):
            outputs, _ = reference(self.shape, self.seqs, seq, position, position + 1)
            actual = out[row].double().cpu()
            torch.testing.assert_close(
                actual, outputs[0, 0], atol=TOLERANCE, rtol=TOLERANCE
            )


def _decode_batch(
    shape: Shape, seqs: object, rows: list[tuple[int, int]]
) -> AttentionBatch:
    return make_batch(
        shape, seqs, [(seq, position, position + 1) for seq, position in rows]
    )


@pytest.mark.parametrize("num_kv_heads", [8, 32])
def test_workspace_is_large_enough_for_captured_steps(num_kv_heads):
    backend = make(
        gpu_shape(num_q_heads=32, num_kv_heads=num_kv_heads),
        limits=StepLimits(1500, 2048),
    )
    one = np.ones(1, np.int32)
    batch = AttentionBatch(one, one, np.zeros((1, 1), np.int32), np.zeros(1, np.int64))
    backend.reserve_graph_buffers(1500, 4)
    backend.plan_for_graph(batch, 1500)
    q = torch.zeros(1500, 32, 128, dtype=torch.bfloat16, device="cuda")
    kv = torch.zeros(1500, num_kv_heads, 128, dtype=torch.bfloat16, device="cuda")
    assert not backend.forward(0, q, kv, kv).isnan().any()


@pytest.mark.parametrize("num_tokens", [100, 1000, 8000])
@pytest.mark.parametrize("num_cached", [0, 5000])
@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
def test_workspace_is_large_enough_for_prompts(num_kv_heads, num_cached, num_tokens):
    shape = gpu_shape(num_q_heads=32, num_kv_heads=num_kv_heads, block_size=64)
    backend = make(shape, prefill="fa2", limits=StepLimits(4, 8192))
    num_blocks = -(-(num_tokens + num_cached) // 64)
    (kernels,) = backend._kernels.values()
    floats, ints = kernels.prefill[0].workspace_size(
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([0, num_blocks], dtype=torch.int32),
        torch.zeros(num_blocks, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        32,
        num_kv_heads,
        128,
        64,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    assert floats <= backend.sizes.floats
    assert ints <= backend.sizes.ints


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (gpu_shape(dtype="float32"), r"float32.*--dtype bfloat16"),
        (gpu_shape(device="cpu"), r"GPU memory only"),
    ],
)
def test_unsupported_pools_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        make(shape)


@both_pools
def test_long_fresh_prompt_reads_the_same_numbers_as_later_steps(options):
    """Fresh prompts (without context) are computed by different kernels than other
    prompts.

    Both kernels must read the same numbers, and store the same numbers as the torch
    backend.
    """
    shape = gpu_shape(order="LBCNHD", num_blocks=300, **options)
    seqs = make_sequences(shape, [800, 40, 600])
    fresh = make(shape)
    paged = make(shape)
    paged._takes_fresh = False
    by_torch = plain.make(shape)
    spans = [(1, 0, 40), (0, 0, 800), (2, 0, 512)]
    backends = (fresh, paged, by_torch)
    outs = [run_step(backend, shape, seqs, spans) for backend in backends]
    for fresh_out, paged_out, expected in zip(*outs, strict=True):
        torch.testing.assert_close(fresh_out, expected, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(fresh_out, paged_out, atol=1e-2, rtol=1e-2)
    if torch.cuda.get_device_capability()[0] == 9:
        assert fresh_prompts(fresh) == [512]
    stored, expected_stored = (
        fp8.from_stored(backend.pool.tensor, torch.float32).nan_to_num(1e9)
        for backend in (fresh, by_torch)
    )
    assert torch.equal(stored, expected_stored)

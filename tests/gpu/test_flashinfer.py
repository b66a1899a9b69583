"""FlashInfer over any layout equals plain attention in float64, in every kind of step.

One GPU. Rows of the pool that no test wrote are NaN, so whatever a kernel reads beyond a sequence's
own tokens shows.
"""

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
SCALES = (
    0.02,
    0.5,
    0.003,
    1.0,
)  # K and V of two layers; the third cuts the largest keys off
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
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 needs a Hopper GPU")


SHAPES = {
    **{f"{order}, blocks of {size}, heads of {dim}":
       gpu_shape(order=order, block_size=size, head_dim=dim)
       for order in NAMED_ORDERS for size in (16, 64) for dim in (64, 128)},
    **{f"{q} heads over {kv}": gpu_shape(num_q_heads=q, num_kv_heads=kv)
       for q, kv in ((1, 1), (4, 4), (9, 3), (8, 1), (14, 2))},
    **{f"8 bits, {order}, heads of {dim}":
       gpu_shape(order=order, head_dim=dim, kv_dtype=FP8, scales=SCALES)
       for order in ("BHLCND", "LBCNHD", "LCBHND") for dim in (64, 128)},
    **{f"8 bits, {q} heads over {kv}":
       gpu_shape(num_q_heads=q, num_kv_heads=kv, kv_dtype=FP8, scales=SCALES, block_size=48)
       for q, kv in ((1, 1), (14, 2), (40, 1), (128, 1))},
    **{f"8 bits, {name}": gpu_shape(num_q_heads=6, layers=layers, kv_dtype=FP8, scales=SCALES)
       for name, layers in plain.SPECIAL.items()},
    **{name: gpu_shape(num_q_heads=6, layers=layers) for name, layers in plain.SPECIAL.items()},
    **{f"latents, {order}, {heads} heads": latents(order=order, num_q_heads=heads)
       for order in ("BHLCND", "LCBHND", "LBCNHD") for heads in (4, 16)},
    **{f"latents of 8 bits, {order}, blocks of {size}, {heads} heads":
       latents(order=order, num_q_heads=heads, block_size=size, kv_dtype=FP8, scales=(0.02, 0.5))
       for order, size, heads in (("BHLCND", 16, 4), ("LCBHND", 64, 16), ("LBCNHD", 48, 128))},
}  # fmt: skip

LENS = [70, 300, 17, 1, 40]
FIRSTS = [(i, 0, n // 2) for i, n in enumerate(LENS) if n > 1]
SECONDS = [(i, n // 2, n - 1) for i, n in enumerate(LENS) if n > 1]
LASTS = [(i, n - 1, n) for i, n in enumerate(LENS)]


@pytest.mark.parametrize("prefill", ["fa2", "fa3"])
@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_equal_the_reference(name, prefill, request):
    shape, options = SHAPES[name], {}
    if not shape.rope_dim:
        options = {"prefill": prefill}
    if prefill == "fa3":
        if shape.rope_dim:
            pytest.skip("these have no choice")
        request.getfixturevalue("hopper")
    seqs, backend = make_sequences(shape, LENS), make(shape, **options)
    # Decodes before, between and after chunks of prompts.
    mixed = [LASTS[0], LASTS[1], (2, 8, 17), LASTS[4], LASTS[3]]
    steps = (FIRSTS, [LASTS[3], *SECONDS], LASTS, mixed)
    how = {"tolerance": TOLERANCE, "with_lse": not shape.rope_dim}
    check_steps(backend, shape, seqs, *steps, num_padding=3, **how)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 5e-6), ("bfloat16", TOLERANCE)]
)
@pytest.mark.parametrize("order", ["BHLCND", "LBCNHD"])
def test_torch_attends_on_a_gpu_as_well(order, dtype, tolerance):
    shape = Shape(order=order, dtype=dtype, head_dim=64, block_size=16, device="cuda")
    steps, how = (FIRSTS, SECONDS, LASTS), {"num_padding": 3, "tolerance": tolerance}
    check_steps(plain.make(shape), shape, make_sequences(shape, LENS), *steps, **how)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads"), [(8, 2), (4, 4), (8, 1), (2, 1)]
)
def test_long_new_prompts_read_the_kv_of_the_step(
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
    assert new_prompts(backend) == []
    # A decode, a chunk with context, a whole prompt, the first chunk of another; padding is NaN.
    mixed = [(4, 39, 40), (2, 150, 300), (0, 0, 700), (3, 0, 600)]
    check_step(backend, shape, seqs, mixed, num_padding=3)
    assert new_prompts(backend) == [700, 600]
    # What they stored is read by what follows: a chunk, a decode after a whole prompt.
    check_step(backend, shape, seqs, [(0, 699, 700), (3, 600, 1100)])
    # Several are long each; of one alone, or the last, less is enough.
    check_step(backend, shape, seqs, [(0, 0, 700), (1, 0, 513)])
    assert new_prompts(backend) == [513]
    check_step(backend, shape, seqs, [(1, 0, 513)])
    assert new_prompts(backend) == [513]
    # One that others follow is read from the pool like these.
    check_step(backend, shape, seqs, [(0, 0, 700), (2, 0, 300)])
    assert new_prompts(backend) == []


def new_prompts(backend: AttentionBackend) -> list[int]:
    """Tokens of each prompt of the planned step that reads its own keys and values."""
    kernels, *_ = backend._kernels.values()
    return [part.stop - part.start for part in kernels.parts if part.is_fresh]


@pytest.mark.usefixtures("hopper")
def test_a_new_prompt_of_nan_leaves_its_neighbours_alone(monkeypatch):
    monkeypatch.setattr("attention.flashinfer_backend._MIN_FRESH_TOKENS_EACH", 512)
    shape = gpu_shape(num_blocks=300)
    seqs = make_sequences(shape, [600, 530, 700])
    for part in (seqs.k, seqs.v):
        part[1].fill_(float("nan"))
    backend = make(shape)
    rows = [(0, 0, 600), (1, 0, 530), (2, 0, 700)]
    first, middle, last = run_step(backend, shape, seqs, rows, num_padding=2)
    assert new_prompts(backend) == [600, 530, 700]
    assert middle.isnan().all()
    for seq, out in ((0, first), (2, last)):
        expected, _ = reference(shape, seqs, seq, 0, out.shape[1])
        torch.testing.assert_close(
            out.double(), expected, atol=TOLERANCE, rtol=TOLERANCE
        )


@pytest.mark.parametrize("most", [304, 288])
def test_blocks_of_8_bits_are_copied_for_prompts_where_they_fit(most, hopper):
    shape = gpu_shape(kv_dtype=FP8, scales=SCALES)
    seqs, backend = (
        make_sequences(shape, [300]),
        make(shape, limits=StepLimits(4, 512, most)),
    )
    check_steps(
        backend, shape, seqs, [(0, 0, 150)], [(0, 150, 300)], tolerance=TOLERANCE
    )
    (kernels,) = backend._kernels.values()
    assert [part.copied is not None for part in kernels.parts] == [most > 300]


@pytest.mark.alone  # 64 GiB
@pytest.mark.parametrize("kv_dtype", ["", FP8])
def test_blocks_beyond_32_bits_of_elements(kv_dtype):
    """A pool of 2**32 + elements: block strides must not overflow."""
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
    "of_pool",
    [{}, {"kv_dtype": FP8, "scales": SCALES}, SPECIAL],
    ids=["16", "8", "special"],
)


@both_pools
def test_a_captured_step_serves_later_batches_of_its_size(of_pool):
    shape = gpu_shape(**of_pool)
    lens = [90, 33, 300, 5, 64]
    seqs, backend = make_sequences(shape, lens), make(shape)
    for seq, length in enumerate(lens):  # everything but the last token of each
        if length > 1:
            check_step(backend, shape, seqs, [(seq, 0, length - 1)])
    replayed = _Captured(backend, shape, seqs, 4, (3, 4))
    for rows in (
        [(0, 89)],
        [(1, 32), (2, 299), (4, 63)],
        [(2, 299), (0, 89), (1, 32), (3, 4)],
    ):
        replayed.check(rows)
        # A longer eager step in between must leave all that the graph reads alone.
        check_step(backend, shape, seqs, [(2, 0, 299)])


@pytest.mark.parametrize("num_seqs", [17, 18, 40])
@pytest.mark.parametrize("kv_dtype", ["", FP8])
def test_long_contexts_among_short_ones_are_cut_in_a_captured_step(num_seqs, kv_dtype):
    heads = {"num_q_heads": 16, "num_kv_heads": 8}
    shape = gpu_shape(block_size=16, num_blocks=300, kv_dtype=kv_dtype, **heads)
    lens = [9 + seq % 40 for seq in range(num_seqs)]
    lens[0], lens[num_seqs // 2], lens[-1] = 900, 700, 1000
    seqs = make_sequences(shape, lens)
    backend = make(shape)
    rows = [(seq, length - 1) for seq, length in enumerate(lens)]
    run_step(backend, shape, seqs, [(seq, 0, last) for seq, last in rows])
    replayed = _Captured(backend, shape, seqs, num_seqs + 3, rows[1])
    replayed.check(rows)
    replayed.check(rows[: num_seqs // 2])
    replayed.check(rows[::-1])


def in_graph(
    call: Callable[[], torch.Tensor],
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of the call, which has run once before, and its result."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


class _Captured:
    """A step of `num_rows` single tokens in a graph, captured with one sequence in it."""

    def __init__(
        self, backend, shape: Shape, seqs, num_rows: int, first: tuple[int, int]
    ) -> None:
        self.backend, self.shape, self.seqs, self.num_rows = (
            backend,
            shape,
            seqs,
            num_rows,
        )
        backend.reserve_captured(num_rows, 80)
        heads = (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)
        self.static = [
            torch.zeros(num_rows, n, 128, dtype=torch.bfloat16, device="cuda")
            for n in heads
        ]
        backend.plan_captured(_decode_batch(shape, seqs, [first]), num_rows)
        self.graph, self.out = in_graph(lambda: backend.forward(0, *self.static))

    def check(self, rows: list[tuple[int, int]]) -> None:
        """Replays a step of (sequence, position); each row equals the reference."""
        parts = (self.seqs.q, self.seqs.k, self.seqs.v)
        for part, target in zip(parts, self.static, strict=True):
            for row, (seq, position) in enumerate(rows):
                target[row] = part[seq][0, position].cuda()
        batch = _decode_batch(self.shape, self.seqs, rows)
        self.backend.plan_captured(batch, self.num_rows)
        self.graph.replay()
        for row, (seq, position) in enumerate(rows):
            expected = reference(self.shape, self.seqs, seq, position, position + 1)[0][
                0, 0
            ]
            torch.testing.assert_close(
                self.out[row].double().cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE
            )


def _decode_batch(
    shape: Shape, seqs: object, rows: list[tuple[int, int]]
) -> AttentionBatch:
    return make_batch(
        shape, seqs, [(seq, position, position + 1) for seq, position in rows]
    )


@pytest.mark.parametrize("num_kv_heads", [8, 32])
def test_the_workspace_is_as_large_as_captured_steps_need(num_kv_heads):
    backend = make(
        gpu_shape(num_q_heads=32, num_kv_heads=num_kv_heads),
        limits=StepLimits(1500, 2048),
    )
    one = np.ones(1, np.int32)
    batch = AttentionBatch(one, one, np.zeros((1, 1), np.int32), np.zeros(1, np.int64))
    backend.reserve_captured(1500, 4)
    backend.plan_captured(batch, 1500)
    q = torch.zeros(1500, 32, 128, dtype=torch.bfloat16, device="cuda")
    kv = torch.zeros(1500, num_kv_heads, 128, dtype=torch.bfloat16, device="cuda")
    assert not backend.forward(0, q, kv, kv).isnan().any()


@pytest.mark.parametrize("num_tokens", [100, 1000, 8000])
@pytest.mark.parametrize("num_cached", [0, 5000])
@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
def test_the_workspace_is_what_prompts_need_or_more(
    num_kv_heads, num_cached, num_tokens
):
    shape = gpu_shape(num_q_heads=32, num_kv_heads=num_kv_heads, block_size=64)
    backend = make(shape, prefill="fa2", limits=StepLimits(4, 8192))
    num_blocks = -(-(num_tokens + num_cached) // 64)
    (kernels,) = backend._kernels.values()
    floats, ints = kernels.prefill[0].workspace_size(
        *(torch.tensor([0, n], dtype=torch.int32) for n in (num_tokens, num_blocks)),
        torch.zeros(num_blocks, dtype=torch.int32), torch.ones(1, dtype=torch.int32),
        32, num_kv_heads, 128, 64, causal=True, q_data_type=torch.bfloat16,
    )  # fmt: skip
    assert floats <= backend.sizes.floats and ints <= backend.sizes.ints


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (gpu_shape(dtype="float32"), r"float32.*--dtype bfloat16"),
        (gpu_shape(device="cpu"), r"GPU memory only"),
    ],
)
def test_what_the_kernels_lack_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        make(shape)


@both_pools
def test_a_long_new_prompt_reads_what_is_stored_of_it(of_pool):
    """By other kernels than one with context, and yet the same numbers, stored as torch does."""
    shape = gpu_shape(order="LBCNHD", num_blocks=300, **of_pool)
    seqs = make_sequences(shape, [800, 40, 600])
    ours, paged, torchs = make(shape), make(shape), plain.make(shape)
    paged._takes_fresh = False
    spans = [(1, 0, 40), (0, 0, 800), (2, 0, 512)]
    outs = [run_step(backend, shape, seqs, spans) for backend in (ours, paged, torchs)]
    for new, read, expected in zip(*outs, strict=True):
        torch.testing.assert_close(new, expected, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(new, read, atol=1e-2, rtol=1e-2)
    if torch.cuda.get_device_capability()[0] == 9:
        assert new_prompts(ours) == [512]
    pools = [
        fp8.from_stored(each.pool.tensor, torch.float32).nan_to_num(1e9)
        for each in (ours, torchs)
    ]
    assert torch.equal(*pools)

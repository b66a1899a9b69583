"""Pulls on GPUs: the kernel that places KV, and pulls from other processes.

Pulls use mapped memory or NIXL.
"""

import dataclasses
import importlib.util
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.pool import KVPool
from kvcache.transfer.move.cuda_placer import LONG_RUN_BYTES, CudaPlacer
from kvcache.transfer.move.peer_memory import Memory
from kvcache.transfer.move.place import Placer, split_into_launches
from kvcache.transfer.plan.block_copy import Transfer
from kvcache.transfer.pulls.messages import PullDone, PullDrained, PullFailed
from tests.rigs.cluster import wait_until
from tests.rigs.geometry import Case, Side, cases
from tests.rigs.memory_pair import Decode, Prefill, expected
from tests.rigs.memory_placer import place_units
from tests.rigs.process_pair import Child, nixl

NUM_GPUS = torch.cuda.device_count()
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        NUM_GPUS < 1 or not HAS_TRITON, reason="needs a CUDA GPU and Triton"
    ),
]
ENDINGS = (PullDone, PullFailed, PullDrained)
PAIRS = [
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("bfloat16", "float8_e4m3fn"),
    ("float8_e4m3fn", "bfloat16"),
    ("float16", "float32"),
    ("float32", "bfloat16"),
]
PROPERTY = settings(
    deadline=None, suppress_health_check=list(HealthCheck), max_examples=60
)


def random_pool(case: Case, side: Side, rank: int, seed: int) -> KVPool:
    pool = KVPool(case.layout(side, rank), "cuda:0")
    generator = torch.Generator("cuda:0").manual_seed(seed)
    values = torch.randn(pool.tensor.shape, device="cuda:0", generator=generator)
    pool.tensor.copy_(values.to(pool.tensor.dtype))
    return pool


def emulated(transfer: Transfer, sources: list[KVPool], target: KVPool) -> torch.Tensor:
    """Returns the expected content of `target` after all copies.

    The copies run on the CPU, with the kernel's arithmetic and torch's conversions.
    """
    result = target.memory.cpu().clone()
    for copy in transfer.copies():
        source = sources[copy.owner].flat_bytes.cpu()
        place_units(copy, source, result, transfer.scale_factors)
    return result


def check(
    case: Case,
    d_rank: int,
    make: Callable[[KVPool], Placer],
    launch_bytes: int = 1 << 30,
) -> None:
    """Asserts that a placer's result equals that of `emulated`."""
    d_rank %= case.d.tp
    sources = [random_pool(case, case.p, rank, rank) for rank in range(case.p.tp)]
    target = random_pool(case, case.d, d_rank, 99)
    transfer = case.transfer(d_rank)
    expected_bytes = emulated(transfer, sources, target)
    placer = make(target)
    placer.bind_thread()
    memories = [Memory(pool.base_address, pool.flat_bytes) for pool in sources]
    torch.cuda.synchronize()  # the placer uses a separate stream
    handles = [
        placer.launch(copy, memories[copy.owner], transfer.scale_factors)
        for copy in split_into_launches(transfer.copies(), launch_bytes)
    ]
    torch.cuda.synchronize()
    assert all(map(placer.finished, handles))
    assert torch.equal(target.flat_bytes.cpu(), expected_bytes)


def by_kernel(pool: KVPool) -> Placer:
    return CudaPlacer(pool, num_programs=5)


def by_engines(pool: KVPool) -> Placer:
    return CudaPlacer(pool, long_run_bytes=0)


def without_compiler(pool: KVPool) -> Placer:
    placer = CudaPlacer(pool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        patch.delitem(sys.modules, "kvcache.transfer.move.place_kernel", raising=False)
        placer.compile(convert=True)
    return placer


@PROPERTY
@given(
    cases(),
    st.integers(0, 7),
    st.sampled_from(PAIRS),
    st.integers(1, 100_000),
    st.sampled_from([1, 4, 8, 64]),
    st.booleans(),
)
def test_kernel_equals_its_arithmetic(
    case, d_rank, dtypes, launch_bytes, widen, is_scaled
):
    p = dataclasses.replace(case.p, dtype=dtypes[0])
    d = dataclasses.replace(case.d, dtype=dtypes[1])
    if is_scaled and p.dtype == "float8_e4m3fn":
        # With these scales, some products exceed the range of FP8.
        scales = tuple(0.5 + 100.0 * i for i in range(case.layers * case.components))
        p = dataclasses.replace(p, scales=scales)
    case = dataclasses.replace(case, p=p, d=d, head_dim=case.head_dim * widen)
    check(case, d_rank, by_kernel, launch_bytes)


@PROPERTY
@given(cases(), st.integers(0, 7), st.integers(1, 100_000), st.sampled_from([1, 4, 64]))
def test_copy_engines_equal_the_kernel(case, d_rank, launch_bytes, widen):
    d = dataclasses.replace(case.d, order=case.p.order)
    case = dataclasses.replace(case, d=d, head_dim=case.head_dim * widen)
    check(case, d_rank, by_engines, launch_bytes)


@settings(PROPERTY, max_examples=20)
@given(
    cases(),
    st.integers(0, 7),
    st.sampled_from(PAIRS),
    st.sampled_from([Placer, without_compiler]),
)
def test_torch_equals_the_kernel(case, d_rank, dtypes, make):
    p = dataclasses.replace(case.p, dtype=dtypes[0])
    d = dataclasses.replace(case.d, dtype=dtypes[1])
    check(dataclasses.replace(case, p=p, d=d), d_rank, make)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_kernel_places_latents_of_every_dtype(source, target):
    # Both prefill ranks have a copy of the only head.
    p = Side(2, "BHLCND", 64, (3, 1, 2), 4, source)
    d = Side(1, "LBCNHD", 16, tuple(range(11, -1, -1)), 12, target)
    case = Case(p, d, heads=1, layers=5, components=1, head_dim=576, start=17, stop=190)
    check(case, 0, by_kernel, 1 << 20)


# -- pulls from another process


def decode_on(
    device: str,
    to_close: list[Any],
    num_programs: int = 64,
    long_run_bytes: int = LONG_RUN_BYTES,
    is_busy: bool = False,
    **options: Any,
) -> Decode:
    # A GPU also writes to a pool in host memory, as in a host's KV store.
    make_placer = partial(
        CudaPlacer,
        device=torch.device("cuda:0" if device == "cpu" else device),
        num_programs=num_programs,
        long_run_bytes=long_run_bytes,
        is_busy=lambda: is_busy,
    )
    decode = Decode(
        lambda: nixl("D", device),
        make_placer=make_placer,
        device=device,
        maps_only=True,
        **options,
    )
    to_close.append(decode)
    return decode


def prefill_on(device: str, to_close: list[Any], **options: Any) -> Child:
    child = Child("prefill", device=device, **options)
    to_close.append(child)
    return child


DEVICES = [
    ("cuda:0", "cuda:0"),
    pytest.param(
        "cuda:0",
        "cuda:1",
        marks=[
            pytest.mark.multi_gpu,
            pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs"),
        ],
    ),
]


WITH_HOST = [*DEVICES, ("cpu", "cuda:0"), ("cuda:0", "cpu")]


def assert_pulls(
    decode: Decode,
    prefill: Any,
    start: int = 0,
    stop: int = 24,
    blocks: tuple[int, ...] = (3, 1, 7),
) -> None:
    """Pulls tokens [start, stop) into these blocks and compares all bytes."""
    remote = prefill.lease([5, 2, 9], stop)
    targets = list(blocks)
    decode.coordinator.pull(f"pull {start} to {stop}", remote, start, stop, targets)
    done = decode.wait(*ENDINGS)
    assert isinstance(done, PullDone), done
    assert done.path == "mapped", done
    tokens = decode.tokens(targets, start, stop)
    assert np.array_equal(tokens, expected(remote, start, stop))


@pytest.mark.parametrize(("source", "target"), WITH_HOST)
@pytest.mark.parametrize(
    ("p", "d"),
    [
        ({}, {}),
        ({"tp": 1}, {"tp": 2}),
        ({"tp": 4, "order": "LBCNHD"}, {"tp": 2}),
        ({"block_size": 8}, {"block_size": 24, "order": "LCBHND"}),
        ({"tp": 1}, {"tp": 2, "long_run_bytes": 0}),
        ({"block_size": 8}, {"block_size": 24, "long_run_bytes": 0}),
        ({"order": "LBCNHD"}, {"tp": 2, "is_busy": True}),
    ],
)
def test_pull_from_another_process(to_close, source, target, p, d):
    prefill = prefill_on(source, to_close, **p)
    decode = decode_on(target, to_close, **d)
    num_blocks = -(-22 // decode.layouts[0].block_size)
    assert_pulls(decode, prefill, 3, 22, (3, 1, 7)[:num_blocks])


@pytest.mark.parametrize(("source", "target"), WITH_HOST)
def test_pull_from_a_pool_of_the_same_process(to_close, source, target):
    """Memory of the same process must be read without an IPC handle."""
    prefill = Prefill(lambda: nixl("P", source), device=source)
    to_close.append(prefill)
    assert_pulls(decode_on(target, to_close), prefill)


@pytest.mark.parametrize(("source", "target"), WITH_HOST)
@pytest.mark.parametrize(
    ("p", "path"),
    [
        ({}, "direct"),
        ({"tp": 2}, "direct"),
        ({"order": "LBCNHD", "block_size": 16}, "staged"),
    ],
)
def test_pull_over_nixl(to_close, source, target, p, path):
    prefill = prefill_on(source, to_close, **p)
    decode = Decode(lambda: nixl("D", target), device=target, staging_bytes=1 << 20)
    to_close.append(decode)
    for number in range(3):
        remote = prefill.lease([5, 2, 9], 23)
        decode.coordinator.pull(f"pull-{number}", remote, 0, 23, [3, 1, 7])
        done = decode.wait(*ENDINGS)
        assert isinstance(done, PullDone), done
        assert done.path == path, done
        assert np.array_equal(decode.tokens([3, 1, 7], 0, 23), expected(remote, 0, 23))


# Pool of 24 MiB. A kernel with a single thread block takes noticeably long to copy it.
BIG_POOL = {"num_blocks": 4096, "block_size": 8}


@pytest.mark.alone
@pytest.mark.parametrize("long_run_bytes", [0, LONG_RUN_BYTES])
@pytest.mark.parametrize(("source", "target"), DEVICES)
def test_pulls_from_a_killed_peer_fail_and_its_memory_is_freed(
    to_close, source, target, long_run_bytes
):
    settings = {"side_channel_timeout_s": 0.5}
    decode = decode_on(
        target, to_close, 1, long_run_bytes, settings=settings, **BIG_POOL
    )
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info(source)[0]
    prefill = prefill_on(source, to_close, **BIG_POOL)
    blocks = list(range(1, 4001))
    leases = [prefill.lease(blocks, 32_000) for _ in range(20)]

    def start_pulls(first: int, stop: int) -> None:
        for index in range(first, stop):
            decode.coordinator.pull(f"pull-{index}", leases[index], 0, 32_000, blocks)

    start_pulls(0, 8)
    first = decode.wait(*ENDINGS)
    assert isinstance(first, PullDone), first
    prefill.signal(signal.SIGKILL)
    start_pulls(8, 18)  # some of these pulls are running when the peer dies
    prefill.process.join()
    start_pulls(18, 20)
    endings = [decode.wait(*ENDINGS) for _ in leases[1:]]
    failed = [ending for ending in endings if isinstance(ending, PullFailed)]
    assert all(ending.drained for ending in failed)
    assert {"pull-18", "pull-19"} <= {ending.pull_id for ending in failed}
    tolerance = 16 << 20
    min_free = free_before - tolerance
    wait_until(lambda: torch.cuda.mem_get_info(source)[0] >= min_free)
    assert_pulls(decode, prefill_on(source, to_close))


@pytest.mark.parametrize("long_run_bytes", [0, LONG_RUN_BYTES])
@pytest.mark.parametrize(("source", "target"), DEVICES)
def test_peer_that_frees_memory_during_a_copy_does_not_affect_other_pulls(
    to_close, source, target, long_run_bytes
):
    prefill = prefill_on(source, to_close, **BIG_POOL)
    decode = decode_on(target, to_close, 1, long_run_bytes, **BIG_POOL)
    blocks = list(range(1, 4001))
    leases = [prefill.lease(blocks, 32_000) for _ in range(6)]
    for index, remote in enumerate(leases):
        decode.coordinator.pull(f"pull-{index}", remote, 0, 32_000, blocks)
    decode.wait(*ENDINGS)
    prefill.request(free=True)
    for _ in leases[1:]:
        # Any ending is allowed, because P has broken its lease.
        decode.wait(*ENDINGS)
    assert_pulls(decode, prefill_on(source, to_close))

"""The digest kernel equals torch on a CPU, and verifies pulls. One GPU is needed."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.pool import KVPool
from kvcache.transfer.move.cuda_placer import CudaPlacer
from kvcache.transfer.move.peer_memory import Memory
from kvcache.transfer.plan.block_copy import BlockCopy, ScaleFactors
from kvcache.verify.digest import Digester
from protocol.errors import KVCorrupt
from tests.kvcache.test_digest import part_of, scoped_cases
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import Decode, Prefill

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
]


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)
@given(scoped_cases(), st.sampled_from([1, 8, 64, 192]), st.integers(1, 100_000))
def test_kernel_computes_the_same_digest_as_torch(scoped_case, widen, piece_bytes):
    case, scope = scoped_case
    case = replace(case, head_dim=case.head_dim * widen)
    for endpoint in case.endpoints(case.d):
        cpu_pool = KVPool(endpoint.layout)
        gpu_pool = KVPool(endpoint.layout, "cuda")
        assert gpu_pool.device.index is not None
        assert gpu_pool.base_address % 256 == 0
        cpu_pool.flat_bytes.random_(0, 256)
        gpu_pool.flat_bytes.copy_(cpu_pool.flat_bytes)
        torch.cuda.synchronize()  # the digest is computed on a separate stream
        by_torch = Digester(endpoint, case.heads, cpu_pool)
        by_kernel = Digester(endpoint, case.heads, gpu_pool)
        assert by_kernel.values is not by_torch.values
        expected = part_of(by_torch, scope, case.d.blocks, 1 << 20)
        assert part_of(by_kernel, scope, case.d.blocks, piece_bytes) == expected


class CorruptingPlacer(CudaPlacer):
    """A placer that flips one bit in each launch."""

    def _place(
        self, copy: BlockCopy, source: Memory, scale_factors: ScaleFactors
    ) -> None:
        super()._place(copy, source, scale_factors)
        self._pool.flat_bytes[int(copy.targets[0])] ^= 4


@pytest.mark.parametrize(
    ("p", "d"),
    [
        ({}, {}),
        ({"tp": 2, "order": "LBCNHD"}, {"tp": 4, "block_size": 24}),
        ({"dtype": "bfloat16", "heads": 1}, {"dtype": "bfloat16", "heads": 1, "tp": 2}),
    ],
)
@pytest.mark.parametrize("make", [CudaPlacer, CorruptingPlacer])
def test_pulls_between_pools_of_a_gpu_are_verified(to_close, p, d, make):
    prefill = Prefill(MemoryAgent, device="cuda:0", digests=True, **p)
    to_close.append(prefill)
    decode = Decode(
        MemoryAgent,
        verify="all",
        device="cuda:0",
        make_placer=make,
        maps_only=True,
        **d,
    )
    to_close.append(decode)
    for name in "ab":
        decode.coordinator.pull(name, prefill.lease([5, 2, 9], 24), 3, 22, [3, 1, 7])
        if make is CudaPlacer:
            assert decode.done(name).verified == "all"
        else:
            assert isinstance(decode.wait_for_error(name), KVCorrupt)

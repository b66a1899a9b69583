"""The digest kernel computes what torch computes on a CPU. One GPU."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.pool import KVPool
from kvcache.verify.digest import Digester
from kvcache.verify.scope import Scope
from tests.kvcache.test_digest import part_of, scoped
from tests.rigs.geometry import Case

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)
@given(scoped(), st.sampled_from([1, 8, 64, 192]), st.integers(1, 100_000))
def test_the_kernel_computes_what_torch_computes(
    scoped: tuple[Case, Scope], widen: int, piece_bytes: int
) -> None:
    case, scope = scoped
    case = replace(case, head_dim=case.head_dim * widen)
    for end in case.endpoints(case.d):
        ours, on_gpu = KVPool(end.layout), KVPool(end.layout, "cuda")
        ours.flat_bytes.random_(0, 256)
        on_gpu.flat_bytes.copy_(ours.flat_bytes)
        torch.cuda.synchronize()  # digests are computed on a stream of their own
        by_torch, by_kernel = (Digester(end, case.heads, pool) for pool in (ours, on_gpu))
        assert by_kernel.values is not by_torch.values
        wanted = part_of(by_torch, scope, case.d.blocks, 1 << 20)
        assert part_of(by_kernel, scope, case.d.blocks, piece_bytes) == wanted

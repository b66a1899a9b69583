"""FlashInfer with decode context parallelism (ranks that share tokens), in eager steps
and in CUDA graphs.

All ranks are threads on one GPU.
"""

import numpy as np
import pytest

from tests.attention.test_dcp import Bench, check_growing_sequences, in_8_bits
from tests.gpu.test_flashinfer import gpu_shape, latents

pytestmark = pytest.mark.gpu
_GROUPS = {
    "a shared KV head": (2, gpu_shape(num_kv_heads=1, num_q_heads=8)),
    "KV heads for each rank": (2, gpu_shape(num_kv_heads=4, num_q_heads=8)),
    "four ranks": (4, gpu_shape(num_kv_heads=2, num_q_heads=16)),
    "latents": (2, latents(num_q_heads=16)),
    "latents of 8 bits": (2, in_8_bits(latents(num_q_heads=16))),
    "8 bits": (2, in_8_bits(gpu_shape(num_kv_heads=4, num_q_heads=8))),
}


def bench_of(name: str) -> Bench:
    return Bench(*_GROUPS[name], scratch=400, name="flashinfer", tolerance=3e-2)


@pytest.mark.parametrize("name", _GROUPS)
def test_ranks_that_share_tokens_attend_as_one_rank(name):
    check_growing_sequences(bench_of(name))


@pytest.mark.parametrize("name", _GROUPS)
def test_captured_decode_steps_of_ranks_attend_as_one_rank(name):
    bench = bench_of(name)
    for part in bench.parts:
        part.reserve_graph_buffers(8, 4)
    tables = np.arange(1, 9).reshape(4, 2)
    lens = [3, 16, 40, 17]
    bench.check_step(lens, lens, tables)
    # In 20 steps, each rank gets new tokens to store.
    for _ in range(20):
        lens = [n + 1 for n in lens]
        bench.check_captured_step(lens, tables, 8)

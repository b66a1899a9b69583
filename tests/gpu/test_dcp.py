"""FlashInfer under ranks that share tokens: all of one GPU, in eager and captured steps."""

import numpy as np
import pytest
import torch

from attention.base import AttentionBackend
from attention.registry import create_backend
from kvcache.pool import KVPool
from tests.attention.test_dcp import SCALE, Bench, Setting, check_growing_sequences

pytestmark = pytest.mark.gpu


def make(pool: KVPool, num_q_heads: int) -> AttentionBackend:
    heads = {"num_q_heads": num_q_heads, "head_dim": pool.layout.head_dim}
    return create_backend("flashinfer", pool, **heads, scale=SCALE)


_GPU = {"dtype": torch.bfloat16, "device": "cuda", "block_size": 16, "tolerance": 3e-2}
_GQA = Setting(make, head_dim=128, **_GPU)
_MLA = Setting(make, head_dim=576, latent_dim=512, **_GPU)
_BENCHES = {
    "a shared KV head": ((2, 1, 8, 2), _GQA),
    "KV heads for each rank": ((2, 4, 8, 2), _GQA),
    "four ranks": ((4, 2, 16, 2), _GQA),
    "latents": ((2, 1, 16, 1), _MLA),
}


@pytest.mark.parametrize("name", _BENCHES)
def test_shared_tokens_attend_like_whole_sequences(name: str) -> None:
    group, setting = _BENCHES[name]
    check_growing_sequences(Bench(*group, scratch=400, setting=setting))


@pytest.mark.parametrize("name", _BENCHES)
def test_captured_decode_steps_do_too(name: str) -> None:
    group, setting = _BENCHES[name]
    bench = Bench(*group, scratch=400, setting=setting)
    for part in bench.parts:
        part.reserve_captured(8, 4)
    tables = np.arange(1, 9).reshape(4, 2)
    lens = [3, 16, 40, 17]
    bench.step(lens, lens, tables)
    for _ in range(20):  # over the border of a rank's tokens
        lens = [n + 1 for n in lens]
        bench.captured_step(lens, tables, 8)

"""Baton's kernels compile for common GPUs and fit into their shared memory.

Triton can compile for a GPU that this machine lacks. No kernel runs. The kernels for
each GPU are compiled in a separate process.
"""

import importlib
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parents[2]
# Bytes of shared memory per thread block, by compute capability: A100, RTX 3090, L40S
# and RTX 4090, H100 and H200, B200, RTX 5090.
SHARED_BYTES = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_and_fit(capability):
    pytest.importorskip("triton", reason="needs the extra `kernels`")
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_other_gpus", str(capability)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    compiled = {line.split()[0] for line in process.stdout.splitlines()}
    required = {
        "_attend",
        "_merge",
        "_rotate_and_store",
        "_rms_norm",
        "_one_row",
        "_multiply",
        "_choose",
    }
    assert compiled >= required
    assert ("_grouped" in compiled) == (capability == 90)
    assert ("_few_rows" in compiled) == (capability == 90)
    assert ("_widen" in compiled) == (capability >= 89)


def _compile_for(capability: int) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = MagicMock()
    target.get_current_target.return_value = GPUTarget("cuda", capability, 32)
    target.get_current_device.return_value = 0
    driver.set_active(target)
    run = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        shared = compiled.metadata.shared
        assert shared <= SHARED_BYTES[capability], (kernel, shared, options)
        print(kernel.fn.__name__, shared)

    JITFunction.run = compile_only
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)
    for dtype in (torch.bfloat16, torch.float16):
        _launch_model_kernels(dtype, capability)
        kv_dtypes = [dtype]
        if capability >= 89:
            kv_dtypes.append(torch.float8_e4m3fn)
        for kv_dtype in kv_dtypes:
            for dim in (64, 128, 256):
                _launch_attention_kernels(dtype, kv_dtype, dim, capability)


def _launch_attention_kernels(dtype, kv_dtype, dim, capability) -> None:
    import numpy as np
    import torch

    from attention import pieces
    from attention.base import AttentionBatch, AttentionKind, RopeNormArgs
    from attention.kernels import store, widen

    caches = tuple(torch.zeros(6, 2, 16, dim).to(kv_dtype) for _ in range(2))
    q, k, v = (torch.zeros(3, heads, dim, dtype=dtype) for heads in (8, 2, 2))
    if kv_dtype != dtype:
        wide = caches[0].to(dtype)
        widen.widen(caches[0], wide, torch.zeros(3).int(), torch.ones(1).int(), 0.5)
    slots = torch.zeros(3, dtype=torch.int32)
    norms = (torch.ones(dim), torch.ones(dim))
    rope_norm = RopeNormArgs(torch.zeros(3, dim), norms, 1e-6)
    store.rotate(q, k, torch.zeros(3, dim), interleaved=True)
    store.store(
        k, v, slots, caches, (0.5, 0.25), q=q, rope_norm=rope_norm, read_back=True
    )
    heads = (8, 2, dim)
    ones = np.ones(3, np.int32)
    batch = AttentionBatch(ones, ones, ones[:, None], np.zeros(3, np.int64))
    # Only Hopper GPUs have a kernel for rows that verify proposals together.
    max_rows = pieces.max_run_rows(*heads[:2]) if capability == 90 else 1
    num_bytes = pieces.partial_bytes(heads, 3, 132, max_rows)
    workspace = torch.empty(num_bytes, dtype=torch.uint8)
    pieces.pinned = torch.from_numpy
    for kind in (AttentionKind(), AttentionKind(100, 3.0)):
        decode = pieces.PieceDecode(
            heads, 16, kind, dim**-0.5, workspace, 132, max_rows=max_rows
        )
        decode.plan(batch, batch.pages(16))
        decode.run(q, caches, out=q, k_scale=1.0, v_scale=1.0)


def _launch_model_kernels(dtype, capability) -> None:
    import torch

    from model import fused_kernels
    from model.config import parse_config
    from model.quantization.products import example_weight
    from tests.gpu.test_quantization import WEIGHT_FORMATS
    from tests.model.test_config import DEEPSEEK, V3

    kernels = importlib.import_module("model.quantization.kernels")
    x = torch.zeros(3, 512).to(dtype)
    weight = torch.zeros(1024, 512).to(dtype)
    norm = torch.ones(512).to(dtype)
    fused_kernels.rms_norm(x, norm, 1e-6)
    fused_kernels.silu_and_mul(weight)
    fused_kernels.one_row(x[:1], weight, norm=norm, eps=1e-6, gated=True)
    kernels.rescale(x, torch.ones(3, 1), torch.ones(512, 1), None)
    for weight_format in WEIGHT_FORMATS:
        quantised = example_weight((*weight_format, dtype, torch.device("cpu")))
        for rows in (3, 40):
            kernels.multiply(
                quantised, torch.zeros(rows, quantised.shape[1], dtype=dtype)
            )
    experts = importlib.import_module("model.kernels.experts")
    routers = (({**DEEPSEEK, **V3}, torch.ones(8)), (DEEPSEEK, None))
    for config, correction in routers:
        moe = parse_config(config).moe
        for bias in (None, torch.ones(8)):
            experts.choose(torch.zeros(3, 8), bias, correction, moe, 2)
    if capability == 90:
        fused_kernels._num_programs = lambda device: 132
        fused_kernels.gated_rows(x, weight)
        few_rows = importlib.import_module("model.kernels.few_rows")
        few_rows.few_rows(x, weight, norm=norm, eps=1e-6, gated=True)
        few_rows.few_rows(x, weight, norm=norm, eps=1e-6)
        out = few_rows.few_rows(x, weight)
        few_rows.few_rows(x, weight, residual=out)
        for tile in few_rows._TILES.values():
            few_rows.few_rows(x, weight, residual=out, tile=tile)
        gate_up = torch.zeros(4, 512, 512, dtype=dtype)
        down = torch.zeros(4, 512, 256, dtype=dtype)
        weights = torch.zeros(3, 2)
        expert_ids = torch.zeros(3, 2, dtype=torch.int64)
        experts.mixture(x, gate_up, down, weights, expert_ids, 4)
        experts.mixture_of_one(x[:1], gate_up, down, weights[:1], expert_ids[:1])


if __name__ == "__main__":
    _compile_for(int(sys.argv[1]))

"""Kernels of ours compile for the GPUs that people have, and fit their shared memory.

Triton compiles for each of them on any machine. Nothing runs; each has a process of its own.
"""

import importlib
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parents[2]
# Bytes of shared memory that a thread block may have, by compute capability: A100, RTX 3090, L40S
# and RTX 4090, H100 and H200, B200, RTX 5090.
SHARED = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile_and_fit(capability):
    pytest.importorskip("triton", reason="needs the extra `kernels`")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_other_gpus", str(capability)], cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    kernels = {line.split()[0] for line in ran.stdout.splitlines()}
    wanted = "_attend _merge _rotate_and_store _rms_norm _one_row _multiply _choose"
    assert kernels >= set(wanted.split())
    assert ("_grouped" in kernels) == (capability == 90)
    assert ("_widen" in kernels) == (capability >= 89)


def _compile_for(capability: int) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found = MagicMock()
    found.get_current_target.return_value = GPUTarget("cuda", capability, 32)
    found.get_current_device.return_value = 0
    driver.set_active(found)
    run = JITFunction.run

    def compiled(kernel, *args, grid, warmup, **options):
        made = run(kernel, *args, grid=grid, warmup=True, **options)
        assert made.metadata.shared <= SHARED[capability], (
            kernel,
            made.metadata.shared,
            options,
        )
        print(kernel.fn.__name__, made.metadata.shared)

    JITFunction.run = compiled
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)
    eight_bits = [torch.float8_e4m3fn] * (capability >= 89)
    for dtype in (torch.bfloat16, torch.float16):
        _model(dtype, capability)
        for kv_dtype in (dtype, *eight_bits):
            for dim in (64, 128, 256):
                _attention(dtype, kv_dtype, dim)


def _attention(dtype, kv_dtype, dim) -> None:
    import torch

    from attention import pieces
    from attention.base import Kind, Pages, Turn
    from attention.kernels import store, widen

    caches = tuple(torch.zeros(6, 2, 16, dim).to(kv_dtype) for _ in range(2))
    q, k, v = (torch.zeros(3, heads, dim, dtype=dtype) for heads in (8, 2, 2))
    if kv_dtype != dtype:
        wide = caches[0].to(dtype)
        widen.widen(caches[0], wide, torch.zeros(3).int(), torch.ones(1).int(), 0.5)
    slots, norms = torch.zeros(3, dtype=torch.int32), (torch.ones(dim), torch.ones(dim))
    turn = Turn(torch.zeros(3, dim), norms, 1e-6)
    store.rotate(q, k, torch.zeros(3, dim), interleaved=True)
    store.store(k, v, slots, caches, (0.5, 0.25), q=q, turn=turn, read_back=True)
    heads, one = (8, 2, dim), pieces.np.ones(3, "int32")
    pages = Pages(pieces.np.arange(4, dtype="int32"), one, one)
    workspace = torch.empty(pieces.partial_bytes(heads, 3, 132), dtype=torch.uint8)
    pieces.pinned = torch.from_numpy
    for kind in (Kind(), Kind(100, 3.0)):
        decode = pieces.PieceDecode(heads, 16, kind, dim**-0.5, workspace, 132)
        decode.plan(pages)
        decode.run(q, caches, out=q, k_scale=1.0, v_scale=1.0)


def _model(dtype, capability) -> None:
    import torch

    from model import fused_kernels
    from model.config import parse_config
    from model.quantization.products import example
    from tests.gpu.test_quantization import LIKE
    from tests.model.test_config import DEEPSEEK, V3

    kernels = importlib.import_module("model.quantization.kernels")
    x, weight, norm = torch.zeros(3, 512), torch.zeros(1024, 512), torch.ones(512)
    x, weight, norm = (each.to(dtype) for each in (x, weight, norm))
    fused_kernels.rms_norm(x, norm, 1e-6)
    fused_kernels.silu_and_mul(weight)
    fused_kernels.one_row(x[:1], weight, norm=norm, eps=1e-6, gated=True)
    kernels.rescaled(x, torch.ones(3, 1), torch.ones(512, 1), None)
    for like in LIKE:
        quantised = example((*like, dtype, torch.device("cpu")))
        for rows in (3, 40):
            kernels.multiply(
                quantised, torch.zeros(rows, quantised.shape[1], dtype=dtype)
            )
    experts, which = (
        importlib.import_module("model.kernels.experts"),
        (torch.ones(8), None),
    )
    for raw, correction in zip(({**DEEPSEEK, **V3}, DEEPSEEK), which, strict=True):
        experts.choose(torch.zeros(3, 8), correction, parse_config(raw).moe, 2)
    if capability == 90:
        fused_kernels._num_programs = lambda device: 132
        fused_kernels.gated_rows(x, weight)
        gate_up, down = (
            torch.zeros(4, *size, dtype=dtype) for size in ((512, 512), (512, 256))
        )
        weights, chosen = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)
        experts.mixture(x, gate_up, down, weights, chosen, 4)
        experts.mixture_of_one(x[:1], gate_up, down, weights[:1], chosen[:1])


if __name__ == "__main__":
    _compile_for(int(sys.argv[1]))

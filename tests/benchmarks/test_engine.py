"""The engine benchmark counts the bytes and FLOPs of a step correctly, and runs on a
CPU.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.engine import main
from benchmarks.engine_limits import (
    num_attended_tokens,
    prefill_flops,
    weight_bytes_per_step,
)
from benchmarks.shapes import SHAPES
from model.architectures.quantization import AT_LOAD, Quantization
from model.config import parse_config


def test_work_of_8b_model_matches_its_weights():
    shape = {"architectures": ["LlamaForCausalLM"], **SHAPES["llama-3.1-8b"]}
    config = parse_config(shape)
    weights = 7_504_658_432  # all 8.03e9 parameters less norms and input embedding
    assert weight_bytes_per_step(config, 1, 2, keep_quantised=True) == 2 * weights
    quantised = replace(config, quantization=Quantization(AT_LOAD))
    head = 128256 * 4096  # the output head stays in 16 bits
    assert weight_bytes_per_step(quantised, 1, 2, keep_quantised=True) == weights + head
    assert weight_bytes_per_step(quantised, 1, 2, keep_quantised=False) == 2 * weights
    assert prefill_flops(config, 8192) == pytest.approx(1.32e14, rel=0.01)
    halves = prefill_flops(config, 4096) + prefill_flops(config, 4096, num_before=4096)
    assert halves == pytest.approx(prefill_flops(config, 8192), rel=1e-4)


def test_only_hit_experts_of_a_mixture_count():
    config = parse_config(SHAPES["qwen3-30b-a3b"])
    read = partial(weight_bytes_per_step, config, itemsize=1, keep_quantised=True)
    # The model has 3.3e9 active parameters.
    assert read(batch=1) == pytest.approx(3.35e9 - 0.31e9, rel=0.01)
    assert read(batch=10_000) == pytest.approx(30.5e9 - 0.31e9, rel=0.01)
    expected_flops = 1000 * 2 * 2.73e9 + 3.9e11
    assert prefill_flops(config, 1000) == pytest.approx(expected_flops, rel=0.01)


def test_only_tokens_within_the_window_count():
    shape = {
        **SHAPES["tiny"],
        "architectures": ["MistralForCausalLM"],
        "num_hidden_layers": 3,
    }
    windowed = parse_config({**shape, "sliding_window": 16})
    full = parse_config({**shape, "sliding_window": None})
    assert num_attended_tokens(windowed, 100) == 48
    assert num_attended_tokens(full, 100) == 300
    assert num_attended_tokens(windowed, 7) == 21
    # layers x FLOPs of a multiply-add x heads x (K and V) x head dim
    pair_flops = 3 * 2 * 4 * 2 * 16
    extra_flops = prefill_flops(full, 100) - prefill_flops(windowed, 100)
    # With the window, token 17 does not see one token, and token 100 does not see 84.
    assert extra_flops == pair_flops * 84 * 85 / 2


_SIZES = ["--batch", "1", "3", "--prompt", "64", "--context", "32", "--steps", "2"]
_WINDOWS_SHAPE = {
    **SHAPES["tiny"],
    "architectures": ["GptOssForCausalLM"],
    "sliding_window": 16,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_EXPERTS_SHAPE = {
    **SHAPES["qwen3-30b-a3b"],
    **SHAPES["tiny"],
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_FP8 = ["--quantization", "fp8", "--kv-cache-dtype", "float8_e4m3fn"]
_VARIANTS = {
    "plain": ("tiny", []),
    "fp8": ("tiny", _FP8),
    "windows": (_WINDOWS_SHAPE, ["--block-size", "8"]),
    "ranks": (_EXPERTS_SHAPE, ["--tp", "2", "--ep", "2"]),
}


@pytest.mark.parametrize("variant", _VARIANTS)
def test_benchmark_runs_on_cpu(capfd, tmp_path, variant):
    shape, options = _VARIANTS[variant]
    if isinstance(shape, dict):
        Path(tmp_path, "config.json").write_text(json.dumps(shape))
        shape = str(tmp_path)
    argv = ["--shape", shape, *options, *_SIZES, "--device", "cpu"]
    argv += ["--chunk", "16", "32", "--behind", "48"]
    main([*argv, "--dtype", "float32", "--kv-cache-tokens", "4096"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [row["batch"] for row in result["decode"]] == [1, 3]
    assert result["prefill"][0]["tokens"] == 64
    chunks = [(row["tokens"], row["behind"]) for row in result["chunks"]]
    assert chunks == [(16, 48), (32, 48)]

"""The engine benchmark counts what it divides by, and runs where there is no GPU."""

import json

import pytest

from benchmarks.engine import SHAPES, main, num_read_weights, prefill_flops
from model.config import parse_config


def test_the_work_of_an_8b_model_is_counted():
    config = parse_config({"architectures": ["LlamaForCausalLM"], **SHAPES["llama-3.1-8b"]})
    assert num_read_weights(config) == 7_504_658_432  # 8.03e9 without norms and input embedding
    assert prefill_flops(config, 8192) == pytest.approx(1.32e14, rel=0.01)


def test_of_a_mixture_the_experts_that_are_hit_are_counted():
    config = parse_config(SHAPES["qwen3-30b-a3b"])
    assert num_read_weights(config) == pytest.approx(3.35e9 - 0.31e9, rel=0.01)  # 3.3 active
    assert num_read_weights(config, 10_000) == pytest.approx(30.5e9 - 0.31e9, rel=0.01)
    assert prefill_flops(config, 1000) == pytest.approx(1000 * 2 * 2.73e9 + 3.9e11, rel=0.01)


def test_it_runs_on_a_cpu(capsys):
    sizes = ["--batch", "1", "3", "--prompt", "64", "--context", "32", "--steps", "2"]
    sizes += ["--kv-cache-tokens", "4096"]
    main(["--shape", "tiny", "--device", "cpu", "--dtype", "float32", *sizes])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["batch"] for row in result["decode"]] == [1, 3]
    assert result["prefill"][0]["tokens"] == 64

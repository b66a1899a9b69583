"""The engine benchmark counts what it divides by, and runs where there is no GPU."""

import json
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.engine import SHAPES, main, num_seen, prefill_flops, read_weight_bytes
from model.architectures.quantization import AT_LOAD, Quantization
from model.config import parse_config


def test_the_work_of_an_8b_model_is_counted():
    config = parse_config(
        {"architectures": ["LlamaForCausalLM"], **SHAPES["llama-3.1-8b"]}
    )
    weights = 7_504_658_432  # 8.03e9 without norms and input embedding
    assert read_weight_bytes(config, 1, 2, keeps=True) == 2 * weights
    quantised = replace(config, quantization=Quantization(AT_LOAD))
    head = 128256 * 4096  # keeps its 16 bits
    assert read_weight_bytes(quantised, 1, 2, keeps=True) == weights + head
    assert read_weight_bytes(quantised, 1, 2, keeps=False) == 2 * weights
    assert prefill_flops(config, 8192) == pytest.approx(1.32e14, rel=0.01)


def test_of_a_mixture_the_experts_that_are_hit_are_counted():
    config = parse_config(SHAPES["qwen3-30b-a3b"])
    read = partial(read_weight_bytes, config, itemsize=1, keeps=True)
    assert read(batch=1) == pytest.approx(3.35e9 - 0.31e9, rel=0.01)  # 3.3 active
    assert read(batch=10_000) == pytest.approx(30.5e9 - 0.31e9, rel=0.01)
    assert prefill_flops(config, 1000) == pytest.approx(
        1000 * 2 * 2.73e9 + 3.9e11, rel=0.01
    )


def test_of_windows_the_tokens_that_are_seen_are_counted():
    shape = {**SHAPES["tiny"], "num_hidden_layers": 3, "sliding_window": 16}
    shape |= {"architectures": ["MistralForCausalLM"]}
    local, whole = (parse_config({**shape, "sliding_window": w}) for w in (16, None))
    assert (num_seen(local, 100), num_seen(whole, 100), num_seen(local, 7)) == (
        48,
        300,
        21,
    )
    of_pair = (
        3 * 2 * 4 * 2 * 16
    )  # layers, two FLOPs, heads, keys and values of 16 elements
    more = prefill_flops(whole, 100) - prefill_flops(local, 100)
    assert more == of_pair * 84 * 85 / 2  # token 17 leaves out one, token 100 84


_SIZES = ["--batch", "1", "3", "--prompt", "64", "--context", "32", "--steps", "2"]
_WAYS = {
    "plain": ["--shape", "tiny"],
    "fp8": [
        "--shape",
        "tiny",
        "--quantization",
        "fp8",
        "--kv-cache-dtype",
        "float8_e4m3fn",
    ],
    "windows": ["--shape", "WINDOWS", "--block-size", "8"],
    "ranks": ["--shape", "EXPERTS", "--tp", "2", "--ep", "2"],
}


@pytest.mark.parametrize("way", _WAYS)
def test_it_runs_on_a_cpu(capfd, tmp_path, way):
    windows = {
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": 16,
        "head_dim": 16,
    }
    windows |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    experts = {
        **SHAPES["qwen3-30b-a3b"],
        **SHAPES["tiny"],
        "head_dim": 16,
        "num_experts": 4,
    }
    experts |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for name, shape in ("WINDOWS", {**SHAPES["tiny"], **windows}), ("EXPERTS", experts):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
    argv = [str(tmp_path / each) if each.isupper() else each for each in _WAYS[way]]
    main(
        [
            *argv,
            *_SIZES,
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--kv-cache-tokens",
            "4096",
        ]
    )
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [row["batch"] for row in result["decode"]] == [1, 3]
    assert result["prefill"][0]["tokens"] == 64

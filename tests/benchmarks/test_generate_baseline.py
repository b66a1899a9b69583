"""The baseline measures transformers' generate on a model of its own making."""

import json
from pathlib import Path

import pytest
import transformers

from benchmarks import generate_baseline


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("concurrency", [1, 3])
def test_every_row_gets_its_full_length(
    model_dir: Path, concurrency: int, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(model_dir), "--concurrency", str(concurrency), "--num-runs", "2"]
    assert generate_baseline.main([*argv, "--input-len", "9", "--output-len", "5"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["dtype"] == "float32"
    assert result["concurrency"] == concurrency
    assert len(result["decode_tokens_per_s_of_runs"]) == 2
    assert result["decode_tokens_per_s"] in result["decode_tokens_per_s_of_runs"]
    assert 0 < result["step_ms"]["p50"] <= result["step_ms"]["p99"]
    assert result["output_tokens_per_s"] > 0


def test_an_output_of_one_token_has_no_decoding(model_dir: Path) -> None:
    with pytest.raises(SystemExit):
        generate_baseline.main(["--model", str(model_dir), "--output-len", "1"])

"""`baton plan` answers from a config alone."""

import json
from pathlib import Path

import pytest

from deploy.plan import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_equal_geometry_moves_at_most_a_read_per_block(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", model, "--tokens=256", "--as-json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [rank] = found["ranks"]
    kv_bytes = 256 * 3 * 2 * 4 * 8 * 4  # tokens x layers x K,V x heads x head dim x itemsize
    assert rank["path"] == "direct" and rank["descriptors"] <= 4
    assert rank["useful_bytes"] == rank["bytes_read"] == kv_bytes


def test_a_hit_is_not_moved_and_the_text_says_why(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", model, "--tokens=128", "--hit-tokens=64", "--decode.tp=2"]
    assert main([*argv, "--prefill.kv-layout=LBCNHD", "--prefill.block-size=16"]) == 0
    text = capsys.readouterr().out
    assert "64 of them already on D" in text
    assert text.count("why: ") == 2


def test_ranks_of_d_may_share_tokens(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", model, "--tokens=200", "--decode.tp=4", "--decode.dcp=2"]
    assert main([*argv, "--prefill.block-size=16", "--as-json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["tokens"] for rank in ranks] == [128, 72] * 2
    assert [rank["heads"] for rank in ranks] == ["0-1", "0-1", "2-3", "2-3"]
    per_token = 3 * 2 * 2 * 8 * 4  # layers x K,V x heads x head dim x itemsize
    assert [rank["useful_bytes"] for rank in ranks] == [128 * per_token, 72 * per_token] * 2
    with pytest.raises(SystemExit):
        main([*argv, "--prefill.dcp=2"])


def test_what_ranks_cannot_share_is_refused_as_a_decode_server_would(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--model", model, "--decode.tp=2", "--decode.dcp=2", "--decode.dtype=float8_e4m3fn"])
    assert "cannot share tokens stored as float8_e4m3fn: use another --decode.dtype" in (
        capsys.readouterr().err
    )


def test_the_costs_of_the_link_decide_the_path(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", model, "--tokens=256", "--prefill.kv-layout=LBCNHD", "--as-json"]
    paths = []
    for costs in ("1000,1000,1000", "0.000001,1000,0.001"):  # slow descriptors, slow placing
        assert main([*argv, f"--transfer-costs={costs}"]) == 0
        paths.append(json.loads(capsys.readouterr().out)["ranks"][0]["path"])
    assert paths == ["staged", "direct"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--decode.tp=3"], "decode server: tp is 3"),
        (["--decode.dtype=bfloat16"], "bfloat16"),
        (["--prefill.dtype=float8_e4m3fn"], "float8_e4m3fn on the peer"),
        (["--hit-tokens=2000"], "hit_tokens is 2000"),
    ],
)
def test_what_cannot_be_is_refused(
    model: str, argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", model, *argv]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--prefill.kv-layout=BHLCD", '--prefill.kv-layout: "BHLCD" lacks axis N'),
        ("--decode.dtype=int4", "--decode.dtype: must be auto, float32,"),
        ("--device=tpu", "--device: must be cpu or cuda, not tpu"),
    ],
)
def test_what_is_not_known_is_refused_at_the_command_line(
    argv: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([argv])
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err

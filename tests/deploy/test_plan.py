"""What `baton plan` says, from a config alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import plan
from deploy.plan import DecodeGeometry, Model, PlanSettings
from kvcache.transfer.plan.endpoint import PlanError

LLAMA = Model(num_layers=32, total_kv_heads=8, num_components=2, head_dim=128)
MLA = Model(num_layers=27, total_kv_heads=1, num_components=1, head_dim=576)


def geometry(**options: Any) -> DecodeGeometry:
    return DecodeGeometry(**{"dtype": "bfloat16", **options})


def explain(model: Model, p: DecodeGeometry, d: DecodeGeometry, **options: Any) -> dict[str, Any]:
    settings = PlanSettings(**options).model_copy(update={"prefill": p, "decode": d})
    return plan.explain(settings, model, "float32")


def test_the_default_layout_cut_by_heads_is_one_descriptor_per_block() -> None:
    found = explain(LLAMA, geometry(tp=1), geometry(tp=2), tokens=1024)
    assert [rank["descriptors"] for rank in found["ranks"]] == [16, 16]
    assert {rank["path"] for rank in found["ranks"]} == {"direct"}
    assert found["ranks"][0]["run_bytes_median"] == 4 << 20
    assert [rank["heads"] for rank in found["ranks"]] == ["0-3", "4-7"]


def test_token_major_blocks_cut_by_heads_are_staged_and_it_says_why() -> None:
    found = explain(
        LLAMA, geometry(kv_layout="LBCNHD"), geometry(tp=2, kv_layout="LBCNHD"), tokens=1024
    )
    (rank, _) = found["ranks"]
    assert rank["path"] == "staged" and rank["bytes_read"] == 2 * rank["useful_bytes"]
    assert "direct would read 65536 runs" in rank["why"]
    assert rank["why"] in plan.text(found)


def test_a_latent_is_read_once_and_from_all_ranks_in_turn() -> None:
    found = explain(MLA, geometry(tp=4), geometry(tp=2), tokens=1024)
    for rank in found["ranks"]:
        assert rank["bytes_read"] == rank["useful_bytes"] == 1024 * 27 * 576 * 2
        assert rank["remote_ranks"] == [0, 1, 2, 3]
    assert found["idle_p_ranks"] == []


def test_ranks_that_share_tokens_read_their_own() -> None:
    d = geometry(tp=4, dcp=4)
    found = explain(MLA, geometry(tp=4), d, tokens=1000, hit_tokens=256)
    # Of blocks of 64: three each, but the last one, of 40 tokens, is the last rank's.
    assert [rank["tokens"] for rank in found["ranks"]] == [192, 192, 192, 168]
    for rank in found["ranks"]:
        assert rank["bytes_read"] == rank["useful_bytes"] == rank["tokens"] * 27 * 576 * 2
        assert rank["descriptors"] >= 3 and rank["heads"] == "0"
    assert "tp 4, dcp 4, BHLCND" in plan.text(found)
    assert "D rank 3: 168 tokens of head(s) 0 from P rank(s)" in plan.text(found)


def test_a_prompt_shorter_than_a_stripe_leaves_ranks_without_work() -> None:
    found = explain(LLAMA, geometry(), geometry(tp=2, dcp=2), tokens=40)
    assert [(rank["tokens"], rank["remote_ranks"]) for rank in found["ranks"]] == [
        (40, [0]),
        (0, []),
    ]


@pytest.mark.parametrize(
    ("p", "d", "said"),
    [
        (geometry(), geometry(tp=6, dcp=2), "tp / dcp is 3; use a divisor or a multiple of the 8"),
        (geometry(tp=2, dcp=2), geometry(), "dcp is 2 on the peer"),
        (geometry(block_size=128), geometry(tp=2, dcp=2), "block_size is 64 here and 128 on the"),
    ],
)
def test_tokens_that_cannot_be_shared_out_are_refused(
    p: DecodeGeometry, d: DecodeGeometry, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        explain(LLAMA, p, d)


def test_ranks_of_p_without_a_reader_are_named() -> None:
    # 64 tokens are one block of the peer: one of the two copies of the latent serves it.
    found = explain(MLA, geometry(tp=2), geometry(tp=1), tokens=64)
    assert found["idle_p_ranks"] == [1]
    assert "without a reader: 1" in plan.text(found)


def test_a_full_hit_moves_nothing() -> None:
    found = explain(LLAMA, geometry(), geometry(), tokens=100, hit_tokens=100)
    assert found["ranks"][0]["descriptors"] == found["ranks"][0]["bytes_read"] == 0
    assert found["estimated_s_per_1000_tokens"] == 0


def test_the_dict_is_json_and_holds_the_totals() -> None:
    found = explain(LLAMA, geometry(block_size=16), geometry(block_size=64), tokens=1000)
    document = json.loads(json.dumps(found))
    assert document["p"]["block_size"] == 16
    assert document["ranks"][0]["descriptors"] == found["ranks"][0]["descriptors"]
    per_1000 = max(rank["estimated_s"] for rank in found["ranks"])
    assert document["estimated_s_per_1000_tokens"] == pytest.approx(per_1000)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 0}, "greater than or equal to 1"),
        ({"dcp": 0}, "greater than or equal to 1"),
        ({"tp": 4, "dcp": 3}, "3 does not divide --tp 4: use a divisor"),
        ({"kv_layout": "BHLND"}, "lacks axis C"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        geometry(**options)


def test_unequal_dtypes_are_refused_unless_converted() -> None:
    p, d = geometry(dtype="float32"), geometry(dtype="bfloat16")
    with pytest.raises(PlanError, match="bfloat16 here and float32 on the peer"):
        explain(LLAMA, p, d)
    found = explain(LLAMA, p, d, kv_convert=True)
    assert found["ranks"][0]["path"] == "staged"
    assert "float32 becomes bfloat16" in found["ranks"][0]["why"]


def test_explaining_needs_no_torch() -> None:
    code = "import sys, deploy.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- from the command line

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
    assert plan.main(["--model", model, "--tokens=256", "--as-json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [rank] = found["ranks"]
    kv_bytes = 256 * 3 * 2 * 4 * 8 * 4  # tokens x layers x K,V x heads x head dim x itemsize
    assert rank["path"] == "direct" and rank["descriptors"] <= 4
    assert rank["useful_bytes"] == rank["bytes_read"] == kv_bytes


def test_a_hit_is_not_moved_and_the_text_says_why(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", model, "--tokens=128", "--hit-tokens=64", "--decode.tp=2"]
    assert plan.main([*argv, "--prefill.kv-layout=LBCNHD", "--prefill.block-size=16"]) == 0
    text = capsys.readouterr().out
    assert "64 of them already on D" in text
    assert text.count("why: ") == 2


def test_ranks_of_d_may_share_tokens(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", model, "--tokens=200", "--decode.tp=4", "--decode.dcp=2"]
    assert plan.main([*argv, "--prefill.block-size=16", "--as-json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["tokens"] for rank in ranks] == [128, 72] * 2
    assert [rank["heads"] for rank in ranks] == ["0-1", "0-1", "2-3", "2-3"]
    per_token = 3 * 2 * 2 * 8 * 4  # layers x K,V x heads x head dim x itemsize
    assert [rank["useful_bytes"] for rank in ranks] == [128 * per_token, 72 * per_token] * 2
    with pytest.raises(SystemExit):
        plan.main([*argv, "--prefill.dcp=2"])


def test_what_ranks_cannot_share_is_refused_as_a_decode_server_would(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan.main(
            ["--model", model, "--decode.tp=2", "--decode.dcp=2", "--decode.dtype=float8_e4m3fn"]
        )
    assert "cannot share tokens stored as float8_e4m3fn: use another --decode.dtype" in (
        capsys.readouterr().err
    )


def test_the_costs_of_the_link_decide_the_path(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", model, "--tokens=256", "--prefill.kv-layout=LBCNHD", "--as-json"]
    paths = []
    for costs in ("1000,1000,1000", "0.000001,1000,0.001"):  # slow descriptors, slow placing
        assert plan.main([*argv, f"--transfer-costs={costs}"]) == 0
        paths.append(json.loads(capsys.readouterr().out)["ranks"][0]["path"])
    assert paths == ["staged", "direct"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--decode.tp=3"], "decode server: tp is 3; use a divisor or a multiple of the 4"),
        (["--decode.dtype=bfloat16"], "bfloat16"),
        (["--prefill.dtype=float8_e4m3fn"], "float8_e4m3fn on the peer"),
        (["--hit-tokens=2000"], "hit_tokens is 2000"),
    ],
)
def test_what_cannot_be_is_refused(
    model: str, argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(["--model", model, *argv]) == 1
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
        plan.main([argv])
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err

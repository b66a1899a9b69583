"""`baton plan` explains transfers from a model's config alone, without servers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import plan
from deploy.plan import DecodeGeometry, Model, PlanSettings
from tests.model import test_config

LLAMA = Model(num_layers=32, total_kv_heads=8, num_components=2, head_dim=128)
MLA = Model(num_layers=27, total_kv_heads=1, num_components=1, head_dim=576)
MLA_TOKEN_BYTES = 27 * 576 * 2


def geometry(**options: Any) -> DecodeGeometry:
    return DecodeGeometry(**{"dtype": "bfloat16", **options})


def explain(
    model: Model, p: DecodeGeometry, d: DecodeGeometry, **options: Any
) -> dict[str, Any]:
    settings = PlanSettings(**options).model_copy(update={"prefill": p, "decode": d})
    return plan.explain(settings, model, "float32")


def values_of_ranks(report: dict[str, Any], name: str) -> list[Any]:
    return [rank[name] for rank in report["ranks"]]


def test_the_default_layout_cut_by_heads_is_one_descriptor_per_block():
    report = explain(LLAMA, geometry(tp=1), geometry(tp=2), tokens=1024)
    assert values_of_ranks(report, "descriptors") == [16, 16]
    assert values_of_ranks(report, "path") == ["direct"] * 2
    assert values_of_ranks(report, "run_bytes_median") == [4 << 20] * 2
    assert values_of_ranks(report, "heads") == ["0-3", "4-7"]
    assert "runs of 4.0 MiB / 4.0 MiB / 4.0 MiB" in plan.text(report)


def test_token_major_blocks_cut_by_heads_are_staged_with_a_reason():
    p = geometry(kv_layout="LBCNHD")
    d = geometry(tp=2, kv_layout="LBCNHD")
    report = explain(LLAMA, p, d, tokens=1024)
    (rank, _) = report["ranks"]
    assert rank["path"] == "staged" and rank["bytes_read"] == 2 * rank["useful_bytes"]
    assert "direct path would read 65536 runs" in rank["why"]
    assert rank["why"] in plan.text(report)


def test_mla_latent_is_read_once_and_from_all_ranks_in_turn():
    report = explain(MLA, geometry(tp=4), geometry(tp=2), tokens=1024)
    assert values_of_ranks(report, "bytes_read") == [1024 * MLA_TOKEN_BYTES] * 2
    assert values_of_ranks(report, "remote_ranks") == [[0, 1, 2, 3]] * 2
    assert report["idle_p_ranks"] == []
    # 64 tokens are one block of the peer. Both ranks of the peer have a copy, and one
    # is read.
    report = explain(MLA, geometry(tp=2), geometry(tp=1), tokens=64)
    assert report["idle_p_ranks"] == [1]
    assert "no D rank reads from: 1" in plan.text(report)


def test_ranks_that_share_tokens_read_only_their_tokens():
    report = explain(
        MLA, geometry(tp=4), geometry(tp=4, dcp=4), tokens=1000, hit_tokens=256
    )
    # Each rank has three blocks of 64 tokens, except that the last block of the last
    # rank has 40.
    assert values_of_ranks(report, "tokens") == [192, 192, 192, 168]
    assert values_of_ranks(report, "bytes_read") == [
        n * MLA_TOKEN_BYTES for n in (192, 192, 192, 168)
    ]
    assert "tp 4, dcp 4, BHLCND" in plan.text(report)
    assert "D rank 3: 168 tokens of head(s) 0 from P rank(s)" in plan.text(report)
    # 40 tokens are fewer than a stripe (a block of each rank).
    report = explain(LLAMA, geometry(), geometry(tp=2, dcp=2), tokens=40)
    assert (
        values_of_ranks(report, "tokens"),
        values_of_ranks(report, "remote_ranks"),
    ) == ([40, 0], [[0], []])
    report = explain(LLAMA, geometry(block_size=16), geometry(tp=4, dcp=2), tokens=200)
    assert values_of_ranks(report, "tokens") == [128, 72] * 2
    assert values_of_ranks(report, "heads") == ["0-3", "0-3", "4-7", "4-7"]


def test_a_full_hit_moves_nothing():
    report = explain(LLAMA, geometry(), geometry(), tokens=100, hit_tokens=100)
    assert (
        values_of_ranks(report, "descriptors")
        == values_of_ranks(report, "bytes_read")
        == [0]
    )
    assert report["estimated_s_per_1000_tokens"] == 0


def test_another_dtype_is_converted_on_demand():
    p = geometry(dtype="float32")
    d = geometry(dtype="bfloat16")
    (rank,) = explain(LLAMA, p, d, kv_convert=True)["ranks"]
    assert rank["path"] == "staged" and "from float32 to bfloat16" in rank["why"]


def test_only_tokens_within_the_window_move():
    """8 of 48 layers need all tokens. The other 40 layers need only the last 1,024
    tokens.
    """
    windows = (None, *[1024] * 5)
    gemma = Model(8, 8, 2, 128, windows)
    report = explain(gemma, geometry(tp=2), geometry(), tokens=100_000, hit_tokens=1000)
    (rank,) = report["ranks"]
    layer_bytes = 8 * 2 * 128 * 2  # number of bytes of a token in one layer
    assert rank["useful_bytes"] == 8 * layer_bytes * (99_000 + 5 * 1024)
    assert (
        "6 group(s), which see all, 1024, 1024, 1024, 1024, 1024 tokens"
        in plan.text(report)
    )
    hit = explain(gemma, geometry(), geometry(), tokens=100_000, hit_tokens=99_500)
    assert values_of_ranks(hit, "useful_bytes") == [48 * layer_bytes * 500]


def test_explaining_needs_no_torch():
    code = "import sys, deploy.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- from the command line

CONFIG = {**test_config.LLAMA, "num_hidden_layers": 3, "torch_dtype": "float32"}
# Number of bytes of a token for one head: layers x (K and V) x head dim x item size.
HEAD_BYTES = 3 * 2 * 8 * 4
SHARED = ("--decode.tp=2", "--decode.dcp=2")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_equal_geometry_needs_no_more_reads_than_blocks(model, capsys):
    assert plan.main(["--model", model, "--tokens=256", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    [rank] = report["ranks"]
    assert rank["path"] == "direct" and rank["descriptors"] <= 4
    assert rank["useful_bytes"] == rank["bytes_read"] == 256 * 4 * HEAD_BYTES
    assert report["p"]["block_size"] == 64
    per_1000 = rank["estimated_s"] * 1000 / 256
    assert report["estimated_s_per_1000_tokens"] == pytest.approx(per_1000)


def test_prefix_hit_does_not_move_and_the_text_has_the_reason(model, capsys):
    argv = ["--model", model, "--tokens=128", "--hit-tokens=64", "--decode.tp=2"]
    assert (
        plan.main([*argv, "--prefill.kv-layout=LBCNHD", "--prefill.block-size=16"]) == 0
    )
    text = capsys.readouterr().out
    assert "64 of them already on D" in text
    assert text.count("why: ") == 2


def test_costs_of_the_link_decide_the_path(model, capsys):
    argv = ["--model", model, "--tokens=256", "--prefill.kv-layout=LBCNHD", "--json"]
    paths = []
    # The first link is slow per descriptor, the second copies slowly from staging
    # memory.
    for costs in ("1000,1000,1000", "0.000001,1000,0.001"):
        assert plan.main([*argv, f"--transfer-costs={costs}"]) == 0
        paths += values_of_ranks(json.loads(capsys.readouterr().out), "path")
    assert paths == ["staged", "direct"]


def test_windows_come_from_the_model_config(model, capsys):
    windowed = CONFIG | {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    Path(model, "config.json").write_text(json.dumps(windowed))
    assert plan.main(["--model", model, "--tokens=500", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["useful_bytes"] == 64 * 4 * HEAD_BYTES
    assert plan.main(["--model", model, "--decode.tp=2", "--decode.dcp=2"]) == 1
    assert "--dcp 2 does not serve sliding windows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--decode.tp=3"], 1,
         "--tp 3 does not divide the model's 8 query heads; use 1 or 2 or"),
        (["--decode.dtype=bfloat16"], 1, "bfloat16 here and float32 on the peer"),
        (["--prefill.block-size=128", *SHARED], 1,
         "block_size is 64 here and 128 on the"),
        (["--decode.tp=4", "--decode.dcp=3"], 2,
         "3 does not divide --decode.tp 4: use a divisor"),
        (["--prefill.tp=0"], 2,
         "baton plan: error: --prefill.tp: must be greater than"),
        (["--decode.dcp=0"], 2,
         "--decode.dcp: must be greater than or equal to 1, not 0"),
        (["--prefill.dtype=float8_e4m3fn"], 1, "float8_e4m3fn on the peer"),
        (["--hit-tokens=2000"], 1, "--hit-tokens is 2000, but the prompt has 1000"),
        (["--prefill.kv-layout=BHLCD"], 2,
         '--prefill.kv-layout: "BHLCD" lacks axis N'),
        (["--prefill.dcp=2"], 2, "--prefill.dcp"),
        (["--decode.dtype=int4"], 2, "--decode.dtype: must be auto, float32,"),
        (["--device=tpu"], 2, "--device: must be cpu or cuda, not tpu"),
    ],
)  # fmt: skip
def test_invalid_geometry_is_refused_at_the_command_line(
    model, argv, status, message, capsys
):
    try:
        ended: Any = plan.main(["--model", model, *argv])
    except SystemExit as error:
        ended = error.code
    assert ended == status
    assert message in capsys.readouterr().err

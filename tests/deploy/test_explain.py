"""What `baton plan` says."""

import json
import subprocess
import sys
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


def test_heads_are_cut_by_groups_of_ranks_and_tokens_inside_them() -> None:
    found = explain(LLAMA, geometry(tp=2), geometry(tp=4, dcp=2, block_size=128), tokens=1024)
    assert [rank["heads"] for rank in found["ranks"]] == ["0-3", "0-3", "4-7", "4-7"]
    assert [rank["remote_ranks"] for rank in found["ranks"]] == [[0], [0], [1], [1]]
    assert [rank["tokens"] for rank in found["ranks"]] == [512] * 4
    assert [rank["descriptors"] for rank in found["ranks"]] == [8] * 4


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


@pytest.mark.parametrize("tp", [3, 12])
def test_a_tp_that_does_not_fit_the_heads_is_refused(tp: int) -> None:
    with pytest.raises(PlanError, match=f"tp is {tp}; use a divisor or a multiple of the 8"):
        explain(LLAMA, geometry(tp=tp), geometry())


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

"""What `baton plan` says."""

import json
import subprocess
import sys

import pytest

from deploy.plan import Geometry, Model, explain
from kvcache.layout import LayoutError
from kvcache.transfer.plan.endpoint import PlanError

LLAMA = Model(num_layers=32, total_kv_heads=8, num_components=2, head_dim=128)
MLA = Model(num_layers=27, total_kv_heads=1, num_components=1, head_dim=576)


def test_the_default_layout_cut_by_heads_is_one_descriptor_per_block() -> None:
    found = explain(LLAMA, Geometry(tp=1), Geometry(tp=2), tokens=1024)
    assert [rank.descriptors for rank in found.ranks] == [16, 16]
    assert {rank.path for rank in found.ranks} == {"direct"}
    assert found.ranks[0].run_bytes_median == 4 << 20
    assert [rank.heads for rank in found.ranks] == ["0-3", "4-7"]


def test_token_major_blocks_cut_by_heads_are_staged_and_it_says_why() -> None:
    found = explain(LLAMA, Geometry(order="LBCNHD"), Geometry(tp=2, order="LBCNHD"), tokens=1024)
    (rank, _) = found.ranks
    assert rank.path == "staged" and rank.bytes_read == 2 * rank.useful_bytes
    assert "direct would read 65536 runs" in rank.why
    assert rank.why in str(found)


def test_a_latent_is_read_once_and_from_all_ranks_in_turn() -> None:
    found = explain(MLA, Geometry(tp=4), Geometry(tp=2), tokens=1024)
    for rank in found.ranks:
        assert rank.bytes_read == rank.useful_bytes == 1024 * 27 * 576 * 2
        assert rank.remote_ranks == (0, 1, 2, 3)
    assert found.idle_p_ranks == ()


def test_ranks_that_share_tokens_read_their_own() -> None:
    d = Geometry(tp=4, dcp=4)
    found = explain(MLA, Geometry(tp=4), d, tokens=1000, hit_tokens=256)
    # Of blocks of 64: three each, but the last one, of 40 tokens, is the last rank's.
    assert [rank.tokens for rank in found.ranks] == [192, 192, 192, 168]
    for rank in found.ranks:
        assert rank.bytes_read == rank.useful_bytes == rank.tokens * 27 * 576 * 2
        assert rank.descriptors >= 3 and rank.heads == "0"
    assert "tp 4, dcp 4, BHLCND" in str(found)
    assert "D rank 3: 168 tokens of head(s) 0 from P rank(s)" in str(found)


def test_heads_are_cut_by_groups_of_ranks_and_tokens_inside_them() -> None:
    found = explain(LLAMA, Geometry(tp=2), Geometry(tp=4, dcp=2, block_size=128), tokens=1024)
    assert [rank.heads for rank in found.ranks] == ["0-3", "0-3", "4-7", "4-7"]
    assert [rank.remote_ranks for rank in found.ranks] == [(0,), (0,), (1,), (1,)]
    assert [rank.tokens for rank in found.ranks] == [512] * 4
    assert [rank.descriptors for rank in found.ranks] == [8] * 4


def test_a_prompt_shorter_than_a_stripe_leaves_ranks_without_work() -> None:
    found = explain(LLAMA, Geometry(), Geometry(tp=2, dcp=2), tokens=40)
    assert [(rank.tokens, rank.remote_ranks) for rank in found.ranks] == [(40, (0,)), (0, ())]


@pytest.mark.parametrize(
    ("p", "d", "said"),
    [
        (Geometry(), Geometry(tp=4, dcp=3), "dcp is 3; use a divisor of tp, which is 4"),
        (Geometry(), Geometry(dcp=0), "dcp is 0"),
        (Geometry(), Geometry(tp=6, dcp=2), "tp / dcp is 3; use a divisor or a multiple of the 8"),
        (Geometry(tp=2, dcp=2), Geometry(), "dcp is 2 on the peer"),
        (Geometry(block_size=128), Geometry(tp=2, dcp=2), "block_size is 64 here and 128 on the"),
    ],
)
def test_tokens_that_cannot_be_shared_out_are_refused(p: Geometry, d: Geometry, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        explain(LLAMA, p, d)


def test_ranks_of_p_without_a_reader_are_named() -> None:
    # 64 tokens are one block of the peer: one of the two copies of the latent serves it.
    found = explain(MLA, Geometry(tp=2), Geometry(tp=1), tokens=64)
    assert found.idle_p_ranks == (1,)
    assert "without a reader: 1" in str(found)


def test_a_full_hit_moves_nothing() -> None:
    found = explain(LLAMA, Geometry(), Geometry(), tokens=100, hit_tokens=100)
    assert found.ranks[0].descriptors == found.ranks[0].bytes_read == 0
    assert found.estimated_s_per_1000_tokens == 0


def test_the_dict_is_json_and_holds_the_totals() -> None:
    found = explain(LLAMA, Geometry(block_size=16), Geometry(block_size=64), tokens=1000)
    document = json.loads(json.dumps(found.to_dict()))
    assert document["p"]["block_size"] == 16
    assert document["ranks"][0]["descriptors"] == found.ranks[0].descriptors
    per_1000 = max(rank.estimated_s for rank in found.ranks)
    assert document["estimated_s_per_1000_tokens"] == pytest.approx(per_1000)


@pytest.mark.parametrize("tp", [0, 3, 12])
def test_a_tp_that_does_not_fit_the_heads_is_refused(tp: int) -> None:
    with pytest.raises(PlanError, match=f"tp is {tp}; use a divisor or a multiple of the 8"):
        explain(LLAMA, Geometry(tp=tp), Geometry())


def test_a_layout_without_an_axis_is_refused() -> None:
    with pytest.raises(LayoutError, match="lacks axis C"):
        explain(LLAMA, Geometry(order="BHLND"), Geometry())


def test_unequal_dtypes_are_refused_unless_converted() -> None:
    p, d = Geometry(dtype="float32"), Geometry(dtype="bfloat16")
    with pytest.raises(PlanError, match="bfloat16 here and float32 on the peer"):
        explain(LLAMA, p, d)
    found = explain(LLAMA, p, d, convert=True)
    assert found.ranks[0].path == "staged"
    assert "float32 becomes bfloat16" in found.ranks[0].why


def test_explaining_needs_no_torch() -> None:
    code = "import sys, deploy.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""What `baton plan` says."""

import json
import subprocess
import sys

import pytest

from kvcache.layout import LayoutError
from kvcache.transfer.explain import Geometry, Model, explain
from kvcache.transfer.plan import PlanError

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


def test_parsing_keeps_defaults_and_reads_every_key() -> None:
    assert Geometry.parse("") == Geometry()
    parsed = Geometry.parse("tp=2,layout=LBCNHD,block=16,dtype=float32")
    assert parsed == Geometry(2, "LBCNHD", 16, "float32")


@pytest.mark.parametrize("text", ["tp", "tp=", "tp=two", "tp=-1", "blocks=16"])
def test_parsing_names_what_it_does_not_understand(text: str) -> None:
    with pytest.raises(PlanError, match=r"geometry has .*(tp|blocks)"):
        Geometry.parse(text)


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
    code = "import sys, kvcache.transfer.explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

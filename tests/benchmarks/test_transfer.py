"""The transfer benchmark: it checks what it moves, and ends in one line of JSON."""

import json

import pytest

from benchmarks import transfer

SMALL = ["--layers", "2", "--head-dim", "16", "--tokens", "128", "--repeat", "1"]


def rows_of(capfd: pytest.CaptureFixture[str], *argv: str) -> dict[tuple[str, str], dict]:
    assert transfer.main([*SMALL, *argv]) == 0
    rows = json.loads(capfd.readouterr().out.strip().splitlines()[-1])["rows"]
    return {(row["case"], row["path"]): row for row in rows}


@pytest.fixture
def default_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs measured on a busy machine may choose another path."""
    monkeypatch.setattr(transfer.Puller, "calibrate", lambda self, remote, local: None)


@pytest.mark.usefixtures("default_costs")
def test_every_case_is_measured_against_the_per_layer_scheme(capfd) -> None:
    rows = rows_of(capfd, "--only", "LBCNHD ", "--transfer", "nixl")
    assert [case for case, _ in rows] == [
        f"LBCNHD {geometry}" for geometry in transfer.GEOMETRIES for _ in range(2)
    ]
    assert rows[("LBCNHD 1->2", "per-layer")]["descriptors"] == 2 * 2 * 128
    assert rows[("LBCNHD 1->2", "staged")]["descriptors"] <= 2 * 2
    for row in rows.values():
        assert set(row) == {
            "case", "path", "descriptors", "bytes", "seconds", "gb_per_s", "copy_gb_per_s",
        }  # fmt: skip
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)


@pytest.mark.usefixtures("default_costs")
def test_the_default_layout_cut_by_heads_is_one_descriptor_per_block(capfd) -> None:
    rows = rows_of(capfd, "--only", "BHLCND 1->2", "--transfer", "nixl")
    assert rows[("BHLCND 1->2", "direct")]["descriptors"] == 128 // 64


def test_unless_told_otherwise_it_copies_out_of_the_peers_mapped_memory(capfd) -> None:
    rows = rows_of(capfd, "--only", "LBCNHD 2->1")
    assert set(rows) == {("LBCNHD 2->1", "mapped"), ("LBCNHD 2->1", "per-layer")}
    assert rows[("LBCNHD 2->1", "mapped")]["descriptors"] == 0


def test_wrong_bytes_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "place", lambda *args: None)
    with pytest.raises(RuntimeError, match="LBCNHD 1->2: what arrived is not what was sent"):
        transfer.main([*SMALL, "--only", "LBCNHD 1->2"])

"""The transfer benchmark: it checks what it moves, and ends in one line of JSON."""

import json
from dataclasses import fields

import pytest

from benchmarks import transfer
from kvcache.transfer.move import place as placing

SMALL = ["--layers", "2", "--head-dim", "16", "--tokens", "128", "--repeat", "1"]


def rows_of(
    capfd: pytest.CaptureFixture[str], *argv: str
) -> dict[tuple[str, str], dict]:
    assert transfer.main([*SMALL, *argv]) == 0
    rows = json.loads(capfd.readouterr().out.strip().splitlines()[-1])["rows"]
    return {(row["case"], row["path"]): row for row in rows}


def test_reads_are_measured_against_bare_nixl(capfd):
    rows = rows_of(capfd, "--only", "BHLCND TP 1->2", "--transfer", "nixl")
    name = "BHLCND TP 1->2"
    (ours,) = {path for case, path in rows if case == name} - {"bare NIXL"}
    assert ours in (
        "direct",
        "staged",
        "mixed",
    )  # by costs that each rank has just measured
    assert (
        rows[name, ours]["descriptors"] <= 2 * 128 // 64
    )  # of each rank one per block
    assert rows[name, ours]["of_bare"] > 0
    assert rows[name, "bare NIXL"]["descriptors"] == 2 * 128 // 64
    for row in rows.values():
        assert set(row) == {each.name for each in fields(transfer.Row)}
        assert row["gb_per_s"] == pytest.approx(
            row["bytes"] / row["milliseconds"] / 1e6
        )


def test_every_layout_and_geometry_has_its_row_of_mapped_pulls(capfd):
    names = [case.name for case in transfer.cases("cpu", "mapped")]
    assert {f"LBCNHD {geometry}" for geometry in transfer.GEOMETRIES} <= set(names)
    assert "LBCNHD->BHLCND same" in names
    name = "LBCNHD TP 2->1"
    rows = rows_of(capfd, "--only", name)
    short = ["128 tokens", "128 tokens unheld"]
    assert [case for case, path in rows if path == "mapped"] == [name, *short]
    assert rows[name, "mapped"]["descriptors"] == 0


def test_wrong_bytes_fail_the_run(monkeypatch, capfd):
    monkeypatch.setattr(placing, "place", lambda *args: None)
    assert transfer.main([*SMALL, "--only", "LBCNHD 16->64"]) == 1
    assert "LBCNHD 16->64: failed" in (out := capfd.readouterr().out)
    assert "what arrived is not what was sent" in out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--paths", "mapped,rdma"], "--paths names rdma; use mapped, nixl or both"),
        (["--tokens", "100"], "--tokens 100 is no multiple of 64"),
        (["--device", "cuda", "--devices", "1"], "--devices 1 names one GPU"),
    ],
)
def test_options_that_cannot_work_are_refused(argv, told, capfd):
    with pytest.raises(SystemExit):
        transfer.main(argv)
    assert told in capfd.readouterr().err

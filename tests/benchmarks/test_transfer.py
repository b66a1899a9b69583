"""The transfer benchmark checks the KV that it moves. Its last line of output is
JSON.
"""

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
    lines = capfd.readouterr().out.strip().splitlines()
    rows = json.loads(lines[-1])["rows"]
    return {(row["case"], row["path"]): row for row in rows}


def test_reads_are_measured_against_bare_nixl(capfd):
    name = "BHLCND TP 1->2"
    rows = rows_of(capfd, "--only", name, "--transfer", "nixl")
    (path,) = {path for case, path in rows if case == name} - {"bare NIXL"}
    # The path may vary, because each rank chooses by costs that it has just measured.
    assert path in ("direct", "staged", "mixed")
    # There is at most one descriptor for each rank and block.
    assert rows[name, path]["descriptors"] <= 2 * 128 // 64
    assert rows[name, path]["of_bare"] > 0
    assert rows[name, "bare NIXL"]["descriptors"] == 2 * 128 // 64
    for row in rows.values():
        assert set(row) == {field.name for field in fields(transfer.Row)}
        gb_per_s = row["bytes"] / row["milliseconds"] / 1e6
        assert row["gb_per_s"] == pytest.approx(gb_per_s)


def test_every_layout_and_geometry_has_a_row_of_mapped_pulls(capfd):
    names = [case.name for case in transfer.cases("cpu", "mapped")]
    assert {f"LBCNHD {geometry}" for geometry in transfer.GEOMETRIES} <= set(names)
    assert "LBCNHD->BHLCND same" in names
    name = "LBCNHD TP 2->1"
    rows = rows_of(capfd, "--only", name)
    mapped = [case for case, path in rows if path == "mapped"]
    assert mapped == [name, "128 tokens", "128 tokens unheld"]
    assert rows[name, "mapped"]["descriptors"] == 0


def test_wrong_bytes_fail_the_run(monkeypatch, capfd):
    monkeypatch.setattr(placing, "place", lambda *args: None)
    assert transfer.main([*SMALL, "--only", "LBCNHD 16->64"]) == 1
    output = capfd.readouterr().out
    assert "LBCNHD 16->64: failed" in output
    assert "the KV that arrived differs from the KV that was sent" in output


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--paths", "mapped,rdma"], "--paths names rdma; use mapped, nixl or both"),
        (["--tokens", "100"], "--tokens 100 is not a multiple of 64"),
        (["--device", "cuda", "--devices", "1"], "--devices 1 names one GPU"),
    ],
)
def test_invalid_options_are_refused(argv, message, capfd):
    with pytest.raises(SystemExit):
        transfer.main(argv)
    assert message in capfd.readouterr().err

"""Cores a process may use."""

from pathlib import Path

import pytest

from protocol.settings.machine import available_cores


@pytest.mark.parametrize(("quota", "most"), [("150000 100000\n", 1), ("50000 100000", 1)])
def test_a_containers_quota_counts(tmp_path: Path, quota: str, most: int) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    assert available_cores(file) == most


def test_no_quota_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(tmp_path / "cpu.max") == available_cores(tmp_path / "missing") >= 1

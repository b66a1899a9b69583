"""A folder for what is made once: found, or refused with what to set."""

from pathlib import Path

import pytest

from model.files import build_once
from protocol.settings.machine import CannotKeep, cache_dir, cluster_secret


def test_a_variable_or_the_home_directory_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/of/somebody")
    monkeypatch.delenv("BATON_CACHE", raising=False)
    assert cache_dir() == Path("/of/somebody/.cache/baton")
    monkeypatch.setenv("BATON_CACHE", "/elsewhere")
    assert cache_dir() == Path("/elsewhere")


def test_a_user_without_a_home_directory_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("BATON_CACHE", raising=False)
    with pytest.raises(OSError, match=r"no home directory is known.*; set BATON_CACHE"):
        cluster_secret(None)


def test_a_folder_that_cannot_be_written_to_is_named_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "baton"
    monkeypatch.setenv("BATON_CACHE", str(folder))
    place = rf"in {folder} \(Not a directory\); "
    with pytest.raises(CannotKeep, match=rf"cluster secret {place}set BATON_CLUSTER_SECRET, or"):
        cluster_secret(None)
    with pytest.raises(CannotKeep, match=f"converted model {place}set BATON_CACHE to a folder"):
        build_once(cache_dir() / "model", "key", lambda scratch: None)

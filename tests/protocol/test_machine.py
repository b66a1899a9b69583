"""A folder for what is made once, a secret, cores: found, or refused with what to set."""

import os
from pathlib import Path

import pytest
from pydantic import SecretStr

from model.hub import build_once
from protocol.settings import machine
from protocol.settings.machine import (
    CannotKeep,
    available_cores,
    cache_dir,
    cluster_secret,
)


def test_cache_folder_comes_from_the_variable_or_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/of/somebody")
    monkeypatch.delenv("BATON_CACHE", raising=False)
    assert cache_dir() == Path("/of/somebody/.cache/baton")
    monkeypatch.setenv("BATON_CACHE", "/elsewhere")
    assert cache_dir() == Path("/elsewhere")


def test_missing_home_directory_names_the_variable_to_set(monkeypatch):
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("BATON_CACHE", raising=False)
    with pytest.raises(OSError, match=r"no home directory is known.*; set BATON_CACHE"):
        cluster_secret(None)


def test_unwritable_folder_is_named_with_the_variable_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "baton"
    monkeypatch.setenv("BATON_CACHE", str(folder))
    place = rf"in {folder} \(Not a directory\); "
    with pytest.raises(
        CannotKeep, match=rf"cluster secret {place}set BATON_CLUSTER_SECRET, or"
    ):
        cluster_secret(None)
    with pytest.raises(
        CannotKeep, match=f"converted model {place}set BATON_CACHE to a writable folder"
    ):
        build_once(cache_dir() / "model", "key", lambda scratch: None)


def test_the_first_use_makes_this_machines_secret(tmp_path):
    file = tmp_path / "deep" / "cluster-secret"
    first = cluster_secret(None, file)
    assert len(first) == 64 and cluster_secret(None, file) == first
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["cluster-secret"]
    machine._create_secret(file)  # as a second process would
    assert cluster_secret(None, file) == first
    assert cluster_secret(SecretStr("mine"), file) == b"mine"


@pytest.mark.parametrize("content", ["", "\n", "too short"])
def test_a_file_without_a_secret_is_refused(tmp_path, content):
    file = tmp_path / "cluster-secret"
    file.write_text(content)
    with pytest.raises(
        ValueError, match=r"cluster-secret holds a cluster secret of .* remove the file"
    ):
        cluster_secret(None, file)


def test_loopback_addresses_are_local_also_when_ipv4_mapped():
    here = ["127.0.0.1", "::1", "::ffff:127.0.0.1", "localhost"]
    results = [
        machine.is_local(one)
        for one in (*here, "::ffff:10.0.0.7", "10.0.0.7", "0.0.0.0", "::", "h")
    ]
    assert results == [True] * 4 + [False] * 5


@pytest.mark.parametrize(
    "quota", ["150000 100000\n", "50000 100000", "max 100000\n", None]
)
def test_a_containers_quota_counts(tmp_path, quota):
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    is_limited = quota is not None and not quota.startswith("max")
    assert available_cores(file) == (1 if is_limited else len(os.sched_getaffinity(0)))

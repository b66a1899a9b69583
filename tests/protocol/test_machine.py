"""Cache folder, cluster secret and number of cores of this machine, and errors about
them.
"""

import os
from pathlib import Path

import pytest
from pydantic import SecretStr

from model.hub import build_once
from protocol.settings import machine
from protocol.settings.machine import (
    CannotStore,
    available_cores,
    cache_dir,
    cluster_secret,
)


def test_cache_folder_comes_from_the_variable_or_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/the/home")
    monkeypatch.delenv("BATON_CACHE", raising=False)
    assert cache_dir() == Path("/the/home/.cache/baton")
    monkeypatch.setenv("BATON_CACHE", "/the/cache")
    assert cache_dir() == Path("/the/cache")


def test_missing_home_directory_names_the_variable_to_set(monkeypatch):
    def missing_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", missing_home)
    monkeypatch.delenv("BATON_CACHE", raising=False)
    with pytest.raises(OSError, match=r"no home directory is known.*; set BATON_CACHE"):
        cluster_secret(None)


def test_unwritable_folder_is_named_with_the_variable_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "baton"
    monkeypatch.setenv("BATON_CACHE", str(folder))
    reason = rf"in {folder} \(Not a directory\); "
    with pytest.raises(
        CannotStore, match=rf"cluster secret {reason}set BATON_CLUSTER_SECRET, or"
    ):
        cluster_secret(None)
    fix = "set BATON_CACHE to a writable folder"
    with pytest.raises(CannotStore, match=f"converted model {reason}{fix}"):
        build_once(cache_dir() / "model", "key", lambda scratch: None)


def test_first_use_creates_the_secret_that_all_later_uses_return(tmp_path):
    file = tmp_path / "deep" / "cluster-secret"
    first = cluster_secret(None, file)
    assert len(first) == 64 and cluster_secret(None, file) == first
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["cluster-secret"]
    machine._create_secret(file)  # does what a second process would do
    assert cluster_secret(None, file) == first
    assert cluster_secret(SecretStr("mine"), file) == b"mine"


@pytest.mark.parametrize("content", ["", "\n", "too short"])
def test_file_with_too_short_a_secret_is_refused(tmp_path, content):
    file = tmp_path / "cluster-secret"
    file.write_text(content)
    with pytest.raises(
        ValueError, match=r"cluster-secret holds a cluster secret of .* remove the file"
    ):
        cluster_secret(None, file)


def test_only_loopback_addresses_are_local_also_when_ipv4_mapped():
    for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "localhost"):
        assert machine.is_local(address)
    for address in ("::ffff:10.0.0.7", "10.0.0.7", "0.0.0.0", "::", "h"):
        assert not machine.is_local(address)


@pytest.mark.parametrize(
    "quota", ["150000 100000\n", "50000 100000", "max 100000\n", None]
)
def test_quota_of_a_container_limits_the_cores(tmp_path, quota):
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    is_limited = quota is not None and not quota.startswith("max")
    assert available_cores(file) == (1 if is_limited else len(os.sched_getaffinity(0)))

"""The private folder of an engine's sockets: removed by its owner, or by whoever comes after it."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.process import launch
from engine.process.launch import SocketFolder

_KILLED_OWNER = """
import os, pathlib, signal, sys
from engine.process.launch import SocketFolder
folder = SocketFolder(pathlib.Path(sys.argv[1]))
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _age(folder: Path) -> None:
    os.utime(folder, (1, 1))


def test_the_owner_removes_it(socket_folder: Path) -> None:
    folder = SocketFolder(socket_folder)
    assert folder.path.parent == socket_folder and folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert list(socket_folder.iterdir()) == []


def test_a_killed_owners_folder_goes_and_a_living_ones_stays(socket_folder: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED_OWNER, str(socket_folder)], capture_output=True, text=True
    )
    orphan = Path(killed.stdout.strip())
    assert orphan.is_dir()
    living = SocketFolder(socket_folder)
    assert orphan.is_dir(), "so young that it may be on its way"
    _age(orphan)
    _age(living.path)
    newest = SocketFolder(socket_folder)
    assert not orphan.exists()
    assert living.path.is_dir()
    living.remove()
    newest.remove()


def _deep(folder: Path, num_bytes: int) -> Path:
    """A folder below whose path has so many bytes."""
    deep = folder
    while (missing := num_bytes - len(os.fsencode(deep))) > 0:
        name = "ü" * 20 if missing > 80 else "x" * (missing - 1)
        deep /= name
    deep.mkdir(parents=True)
    return deep


@pytest.mark.parametrize("num_bytes", [60, 76, 77, 78, 107, 300])
def test_sockets_fit_however_deep_the_folder_for_temporary_files_is(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    deep = _deep(socket_folder, num_bytes)
    assert len(os.fsencode(deep)) == num_bytes
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = SocketFolder()
    try:
        assert (folder.path.parent == deep) == (num_bytes <= 77)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder.path}/sockets")
    finally:
        folder.remove()
    assert not folder.path.exists()


def test_where_no_socket_fits_the_error_says_what_to_do(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_SHORT_PARENTS", (Path("/proc/nowhere"),))
    with pytest.raises(OSError, match=r"has 107 bytes, \d\d at most .* set TMPDIR to a folder"):
        SocketFolder(_deep(socket_folder, 107))

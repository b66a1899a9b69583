"""The private folder of an engine's sockets."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from engine.process import launch
from engine.process.launch import EngineProcesses


@pytest.fixture(params=[60, 76, 77, 78, 107, 300])
def deep(
    request: pytest.FixtureRequest, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder for temporary files, whose path has so many bytes."""
    folder = socket_folder
    while (missing := request.param - len(os.fsencode(folder))) > 0:
        folder /= "ü" * 20 if missing > 80 else "x" * (missing - 1)
    folder.mkdir(parents=True)
    assert len(os.fsencode(folder)) == request.param
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_sockets_fit_however_deep_the_folder_for_temporary_files_is(deep):
    processes = EngineProcesses("-", lambda reason: None)
    folder = Path(processes.address("sockets").removeprefix("ipc://")).parent
    try:
        assert (folder.parent == deep) == (len(os.fsencode(deep)) <= 77)
        assert folder.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/sockets")
    finally:
        processes.stop(0.0)
    assert not folder.exists()


@pytest.mark.parametrize("deep", [107], indirect=True)
def test_where_no_socket_fits_the_error_says_what_to_do(deep, monkeypatch):
    monkeypatch.setattr(launch, "_SHORT", "/proc/nowhere")
    with pytest.raises(OSError, match=r"has 107 bytes, \d\d at most .* set TMPDIR to a folder"):
        EngineProcesses("-", lambda reason: None)

"""The private folder of an engine's sockets: removed by its owner, or by whoever comes after it."""

import os
import subprocess
import sys
from pathlib import Path

from engine.launch import SocketFolder, new_incarnation

_KILLED_OWNER = """
import os, pathlib, signal, sys
from engine.launch import SocketFolder
folder = SocketFolder(pathlib.Path(sys.argv[1]))
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _age(folder: Path) -> None:
    os.utime(folder, (1, 1))


def test_the_owner_removes_it(tmp_path: Path) -> None:
    folder = SocketFolder(tmp_path)
    assert folder.path.parent == tmp_path and folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owners_folder_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED_OWNER, str(tmp_path)], capture_output=True, text=True
    )
    orphan = Path(killed.stdout.strip())
    assert orphan.is_dir()
    living = SocketFolder(tmp_path)
    assert orphan.is_dir(), "so young that it may be on its way"
    _age(orphan)
    _age(living.path)
    newest = SocketFolder(tmp_path)
    assert not orphan.exists()
    assert living.path.is_dir()
    living.remove()
    newest.remove()


def test_ids_are_fresh() -> None:
    assert len({new_incarnation() for _ in range(100)}) == 100

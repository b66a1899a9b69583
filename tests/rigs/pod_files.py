"""The root file system of a pod's containers, made from the real image or from the
files of this machine.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.rigs import images
from tests.rigs.kubernetes import ROOT


@dataclass(frozen=True)
class RootFileSystem:
    """The files of a container, and the variables that its image sets.

    Attributes:
        root: the folder with all files, or None if `binds` has them.
        binds: folders of this machine by their path in the container, read-only.
        links: symbolic links by their path in the container.
    """

    root: Path | None = None
    binds: Mapping[str, Path] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def root_file_system(folder: Path) -> Iterator[RootFileSystem]:
    """Yield the files of the real image if this machine can build it. Otherwise, yield
    the files of this machine and this checkout.

    Args:
        folder: see checkout_files.
    """
    if images.missing_requirement() is not None:
        yield checkout_files(folder)
        return
    with images.mounted_image() as image:
        yield RootFileSystem(image.root, env=image.env)


def checkout_files(folder: Path) -> RootFileSystem:
    """Return the programs of this machine and the code of this checkout.

    Args:
        folder: where the command `baton` is written.
    """
    program = folder / "bin" / "baton"
    program.parent.mkdir(parents=True)
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH=/opt/baton exec {sys.executable} -m deploy.cli "$@"\n'
    )
    program.chmod(0o755)
    binds = {"/opt/baton": ROOT, "/opt/bin": program.parent, "/usr": Path("/usr")}
    links = {}
    for name in ("bin", "etc", "lib", "lib64", "sbin"):
        path = Path("/") / name
        if path.is_symlink():
            links[str(path)] = os.readlink(path)
        elif path.exists():
            binds[str(path)] = path
    for prefix in {sys.prefix, sys.base_prefix}:
        if not prefix.startswith("/usr"):
            binds[prefix] = Path(prefix)
    return RootFileSystem(None, binds, links, {"PATH": "/opt/bin:/usr/bin:/bin"})

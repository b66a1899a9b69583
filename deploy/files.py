"""`baton files DIR` writes the files that come with Baton, for users to change.

They are container and compose files, manifests, the dashboard, alerts and examples. A
checkout has the same files under the same names.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from protocol.settings.settings import BatonSettings, parse

ROOT = Path(__file__).resolve().parents[1]
# All files of these folders are written, except for the modules of `deploy`, SECRETS
# and Python's caches.
FOLDERS = ("deploy", "examples")
# Files with a cluster's secrets, in a checkout that is in use. They are not written.
SECRETS = (".env", "secret.env")


class FilesSettings(BatonSettings):
    """Writes container files, manifests, dashboard, alerts and examples to a folder."""

    positional: ClassVar[str] = "dir"

    dir: Path | None = Field(
        None, description="folder to write to; it is created if it does not exist"
    )
    force: bool = Field(
        False, description="replace files that exist with other content"
    )


def packaged_files() -> Iterator[Path]:
    """Yields the paths of the files, relative to ROOT."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            is_module = folder == "deploy" and path.suffix == ".py"
            is_private = path.name in SECRETS or "__pycache__" in path.parts
            if path.is_file() and not is_module and not is_private:
                yield path.relative_to(ROOT)


def write_files(target: Path, *, force: bool) -> Iterator[Path]:
    """Writes the files below `target`. Yields the path of each file.

    Args:
        force: Replace files that exist with other content.

    Raises:
        ValueError: A file exists with other content, and `force` is False; or a folder
            exists in place of a file. No file has been written.
        OSError: A file cannot be written.
    """
    names = list(packaged_files())
    folders = [target / name for name in names if (target / name).is_dir()]
    if folders:
        raise ValueError(
            f"{folders[0]} is a folder, not a file: move it away, or give another "
            f"folder than {target}"
        )
    changed = [name for name in names if _differs(ROOT / name, target / name)]
    if changed and not force:
        num_others = len(changed) - 1
        others = ""
        if num_others:
            others = f" and {num_others} other file{'s' if num_others > 1 else ''}"
        raise ValueError(
            f"{target / changed[0]}{others} would be replaced: give another folder, or "
            "--force"
        )
    for name in names:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, path)
        yield path


def _differs(source: Path, target: Path) -> bool:
    """Returns whether `target` exists, with other content than `source`."""
    if not target.exists():
        return False
    return target.read_bytes() != source.read_bytes()


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files and prints their paths. Returns the exit status."""
    settings = parse(FilesSettings, argv, prog="baton files")
    try:
        if settings.dir is None:
            raise ValueError("give the folder to write to: baton files DIR")
        for path in write_files(settings.dir, force=settings.force):
            print(path)
    except (OSError, ValueError) as error:
        print(f"baton files: error: {error}", file=sys.stderr)
        return 1
    return 0

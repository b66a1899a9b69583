"""The environment variables of child processes."""

import contextlib
import os
import sys
from collections.abc import Iterator

import protocol
from protocol.settings.sources import clean_environment

# If this variable is set, Python does not put the working directory on sys.path.
SAFE_PATH = "PYTHONSAFEPATH"


def child_environment() -> dict[str, str]:
    """Returns the environment for another Python process of Baton.

    It has no BATON_* settings. The process imports the same Baton as this one, even if
    its working directory has a model.py, an engine/ or a json.py. The processes that it
    starts inherit that.
    """
    environ = clean_environment(os.environ)
    environ[SAFE_PATH] = "1"
    root = os.path.dirname(os.path.dirname(os.path.abspath(protocol.__file__)))
    # `python -m` in a checkout puts the checkout on sys.path, so the child needs it on
    # PYTHONPATH. A folder of installed packages must not be there: it would precede
    # Python's own library.
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_installed = os.path.basename(root) in ("site-packages", "dist-packages")
    if (
        not is_installed
        and root not in paths
        and root in map(os.path.abspath, sys.path)
    ):
        environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
    return environ


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Keeps processes that multiprocessing starts from importing the working
    directory.
    """
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before

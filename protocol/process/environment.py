"""The environment variables of child processes."""

import contextlib
import os
from collections.abc import Iterator

import protocol
from protocol.settings.sources import clean_environment

# If this variable is set, Python does not put the working directory on sys.path.
SAFE_PATH = "PYTHONSAFEPATH"


def child_environment() -> dict[str, str]:
    """Returns the environment for a child process that runs Baton.

    The environment has no BATON_* settings. The child imports the same Baton as this
    process, even if the working directory has a model.py, an engine/ or a json.py.
    Processes that the child starts inherit these properties.
    """
    environ = clean_environment(os.environ)
    environ[SAFE_PATH] = "1"
    # The folder of Baton's packages is the repository, or the package baton_pd if Baton
    # is installed. No module in this folder has the name of a module of Python.
    root = os.path.dirname(os.path.dirname(os.path.abspath(protocol.__file__)))
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environ["PYTHONPATH"] = os.pathsep.join(
        [root, *(path for path in paths if path != root)]
    )
    return environ


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Prevents processes that multiprocessing starts within the `with` from importing
    modules of their working directory.
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

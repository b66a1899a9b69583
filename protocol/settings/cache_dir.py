"""Where a machine keeps what it makes once: the secret of its cluster, models that it converted."""

import os
from pathlib import Path

_FIX = "set BATON_CACHE to a folder that can be written to"


class CannotKeep(OSError):
    """Says what cannot be kept, where, why, and which variable to set."""

    def __init__(self, what: str, folder: Path, error: OSError, fix: str = _FIX) -> None:
        super().__init__(f"cannot keep {what} in {folder} ({error.strerror}); {fix}")


def cache_dir() -> Path:
    """BATON_CACHE, or ~/.cache/baton.

    Raises:
        OSError: neither is known: a user id without a name and HOME, as containers may have.
    """
    if cache := os.environ.get("BATON_CACHE"):
        return Path(cache)
    try:
        return Path.home() / ".cache" / "baton"
    except RuntimeError as error:
        raise OSError(f"no home directory is known, for its .cache/baton; {_FIX}") from error

"""The secret that the servers of one cluster share: it signs who may read whose KV."""

import os
import secrets
from pathlib import Path

from pydantic import SecretStr


def default_file() -> Path:
    """Where this machine keeps its own secret: in BATON_CACHE, or ~/.cache/baton."""
    cache = os.environ.get("BATON_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "baton") / "cluster-secret"


def cluster_secret(configured: SecretStr | None, file: Path | None = None) -> bytes:
    """The configured secret, else the one in `file`, which the first caller makes.

    Raises:
        OSError: the file can be neither read nor made.
    """
    if configured is not None:
        return configured.get_secret_value().encode()
    path = file or default_file()
    if not path.exists():
        _make(path)
    return path.read_bytes().strip()


def _make(path: Path) -> None:
    """Writes a new secret, readable by this user alone; whoever comes second keeps the first's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(secrets.token_hex(32))
        os.link(draft, path)  # atomic, and fails where a secret is already there
    except FileExistsError:
        pass
    finally:
        draft.unlink()

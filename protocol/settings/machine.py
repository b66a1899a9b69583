"""What a machine, or a container, has to give: cores and memory; and where it keeps what it makes
once: models that it converted, and the secret of its cluster, which signs who may read whose KV."""

import contextlib
import ipaddress
import os
import secrets
from pathlib import Path
from tempfile import NamedTemporaryFile

from pydantic import SecretStr

MIN_SECRET_BYTES = 16
WILDCARDS = ("0.0.0.0", "::")  # to listen on, not to connect to
_FIX = "set BATON_CACHE to a folder that can be written to"
_SECRET_FIX = "set BATON_CLUSTER_SECRET, or BATON_CACHE to a folder of this user's"


class CannotKeep(OSError):
    """Says what cannot be kept, where, why, and which variable to set."""

    def __init__(
        self, what: str, folder: Path, error: OSError, fix: str = _FIX
    ) -> None:
        super().__init__(f"cannot keep {what} in {folder} ({error.strerror}); {fix}")


def cache_dir() -> Path:
    """BATON_CACHE, or ~/.cache/baton. Raises OSError if neither is known, as in some containers."""
    if cache := os.environ.get("BATON_CACHE"):
        return Path(cache)
    try:
        return Path.home() / ".cache" / "baton"
    except RuntimeError as error:
        raise OSError(
            f"no home directory is known, for its .cache/baton; {_FIX}"
        ) from error


def cluster_secret(configured: SecretStr | None, file: Path | None = None) -> bytes:
    """The configured secret, else the one in `file`, which the first caller makes.

    Raises OSError if the file can be neither read nor made, ValueError if its secret is too
    short."""
    if configured is not None:
        return configured.get_secret_value().encode()
    path = file or cache_dir() / "cluster-secret"
    try:
        if not path.exists():
            _make(path)
        secret = path.read_bytes().strip()
    except OSError as error:
        raise CannotKeep(
            "this machine's cluster secret", path.parent, error, _SECRET_FIX
        ) from error
    if len(secret) < MIN_SECRET_BYTES:  # cut off by a full disk, or made by hand
        raise ValueError(
            f"{path} holds a cluster secret of {len(secret)} characters, at least "
            f"{MIN_SECRET_BYTES} are needed: remove it, and the next start makes another"
        )
    return secret


def is_local(address: str) -> bool:
    """Whether only this machine reaches a server that listens at `address`, or calls from it."""
    try:
        found = ipaddress.ip_address(address)
        return (
            getattr(found, "ipv4_mapped", None) or found
        ).is_loopback  # as of --host ::
    except ValueError:
        return address == "localhost"


def check_is_local(address: str, told: str) -> None:
    """Raises ValueError if other machines, whose files hold other secrets, reach a server without a
    configured secret at `address`, which the error calls `told`."""
    if not is_local(address):
        raise ValueError(
            f"{told} lets in other machines, whose servers would have other secrets: "
            "set BATON_CLUSTER_SECRET to the same text for all of them (openssl rand -hex 32)"
        )


def _make(path: Path) -> None:
    """Writes a new secret, readable by this user alone; whoever comes second keeps the first's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent) as draft:
        draft.write(secrets.token_hex(32))
        draft.flush()
        with contextlib.suppress(FileExistsError):
            os.link(
                draft.name, path
            )  # atomic, and fails where a secret is already there


def available_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: its affinity, and the quota of its container."""
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    try:
        quota, period = cgroup.read_text().split()[:2]
        limit = int(quota) / int(period)
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cores or 1
    return max(1, min(cores or 1, int(limit)))


def free_host_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory available to new allocations on this host and in this container, in bytes.

    Args:
        cgroup: where the files of this container's control group (version 2) are.
    """
    facts = dict(
        line.split(":") for line in Path("/proc/meminfo").read_text().splitlines()
    )
    free = int(facts["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(
            line.split() for line in (cgroup / "memory.stat").read_text().splitlines()
        )
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    return min(free, max(0, limit - used + int(stat.get("inactive_file", 0))))

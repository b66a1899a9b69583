"""Facts about this machine or container: its cores, memory, caches and cluster secret.

The caches store files that take a long time to create, such as converted models.
Servers use the cluster secret to sign the messages that grant access to KV.
"""

import contextlib
import ipaddress
import os
import secrets
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

from pydantic import SecretStr

MIN_SECRET_BYTES = 16
# A server can listen on these addresses, but other machines cannot connect to them.
WILDCARDS = ("0.0.0.0", "::")
_FIX = "set BATON_CACHE to a writable folder"
_SECRET_FIX = (
    "set BATON_CLUSTER_SECRET, or set BATON_CACHE to a folder that this user can read "
    "and write"
)


class CannotStore(OSError):
    """A file cannot be stored. The message has the folder, the reason and the fix.

    Args:
        what: Description of the file, such as "a converted model".
    """

    def __init__(
        self, what: str, folder: Path, error: OSError, fix: str = _FIX
    ) -> None:
        super().__init__(f"cannot store {what} in {folder} ({error.strerror}); {fix}")


def cache_dir() -> Path:
    """Returns the folder for caches: BATON_CACHE, else ~/.cache/baton.

    Raises:
        OSError: BATON_CACHE is not set and the user has no home directory, as in some
            containers.
    """
    if cache := os.environ.get("BATON_CACHE"):
        return Path(cache)
    try:
        return Path.home() / ".cache" / "baton"
    except RuntimeError as error:
        raise OSError(
            f"no home directory is known for the cache folder .cache/baton; {_FIX}"
        ) from error


def cluster_secret(configured: SecretStr | None, file: Path | None = None) -> bytes:
    """Returns the configured secret, else the secret in a file.

    If the file does not exist, it is created with a random secret.

    Args:
        file: Path of the file; None: `cluster-secret` in the folder for caches.

    Raises:
        OSError: The file cannot be read or created.
        ValueError: The secret in the file is too short.
    """
    if configured is not None:
        return configured.get_secret_value().encode()
    path = file or cache_dir() / "cluster-secret"
    try:
        if not path.exists():
            _create_secret(path)
        secret = path.read_bytes().strip()
    except OSError as error:
        raise CannotStore(
            "this machine's cluster secret", path.parent, error, _SECRET_FIX
        ) from error
    # A file that a user has written, or that a crash has truncated, may hold a secret
    # that is too short.
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{path} holds a cluster secret of {len(secret)} characters, but the "
            f"minimum is {MIN_SECRET_BYTES}; remove the file, and the next start "
            "creates a new secret"
        )
    return secret


def is_local(address: str) -> bool:
    """Returns whether `address` is "localhost" or a loopback IP address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    # A server with --host :: sees IPv4 clients at IPv4-mapped addresses.
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def check_is_local(address: str, setting: str) -> None:
    """Raises ValueError unless `address` is local; see `is_local`.

    The settings of a server without a configured secret call this function. Servers on
    other machines would not have the secret in this machine's file.

    Args:
        setting: The setting with the address as the user wrote it, for the message.
    """
    if not is_local(address):
        raise ValueError(
            f"{setting} accepts connections from other machines, and servers on "
            "different machines need a configured secret: set BATON_CLUSTER_SECRET to "
            "the same text for all servers (openssl rand -hex 32)"
        )


def _create_secret(path: Path) -> None:
    """Creates a file with a new secret that only this user can read.

    If a different process creates the file at the same time, that file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent) as draft:
        draft.write(secrets.token_hex(32))
        draft.flush()
        with contextlib.suppress(FileExistsError):
            # Linking is atomic, and fails if the file exists by now.
            os.link(draft.name, path)


def available_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the number of cores that this process may use.

    The number is limited by the CPU affinity of the process, and by the CPU quota of
    its container.

    Args:
        cgroup: File with the quota (cgroup version 2).
    """
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()[:2]
        limit = int(quota) / int(period)
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return cores or 1
    return max(1, min(cores or 1, int(limit)))


def free_host_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the memory available to new allocations in this container, in bytes.

    Args:
        cgroup: Folder of this container's control group (cgroup version 2).
    """
    meminfo = Path("/proc/meminfo").read_text()
    facts = dict(line.split(":") for line in meminfo.splitlines())
    free = int(facts["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat_lines = (cgroup / "memory.stat").read_text().splitlines()
        stat = dict(line.split() for line in stat_lines)
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    return min(free, max(0, limit - used + int(stat.get("inactive_file", 0))))


def has_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU. This does not load torch."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and b"GPU" in listing.stdout

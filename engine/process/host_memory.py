"""The memory of this machine or container. No torch here."""

from pathlib import Path


def free_host_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory available to new allocations on this host and in this container, in bytes.

    Args:
        cgroup: where the files of this container's control group (version 2) are.
    """
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    return min(free, max(0, limit - used + int(stat.get("inactive_file", 0))))

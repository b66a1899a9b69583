"""How many CPU cores a process may use."""

import os
from pathlib import Path


def available_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = cgroup.read_text().split()[:2]
        limit = int(quota) / int(period)
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cores or 1
    return max(1, min(cores or 1, int(limit)))

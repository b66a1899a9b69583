"""What this machine has to move KV between servers."""

import importlib.util
import os
import resource
import shutil
from dataclasses import dataclass
from importlib import metadata
from itertools import permutations
from pathlib import Path

import torch


@dataclass(frozen=True)
class Host:
    """What is there."""

    cores: int
    gpus: tuple[str, ...]
    peer_access: tuple[tuple[int, int], ...]  # (reads, from), all pairs that can
    packages: dict[str, str | None]  # versions; None: not installed
    ucx_modules: tuple[str, ...]  # that NIXL brings
    ucx_environment: dict[str, str]
    shm_bytes: int
    memlock_bytes: int  # -1: unlimited
    can_read_peers: bool  # memory of this user's other processes: what mapping on a CPU needs
    rdma_devices: tuple[str, ...] = ()  # of this host
    rdma_usable: bool = False  # their device files are here too, as in a container they may not be


def look() -> Host:
    gpus = range(torch.cuda.device_count())
    pairs, can_read = permutations(gpus, 2), torch.cuda.can_device_access_peer
    installed = {each.name: each.version for each in metadata.distributions()}
    names = ("nixl", "triton", "flashinfer-python", "torch")
    return Host(
        cores=len(os.sched_getaffinity(0)),
        gpus=tuple(torch.cuda.get_device_name(index) for index in gpus),
        peer_access=tuple(pair for pair in pairs if can_read(*pair)),
        packages={name: installed.get(name) for name in names},
        ucx_modules=_ucx_modules(),
        ucx_environment={k: v for k, v in os.environ.items() if k.startswith("UCX_")},
        shm_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0,
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        can_read_peers=_ptrace_scope() < 2,
        rdma_devices=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
        rdma_usable=any(Path("/dev/infiniband").glob("uverbs*")),
    )


def _ucx_modules() -> tuple[str, ...]:
    """Transports beside the built-in ones, by the files that NIXL brings."""
    spec = importlib.util.find_spec("nixl")
    if spec is None or spec.origin is None:
        return ()
    site = Path(spec.origin).parents[1]
    found = {path.name.split(".")[0] for path in site.glob("*nixl*.libs/**/libuct_*.so*")}
    return tuple(sorted(name.removeprefix("libuct_").split("-")[0] for name in found))


def _ptrace_scope() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0

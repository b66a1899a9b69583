"""Which transports this machine has, and with which one UCX really reads, as it says itself.

UCX chooses a protocol for each pair of memory kinds when they are first read between, and prints
the choice if asked to (UCX_PROTO_INFO), for reads as a table of four lines:

    | doctor-d-df28639e26 intra-node cfg#1                             |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | Range  | Description | Config                                    |
    | 0..inf | zero-copy   | cma/memory                                |

It prints into memory of this process, so that no terminal fills and no file stays. UCX's warnings
and errors go there as well.
"""

import ctypes
import importlib.util
import os
import re
import resource
import shutil
import threading
from dataclasses import dataclass
from importlib import metadata
from itertools import permutations
from pathlib import Path

import torch

from protocol.process.logging import get_logger

logger = get_logger(__name__)

_PREFIX = re.compile(r"^\[\d+\.\d+\]\s+\[[^\]]*\]\s*")
_TITLE = re.compile(
    r"remote memory read by ucp_get\S*.* into (?P<local>.+) from (?P<remote>.+)"
)
_RANGE = re.compile(r"^\d\S*\.\.\S+$")
_CONFIGURATION = re.compile(r"(?P<where>self|intra-node|inter-node) cfg#\d+")
_GIVE_BACK = 0x1 | 0x2  # of fallocate: a part of a file, whose size stays
_RDMA = (
    "rc",
    "dc",
    "ud",
    "srd",
    "gga",
)  # of verbs and EFA, whatever follows: rc_mlx5, dc_x

GPU_FIX = (
    "Let both servers see both GPUs (no CUDA_VISIBLE_DEVICES that hides one; containers of one "
    "IPC namespace, ipc: host), leave cuda_ipc in UCX_TLS, keep PYTORCH_CUDA_ALLOC_CONF free of "
    "expandable_segments, and see whether `nvidia-smi topo -p2p r` says OK; on one host "
    "--transfer auto needs no UCX."
)
RDMA_FIX = (
    "Fix: leave rc in UCX_TLS and its device in UCX_NET_DEVICES, raise `ulimit -l` to unlimited, "
    "give containers /dev/infiniband; for GPU memory load nvidia_peermem."
)
HOST_FIX = (
    "Fix: leave cma and shm in UCX_TLS, run both servers as one user, give containers one PID and "
    "IPC namespace and CAP_SYS_PTRACE, set kernel.yama.ptrace_scope to 0 or 1."
)


@dataclass(frozen=True)
class UcxRead:
    """By what UCX reads between two kinds of memory."""

    local: str  # memory, in UCX's words
    remote: str
    where: str  # "self" | "intra-node" | "inter-node" | "" where it does not say
    how: str  # "zero-copy", "software emulation", ..
    transport: str  # of the longest reads: "cma/memory", "cuda_ipc/cuda", "rc_mlx5/mlx5_0:1", ..

    def __str__(self) -> str:
        return f"{self.transport} ({self.how})"

    def warning(self) -> str | None:
        """What is wrong with it and the fix, where the machine has something faster."""
        names = re.findall(r"([a-z][a-z0-9_]*)/", self.transport)
        between_gpus = "cuda" in self.local and "cuda" in self.remote
        uses_rdma = any(name.split("_")[0] in _RDMA for name in names)
        if between_gpus and "cuda_ipc" not in names and not uses_rdma:
            fix = RDMA_FIX if self.where == "inter-node" else GPU_FIX
            if self.where != "inter-node" or has_rdma():
                return f"UCX reads between GPUs by {self}, through host memory. {fix}"
        if "tcp" in names and self.where == "intra-node" and not between_gpus:
            return f"UCX reads between processes of one host by {self}. {HOST_FIX}"
        if "tcp" in names and has_rdma():
            return f"UCX reads by {self} though there are RDMA devices. {RDMA_FIX}"
        return None


def has_rdma() -> bool:
    """There are InfiniBand, RoCE or EFA devices."""
    return any(Path("/sys/class/infiniband").glob("*"))


def parse(text: str) -> list[UcxRead]:
    """Every table about reads, in order; what is no such table is skipped."""
    found: list[UcxRead] = []
    where, title, row = "", None, None
    for line in text.splitlines():
        cells = [
            cell.strip() for cell in _PREFIX.sub("", line).strip().strip("|").split("|")
        ]
        if match := _CONFIGURATION.search(cells[0]):
            where = match["where"]
        if " by ucp_" in cells[0]:
            title, row = _TITLE.search(cells[0]), None
        elif title is not None and len(cells) >= 3 and _RANGE.match(cells[-3]):
            if row is not None:
                found.pop()  # of shorter reads
            row = UcxRead(title["local"], title["remote"], where, cells[-2], cells[-1])
            found.append(row)
    return found


def other_lines(text: str) -> list[str]:
    """Warnings and errors."""
    return [
        line
        for line in text.splitlines()
        if re.search(r"UCX +(WARN|ERROR|FATAL)", line)
    ]


class UcxLog:
    """UCX's log of this process, kept in memory."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._seen = 0
        self._reads: dict[
            tuple[bool, bool], UcxRead
        ] = {}  # the latest, by whether GPUs' memory
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Called before UCX is loaded. Does nothing where somebody has said where its log goes."""
        inherited = os.environ.get("UCX_LOG_FILE", "")
        if inherited and not re.fullmatch(r"/proc/\d+/fd/\d+", inherited):
            return
        self._fd = os.memfd_create("ucx-log")
        os.environ["UCX_LOG_FILE"] = f"/proc/{os.getpid()}/fd/{self._fd}"
        os.environ.setdefault("UCX_PROTO_INFO", "*get*")

    def look(self) -> None:
        """Takes in what UCX has printed, which takes no memory any more; its warnings and errors
        are logged."""
        if self._fd is None:
            return
        libc = ctypes.CDLL(None)
        libc.fflush(None)  # UCX writes through C's buffers
        with self._lock:
            size = os.fstat(self._fd).st_size
            text = os.pread(self._fd, max(size - self._seen, 0), self._seen)
            whole = text[: text.rfind(b"\n") + 1]
            self._seen += len(whole)
            lines = whole.decode(errors="replace")
            self._reads |= {
                ("cuda" in r.local, "cuda" in r.remote): r for r in parse(lines)
            }
            libc.fallocate(self._fd, _GIVE_BACK, *map(ctypes.c_long, (0, self._seen)))
        for line in other_lines(lines):
            logger.warning("%s", line)

    def read_between(self, *, gpu_here: bool, gpu_there: bool) -> UcxRead | None:
        """The latest choice for these kinds of memory; None where UCX has not said one."""
        self.look()
        return self._reads.get((gpu_here, gpu_there))


ucx_log = UcxLog()


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
    can_read_peers: (
        bool  # memory of this user's other processes: what mapping on a CPU needs
    )
    rdma_devices: tuple[str, ...] = ()  # of this host
    rdma_usable: bool = (
        False  # their device files are here too, as in a container they may not be
    )


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
        shm_bytes=shutil.disk_usage("/dev/shm").free
        if Path("/dev/shm").exists()
        else 0,
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        can_read_peers=_ptrace_scope() < 2,
        rdma_devices=tuple(
            sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
        ),
        rdma_usable=any(Path("/dev/infiniband").glob("uverbs*")),
    )


def _ucx_modules() -> tuple[str, ...]:
    """Transports beside the built-in ones, by the files that NIXL brings."""
    spec = importlib.util.find_spec("nixl")
    if spec is None or spec.origin is None:
        return ()
    site = Path(spec.origin).parents[1]
    found = {
        path.name.split(".")[0] for path in site.glob("*nixl*.libs/**/libuct_*.so*")
    }
    return tuple(sorted(name.removeprefix("libuct_").split("-")[0] for name in found))


def _ptrace_scope() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0

"""Finds out which transports this machine has, and which transport UCX uses for READs.

A READ is a one-sided read of a peer's memory. UCX chooses a protocol for each pair of
memory kinds (host or GPU) at the first READ from one kind into the other. If
UCX_PROTO_INFO is set, UCX prints the choice as a table, for example:

    | doctor-d-df28639e26 intra-node cfg#1                             |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | Range  | Description | Config                                    |
    | 0..inf | zero-copy   | cma/memory                                |

UcxLog redirects UCX's output to a memory file of this process. So the tables do not
fill the terminal, and no file on disk remains. The output includes UCX's warnings and
errors.
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
# FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE: fallocate frees a part of a file and keeps
# the file's size.
_PUNCH_HOLE = 0x1 | 0x2
# The first parts of the names of RDMA transports (verbs and EFA), such as rc_mlx5.
_RDMA = ("rc", "dc", "ud", "srd", "gga")

GPU_FIX = (
    "Let both servers see both GPUs (no CUDA_VISIBLE_DEVICES that hides one; "
    "containers of one IPC namespace, ipc: host), leave cuda_ipc in UCX_TLS, keep "
    "PYTORCH_CUDA_ALLOC_CONF free of expandable_segments, and check that `nvidia-smi "
    "topo -p2p r` prints OK; on one host --transfer auto needs no UCX."
)
RDMA_FIX = (
    "Fix: leave rc in UCX_TLS and an RDMA device in UCX_NET_DEVICES, raise `ulimit -l` "
    "to unlimited, give containers /dev/infiniband; for GPU memory load nvidia_peermem."
)
HOST_FIX = (
    "Fix: leave cma and shm in UCX_TLS, run both servers as one user, give containers "
    "one PID and IPC namespace and CAP_SYS_PTRACE, set kernel.yama.ptrace_scope to 0 "
    "or 1."
)


@dataclass(frozen=True)
class UcxRead:
    """The protocol and the transport by which UCX reads between two kinds of memory.

    Attributes:
        local, remote: The kinds of memory, in UCX's words.
        where: "self", "intra-node", "inter-node", or "" if UCX did not report it.
        how: The protocol, such as "zero-copy" or "software emulation".
        transport: The transport for the longest READs, such as "cma/memory",
            "cuda_ipc/cuda" or "rc_mlx5/mlx5_0:1".
    """

    local: str
    remote: str
    where: str
    how: str
    transport: str

    def __str__(self) -> str:
        return f"{self.transport} ({self.how})"

    def warning(self) -> str | None:
        """A warning with the fix if a faster transport is expected; otherwise None.

        Within a host, TCP is slow, and so are copies between GPUs through host memory.
        Between hosts, both count as slow only if this machine has RDMA devices.
        """
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
            return f"UCX reads by {self} although there are RDMA devices. {RDMA_FIX}"
        return None


def has_rdma() -> bool:
    """Whether there are InfiniBand, RoCE or EFA devices."""
    return any(Path("/sys/class/infiniband").glob("*"))


def parse_reads(text: str) -> list[UcxRead]:
    """Returns the last row of each table about READs in UCX's output, in order.

    The last row is about the longest READs.
    """
    reads: list[UcxRead] = []
    where = ""
    title = None
    is_first_row = True
    for line in text.splitlines():
        row = _PREFIX.sub("", line).strip().strip("|")
        cells = [cell.strip() for cell in row.split("|")]
        configuration = _CONFIGURATION.search(cells[0])
        if configuration:
            where = configuration["where"]
        if " by ucp_" in cells[0]:
            title = _TITLE.search(cells[0])
            is_first_row = True
        elif title is not None and len(cells) >= 3 and _RANGE.match(cells[-3]):
            if not is_first_row:
                reads.pop()  # the previous row of the table is for shorter READs
            is_first_row = False
            reads.append(
                UcxRead(
                    local=title["local"],
                    remote=title["remote"],
                    where=where,
                    how=cells[-2],
                    transport=cells[-1],
                )
            )
    return reads


def warning_lines(text: str) -> list[str]:
    """The warnings and errors in UCX's output."""
    return [
        line
        for line in text.splitlines()
        if re.search(r"UCX +(WARN|ERROR|FATAL)", line)
    ]


class UcxLog:
    """Collects UCX's log of this process in a memory file, and parses it."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._num_parsed_bytes = 0
        # UCX's latest choices, by (local memory is on a GPU, remote memory is on a
        # GPU).
        self._reads: dict[tuple[bool, bool], UcxRead] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Redirects UCX's log; must be called before UCX is loaded.

        Sets UCX_LOG_FILE and UCX_PROTO_INFO. Does nothing if the operator has set
        UCX_LOG_FILE.
        """
        log_file = os.environ.get("UCX_LOG_FILE", "")
        # A parent process may have set the variable to its own memory file.
        if log_file and not re.fullmatch(r"/proc/\d+/fd/\d+", log_file):
            return
        self._fd = os.memfd_create("ucx-log")
        os.environ["UCX_LOG_FILE"] = f"/proc/{os.getpid()}/fd/{self._fd}"
        os.environ.setdefault("UCX_PROTO_INFO", "*get*")

    def update(self) -> None:
        """Parses UCX's new output, and logs UCX's warnings and errors.

        The parsed part of the memory file is freed.
        """
        if self._fd is None:
            return
        libc = ctypes.CDLL(None)
        libc.fflush(None)  # UCX's output may still be in buffers of the C library
        with self._lock:
            size = os.fstat(self._fd).st_size
            num_new = max(size - self._num_parsed_bytes, 0)
            text = os.pread(self._fd, num_new, self._num_parsed_bytes)
            complete_lines = text[: text.rfind(b"\n") + 1]
            self._num_parsed_bytes += len(complete_lines)
            lines = complete_lines.decode(errors="replace")
            for read in parse_reads(lines):
                self._reads["cuda" in read.local, "cuda" in read.remote] = read
            libc.fallocate(
                self._fd,
                _PUNCH_HOLE,
                ctypes.c_long(0),
                ctypes.c_long(self._num_parsed_bytes),
            )
        for line in warning_lines(lines):
            logger.warning("%s", line)

    def read_between(self, *, gpu_here: bool, gpu_there: bool) -> UcxRead | None:
        """UCX's latest choice for two kinds of memory; None if not reported yet.

        Reads UCX's new output first (`update`).

        Args:
            gpu_here: The local memory is on a GPU.
            gpu_there: The remote memory is on a GPU.
        """
        self.update()
        return self._reads.get((gpu_here, gpu_there))


ucx_log = UcxLog()


@dataclass(frozen=True)
class Host:
    """The devices, packages, limits and permissions of this machine.

    Attributes:
        peer_access: Pairs (reader, source) of GPUs: the reader can access the memory of
            the source.
        packages: The version of each package; None: not installed.
        ucx_modules: The UCX transports that NIXL's wheel contains.
        ucx_environment: The UCX_ variables of this process.
        shm_bytes: Free bytes of /dev/shm.
        memlock_bytes: Limit of locked memory (`ulimit -l`); -1: unlimited.
        can_read_peers: kernel.yama.ptrace_scope is at most 1, so this process is
            expected to be able to map the memory of processes of the same user.
        rdma_usable: /dev/infiniband has device files. In a container, the files may be
            missing although the host has RDMA devices.
    """

    cores: int
    gpus: tuple[str, ...]
    peer_access: tuple[tuple[int, int], ...]
    packages: dict[str, str | None]
    ucx_modules: tuple[str, ...]
    ucx_environment: dict[str, str]
    shm_bytes: int
    memlock_bytes: int
    can_read_peers: bool
    rdma_devices: tuple[str, ...] = ()
    rdma_usable: bool = False


def inspect_host() -> Host:
    """Collects the facts about this machine."""
    gpus = range(torch.cuda.device_count())
    peer_access = [
        (reader, source)
        for reader, source in permutations(gpus, 2)
        if torch.cuda.can_device_access_peer(reader, source)
    ]
    installed = {package.name: package.version for package in metadata.distributions()}
    names = ("nixl", "triton", "flashinfer-python", "torch")
    environment = {
        name: value for name, value in os.environ.items() if name.startswith("UCX_")
    }
    shm = Path("/dev/shm")
    rdma_devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    return Host(
        cores=len(os.sched_getaffinity(0)),
        gpus=tuple(torch.cuda.get_device_name(index) for index in gpus),
        peer_access=tuple(peer_access),
        packages={name: installed.get(name) for name in names},
        ucx_modules=_ucx_modules(),
        ucx_environment=environment,
        shm_bytes=shutil.disk_usage(shm).free if shm.exists() else 0,
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        can_read_peers=_ptrace_scope() < 2,
        rdma_devices=tuple(rdma_devices),
        rdma_usable=any(Path("/dev/infiniband").glob("uverbs*")),
    )


def _ucx_modules() -> tuple[str, ...]:
    """Names of the UCX transports that NIXL's wheel contains, one library for each."""
    spec = importlib.util.find_spec("nixl")
    if spec is None or spec.origin is None:
        return ()
    site = Path(spec.origin).parents[1]
    files = site.glob("*nixl*.libs/**/libuct_*.so*")
    stems = {path.name.split(".")[0] for path in files}
    return tuple(sorted(stem.removeprefix("libuct_").split("-")[0] for stem in stems))


def _ptrace_scope() -> int:
    """The value of the Linux setting kernel.yama.ptrace_scope; 0 without Yama.

    Above 1, a process without CAP_SYS_PTRACE may not attach to any other process.
    """
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0

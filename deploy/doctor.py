"""`baton doctor`: how fast KV moves between servers of this machine, and what is
missing.

It creates KV and pulls it between two devices, by every path that servers have. It
needs no model and no running server.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

from pydantic import Field

from kvcache.transports import GPU_FIX, Host, UcxRead, inspect_host, ucx_log
from protocol.process.environment import safe_path
from protocol.settings.options import DecodeOptions
from protocol.settings.settings import BatonSettings, parse

_BLOCK_TOKENS = 64
_SIZES = (8, 8, 64)  # layers, KV heads, elements of a head
# NVLink, and GPUs at one PCIe switch, are faster. A copy through host memory is slower.
_SLOW_GPU_BYTES_PER_S = 15e9
_GPU_BYTES = 1 << 30  # large enough to make the time of the fence negligible
_MIN_SHM_BYTES = 64 << 20
_MIN_MEMLOCK_BYTES = 64 << 30  # RDMA locks the whole KV pool in memory


class DoctorSettings(BatonSettings):
    """How fast KV moves between servers of this machine, and what is missing."""

    measure: bool = Field(
        True, description="measure transfers, not only inspect the host"
    )
    nbytes: int = Field(
        64 << 20, ge=1 << 20, le=1 << 34, description="size of each transfer (bytes)"
    )
    as_json: bool = Field(False, description="print one JSON line instead of text")


@dataclass(frozen=True)
class Link:
    """A path from one device to another; `bytes_per_s` is None if it does not work."""

    path: str  # "mapped" | "nixl"
    source: str
    target: str
    bytes_per_s: float | None
    reason: str = ""
    # The method of reading that UCX reports, if it reports one.
    way: UcxRead | None = None


def measure(path: str, source: str, target: str, nbytes: int) -> Link:
    """Pulls about `nbytes` from another process four times. Returns the best result.

    Args:
        path: "mapped" or "nixl".
        source: torch device of the other process, which owns the KV.
        target: torch device of this process.
    """
    try:
        from benchmarks import transfer_pair as pair  # loads UCX

        blocks = -(-nbytes // pair.Size(*_SIZES, _BLOCK_TOKENS).kv_bytes)
        size = pair.Size(*_SIZES, blocks * _BLOCK_TOKENS)
        side = pair.Side("BHLCND", 1, _BLOCK_TOKENS, seed=1, scattered=False)
        setup = pair.Setup(size, (target,), mapped=path == "mapped", staging_bytes=0)
        with safe_path(), closing(pair.Remote(pair.Prefill, source, size)) as prefill:
            prefill.call("open", side)
            with closing(pair.Decode(prefill, side, setup)) as decode:
                decode.connect()
                seconds = min(decode.pull(size.tokens).seconds for _ in range(4))
                decode.check()
                gpus = {"gpu_here": target != "cpu", "gpu_there": source != "cpu"}
                way = None if setup.mapped else ucx_log.read_between(**gpus)
    except Exception as error:  # the user needs to see any reason
        return Link(path, source, target, None, str(error) or repr(error))
    return Link(path, source, target, size.kv_bytes / seconds, way=way)


def links(host: Host, nbytes: int) -> list[Link]:
    """Measures all paths between the devices that servers would use.

    These are two GPUs, else one GPU twice, else the CPU.
    """
    min_bytes = _GPU_BYTES if host.gpus else 0
    devices = [f"cuda:{index}" for index in range(len(host.gpus))]
    if not devices:
        devices = ["cpu"]
    source, target = devices[0], devices[1 % len(devices)]
    return [
        measure(path, source, target, max(nbytes, min_bytes))
        for path in ("mapped", "nixl")
    ]


def advice(host: Host, measured_links: Sequence[Link]) -> list[str]:
    """Returns what the user should change, each with the fix."""
    gpus = host.gpus
    versions = host.packages
    rdma = ", ".join(host.rdma_devices)
    tls = host.ucx_environment.get("UCX_TLS", "all")
    memlock = host.memlock_bytes
    shm = f"/dev/shm has {host.shm_bytes >> 20} MiB left"
    notes: dict[str, object] = {
        "NIXL is not installed: no KV moves between hosts. Fix: pip install nixl.":
            not versions["nixl"],
        "Triton is not installed: no mapped path. Fix: pip install triton.":
            gpus and not versions["triton"],
        "FlashInfer is not installed. Fix: pip install flashinfer-python.":
            gpus and not versions["flashinfer-python"],
        f"No GPU can read another's memory. {GPU_FIX}":
            len(gpus) > 1 and not host.peer_access,
        f"UCX_TLS={tls} leaves out cuda_ipc and cuda_copy. Fix: unset UCX_TLS.":
            gpus and tls != "all" and "cuda" not in tls,
        "kernel.yama.ptrace_scope is above 1: servers cannot map each other's memory. "
        "Fix: sysctl kernel.yama.ptrace_scope=1, or --transfer nixl.":
            not gpus and not host.can_read_peers,
        f"{shm}; NCCL and UCX want more. Fix: in compose, shm_size: 1gb or ipc: host.":
            host.shm_bytes < _MIN_SHM_BYTES,
        f"This host has RDMA devices ({rdma}) and /dev/infiniband is not here: KV "
        "moves "
        "over TCP between hosts. Fix: in compose, devices: /dev/infiniband.":
            rdma and not host.rdma_usable,
        f"RDMA ({rdma}) locks the KV pool in memory, and {memlock >> 20} MiB may be "
        "locked. Fix: ulimit -l unlimited; in compose, ulimits: memlock: -1.":
            rdma and host.rdma_usable and 0 <= memlock < _MIN_MEMLOCK_BYTES,
    }  # fmt: skip
    of_links = (_judged(link)[1] for link in measured_links)
    return [*(note for note, holds in notes.items() if holds), *filter(None, of_links)]


def _judged(link: Link) -> tuple[str, str | None]:
    """Returns how fast a link is, and what the user should change."""
    way = f"{link.path}, {link.source} to {link.target}"
    slow = None
    if link.bytes_per_s is None:
        return "does not work", f"{way}: {link.reason}"
    rate = f"{link.bytes_per_s / 1e9:.2f} GB/s"
    if link.way is not None:
        warning = link.way.warning()
        return f"{rate} by {link.way}", warning and f"{warning} It was {rate}."
    if link.source != link.target and link.bytes_per_s < _SLOW_GPU_BYTES_PER_S:
        slow = f"{way}: {rate} goes through host memory. {GPU_FIX}"
    silent = "; UCX does not report its method, so judge by the rate"
    if link.path == "mapped":
        silent = ""
    return rate + silent, slow


def used(transfer: str, measured_links: Sequence[Link]) -> str:
    """Returns the path that `--transfer auto` or `nixl` uses on this machine."""
    wanted = ("mapped", "nixl") if transfer == "auto" else ("nixl",)
    works = (
        link.path
        for link in measured_links
        if link.path in wanted and link.bytes_per_s is not None
    )
    return next(works, "nothing: every pull would fail and be computed again")


def text(host: Host, measured_links: Sequence[Link], notes: Sequence[str]) -> str:
    """Returns the report as text."""
    pairs = len(host.gpus) * (len(host.gpus) - 1)
    installed = (
        f"{name} {version or 'not installed'}"
        for name, version in host.packages.items()
    )
    memlock = (
        "unlimited" if host.memlock_bytes < 0 else f"{host.memlock_bytes >> 20} MiB"
    )
    default = DecodeOptions().transfer_for("cuda" if host.gpus else "cpu")
    lines = [
        f"{host.cores} cores, GPUs: {', '.join(host.gpus) or 'none'}",
        pairs and f"peer access: {len(host.peer_access)} of {pairs} pairs",
        "packages: " + ", ".join(installed),
        f"UCX modules: {', '.join(host.ucx_modules) or 'the built-in ones only'}",
        host.rdma_devices and f"RDMA devices: {', '.join(host.rdma_devices)}",
        f"/dev/shm: {host.shm_bytes >> 20} MiB, locked memory: {memlock}",
        *(
            f"{link.path:7} {link.source} -> {link.target}: {_judged(link)[0]}"
            for link in measured_links
        ),
        measured_links
        and f"--transfer {default} (the default here) uses: "
        f"{used(default, measured_links)}",
        *([f"WARNING: {note}" for note in notes] or ["nothing needs fixing"]),
    ]
    return "\n".join(str(line) for line in lines if line)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. Returns the exit status: 1 if no KV could move at all."""
    settings = parse(DoctorSettings, argv, prog="baton doctor")
    host = inspect_host()
    measured_links = links(host, settings.nbytes) if settings.measure else []
    notes = advice(host, measured_links)
    report = {
        "host": asdict(host),
        "links": [asdict(link) for link in measured_links],
        "notes": notes,
    }
    print(json.dumps(report) if settings.as_json else text(host, measured_links, notes))
    return (
        1
        if measured_links and all(link.bytes_per_s is None for link in measured_links)
        else 0
    )

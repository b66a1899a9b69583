"""`baton doctor`: how KV would move between servers of this machine, how fast, and what is missing.

Measures every way between two devices once, with bytes that it makes itself; needs no model and no
running server.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from pydantic import Field

from kvcache.transfer.link_log import SLOW_GPU_BYTES_PER_S, SLOW_GPU_FIX
from kvcache.transfer.transports import Host, Link, look, measure
from kvcache.transfer.ucx_log import has_rdma
from protocol.settings.settings import BatonSettings, DecodeOptions, parse

_MIN_SHM_BYTES = 64 << 20
_NVLINK_BYTES = 256 << 20
_MIN_MEMLOCK_BYTES = 64 << 30  # with RDMA the whole KV pool is locked


class DoctorSettings(BatonSettings):
    """How KV would move between servers of this machine, how fast, and what is missing."""

    measure: bool = Field(True, description="move bytes; otherwise only look")
    nbytes: int = Field(
        64 << 20, ge=1 << 20, le=1 << 34, description="to move on each path (bytes)"
    )
    as_json: bool = Field(False, description="print one JSON line instead of text")


def links(host: Host, nbytes: int) -> list[Link]:
    """All ways between the devices that servers would use, measured: two GPUs, else one GPU with
    itself, else the CPU."""
    pair = ("cpu", "cpu")
    if host.gpus:
        pair = ("cuda:0", "cuda:1" if len(host.gpus) > 1 else "cuda:0")
        nbytes = max(nbytes, _NVLINK_BYTES)
    return [measure(path, *pair, nbytes) for path in ("mapped", "nixl")]


def advice(host: Host, found: Sequence[Link]) -> list[str]:
    """What should be changed, each with its fix."""
    notes = []
    if host.packages["nixl"] is None:
        notes.append("NIXL is not installed: no KV moves between hosts. Fix: pip install nixl.")
    if host.gpus and host.packages["triton"] is None:
        notes.append("Triton is not installed: no mapped path. Fix: pip install triton.")
    if host.gpus and host.packages["flashinfer-python"] is None:
        notes.append("FlashInfer is not installed. Fix: pip install flashinfer-python.")
    if len(host.gpus) > 1 and not host.peer_access:
        notes.append(f"No GPU can read another's memory. {SLOW_GPU_FIX}")
    tls = host.ucx_environment.get("UCX_TLS", "all")
    if host.gpus and tls != "all" and "cuda" not in tls:
        notes.append(f"UCX_TLS={tls} leaves out cuda_ipc and cuda_copy. Fix: unset UCX_TLS.")
    if not host.gpus and not host.can_read_peers:
        notes.append(
            "kernel.yama.ptrace_scope is above 1: servers cannot map each other's memory. Fix: "
            "sysctl kernel.yama.ptrace_scope=1, or --transfer nixl."
        )
    if host.shm_bytes < _MIN_SHM_BYTES:
        notes.append(
            f"/dev/shm has {host.shm_bytes >> 20} MiB left; NCCL and UCX want more. Fix: in "
            "compose, shm_size: 1gb or ipc: host."
        )
    return notes + _advice_on_rdma(host) + _advice_on_links(host, found)


def _advice_on_rdma(host: Host) -> list[str]:
    if not host.rdma_devices:
        return []
    names = ", ".join(host.rdma_devices)
    if not host.rdma_usable:
        return [
            f"This host has RDMA devices ({names}) and /dev/infiniband is not here: KV moves over "
            "TCP between hosts. Fix: in compose, devices: /dev/infiniband."
        ]
    if 0 <= host.memlock_bytes < _MIN_MEMLOCK_BYTES:
        return [
            f"RDMA ({names}) locks the KV pool in memory, and {host.memlock_bytes >> 20} MiB may "
            "be locked. Fix: ulimit -l unlimited; in compose, ulimits: memlock: -1."
        ]
    return []


def _advice_on_links(host: Host, found: Sequence[Link]) -> list[str]:
    notes = []
    for link in found:
        if link.bytes_per_s is None:
            notes.append(f"{link.path}, {link.source} to {link.target}: {link.reason}")
        elif link.way is not None:
            warning = link.way.warning(has_rdma=has_rdma())
            if warning is not None:
                notes.append(f"{warning} It was {link.bytes_per_s / 1e9:.1f} GB/s.")
        elif link.source != link.target and link.bytes_per_s < SLOW_GPU_BYTES_PER_S:
            rate = f"{link.bytes_per_s / 1e9:.1f} GB/s"
            notes.append(
                f"{link.path}, {link.source} to {link.target}: {rate} goes through host memory. "
                f"{SLOW_GPU_FIX}"
            )
    return notes


def used(transfer: str, found: Sequence[Link]) -> str:
    """What `--transfer auto` or `nixl` takes on this machine."""
    works = [link.path for link in found if link.bytes_per_s is not None]
    if transfer == "auto" and "mapped" in works:
        return "mapped"
    return "nixl" if "nixl" in works else "nothing: every pull would fail and be computed again"


def text(host: Host, found: Sequence[Link], notes: Sequence[str]) -> str:
    gpus = ", ".join(host.gpus) or "none"
    pairs = len(host.gpus) * (len(host.gpus) - 1)
    lines = [f"{host.cores} cores, GPUs: {gpus}"]
    if pairs:
        lines.append(f"peer access: {len(host.peer_access)} of {pairs} pairs")
    installed = (f"{name} {version or 'not installed'}" for name, version in host.packages.items())
    lines.append("packages: " + ", ".join(installed))
    lines.append(f"UCX modules: {', '.join(host.ucx_modules) or 'the built-in ones only'}")
    memlock = "unlimited" if host.memlock_bytes < 0 else f"{host.memlock_bytes >> 20} MiB"
    if host.rdma_devices:
        lines.append(f"RDMA devices: {', '.join(host.rdma_devices)}")
    lines.append(f"/dev/shm: {host.shm_bytes >> 20} MiB, locked memory: {memlock}")
    for link in found:
        rate = f"{link.bytes_per_s / 1e9:.2f} GB/s" if link.bytes_per_s else "does not work"
        lines.append(f"{link.path:7} {link.source} -> {link.target}: {rate}{_way(link)}")
    if found:
        default = DecodeOptions().transfer_for("cuda" if host.gpus else "cpu")
        lines.append(f"--transfer {default} (the default here) uses: {used(default, found)}")
    lines += [f"WARNING: {note}" for note in notes] or ["nothing needs fixing"]
    return "\n".join(lines)


def _way(link: Link) -> str:
    if link.path == "mapped" or link.bytes_per_s is None:
        return ""
    return f" by {link.way}" if link.way else "; UCX does not say by what, judge by the rate"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was found; 1 where no KV could move at all."""
    settings = parse(DoctorSettings, argv, prog="baton doctor")
    host = look()
    found = links(host, settings.nbytes) if settings.measure else []
    notes = advice(host, found)
    if settings.as_json:
        report = {"host": asdict(host), "links": [asdict(link) for link in found], "notes": notes}
        print(json.dumps(report))
    else:
        print(text(host, found, notes))
    return 1 if found and all(link.bytes_per_s is None for link in found) else 0


if __name__ == "__main__":
    sys.exit(main())

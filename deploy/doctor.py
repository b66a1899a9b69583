"""`baton doctor`: how KV would move between servers of this machine, how fast, and what is missing.

Pulls KV that it makes itself between two devices, in every way that servers have; needs no model
and no running server.
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

_BLOCK_TOKENS, _SIZES = 64, (8, 8, 64)  # layers, heads, elements of one
# Over NVLink or between GPUs of one PCIe switch it is more, by way of host memory less.
_SLOW_GPU_BYTES_PER_S = 15e9
_GPU_BYTES = 1 << 30  # beside which its fence takes little
_MIN_SHM_BYTES, _MIN_MEMLOCK_BYTES = (
    64 << 20,
    64 << 30,
)  # with RDMA the whole KV pool is locked


class DoctorSettings(BatonSettings):
    """How KV would move between servers of this machine, how fast, and what is missing."""

    measure: bool = Field(True, description="move bytes; otherwise only look")
    nbytes: int = Field(
        64 << 20, ge=1 << 20, le=1 << 34, description="to move each way (bytes)"
    )
    as_json: bool = Field(False, description="print one JSON line instead of text")


@dataclass(frozen=True)
class Link:
    """One way from one device to another; `bytes_per_s` is None where it does not work."""

    path: str  # "mapped" | "nixl"
    source: str
    target: str
    bytes_per_s: float | None
    reason: str = ""
    way: UcxRead | None = (
        None  # by which UCX says that it read; None: it does not, or is not used
    )


def measure(path: str, source: str, target: str, nbytes: int) -> Link:
    """Pulls about `nbytes` out of the pool of another process, the best of four.

    Args:
        path: "mapped" or "nixl".
        source, target: torch devices, of the process that owns the KV and of this one.
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
    except Exception as error:  # whatever it is, it is what the user has to know
        return Link(path, source, target, None, str(error) or repr(error))
    return Link(path, source, target, size.kv_bytes / seconds, way=way)


def links(host: Host, nbytes: int) -> list[Link]:
    """All ways between the devices that servers would use, measured: two GPUs, else one GPU with
    itself, else the CPU."""
    least = _GPU_BYTES if host.gpus else 0
    source, target = (
        [f"cuda:{n}" for n in range(len(host.gpus))] * 2 or ["cpu", "cpu"]
    )[:2]
    return [
        measure(path, source, target, max(nbytes, least)) for path in ("mapped", "nixl")
    ]


def advice(host: Host, found: Sequence[Link]) -> list[str]:
    """What should be changed, each with its fix."""
    gpus, versions, rdma = host.gpus, host.packages, ", ".join(host.rdma_devices)
    tls = host.ucx_environment.get("UCX_TLS", "all")
    memlock, shm = host.memlock_bytes, f"/dev/shm has {host.shm_bytes >> 20} MiB left"
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
        "kernel.yama.ptrace_scope is above 1: servers cannot map each other's memory. Fix: "
        "sysctl kernel.yama.ptrace_scope=1, or --transfer nixl.":
            not gpus and not host.can_read_peers,
        f"{shm}; NCCL and UCX want more. Fix: in compose, shm_size: 1gb or ipc: host.":
            host.shm_bytes < _MIN_SHM_BYTES,
        f"This host has RDMA devices ({rdma}) and /dev/infiniband is not here: KV moves over "
        "TCP between hosts. Fix: in compose, devices: /dev/infiniband.":
            rdma and not host.rdma_usable,
        f"RDMA ({rdma}) locks the KV pool in memory, and {memlock >> 20} MiB may be locked. Fix: "
        "ulimit -l unlimited; in compose, ulimits: memlock: -1.":
            rdma and host.rdma_usable and 0 <= memlock < _MIN_MEMLOCK_BYTES,
    }  # fmt: skip
    of_links = (_judged(link)[1] for link in found)
    return [*(note for note, holds in notes.items() if holds), *filter(None, of_links)]


def _judged(link: Link) -> tuple[str, str | None]:
    """How fast it is, and what should be changed."""
    way, slow = f"{link.path}, {link.source} to {link.target}", None
    if link.bytes_per_s is None:
        return "does not work", f"{way}: {link.reason}"
    rate = f"{link.bytes_per_s / 1e9:.2f} GB/s"
    if link.way is not None:
        warning = link.way.warning()
        return f"{rate} by {link.way}", warning and f"{warning} It was {rate}."
    if link.source != link.target and link.bytes_per_s < _SLOW_GPU_BYTES_PER_S:
        slow = f"{way}: {rate} goes through host memory. {GPU_FIX}"
    silent = (
        "" if link.path == "mapped" else "; UCX does not say by what, judge by the rate"
    )
    return rate + silent, slow


def used(transfer: str, found: Sequence[Link]) -> str:
    """What `--transfer auto` or `nixl` takes on this machine."""
    wanted = ("mapped", "nixl") if transfer == "auto" else ("nixl",)
    works = (
        link.path
        for link in found
        if link.path in wanted and link.bytes_per_s is not None
    )
    return next(works, "nothing: every pull would fail and be computed again")


def text(host: Host, found: Sequence[Link], notes: Sequence[str]) -> str:
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
            for link in found
        ),
        found
        and f"--transfer {default} (the default here) uses: {used(default, found)}",
        *([f"WARNING: {note}" for note in notes] or ["nothing needs fixing"]),
    ]
    return "\n".join(str(line) for line in lines if line)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was found; 1 where no KV could move at all."""
    settings = parse(DoctorSettings, argv, prog="baton doctor")
    host = inspect_host()
    found = links(host, settings.nbytes) if settings.measure else []
    notes = advice(host, found)
    report = {
        "host": asdict(host),
        "links": [asdict(link) for link in found],
        "notes": notes,
    }
    print(json.dumps(report) if settings.as_json else text(host, found, notes))
    return 1 if found and all(link.bytes_per_s is None for link in found) else 0

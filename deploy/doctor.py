"""`baton doctor` measures how fast KV moves between servers on this machine.

It creates KV in another process and pulls the KV from there, over the paths "mapped"
and "nixl". It needs no model and no running server. It also reports missing packages
and unsuitable host settings.

With URLs, it checks running proxies and servers instead (deploy/cluster_check).
"""

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import ClassVar

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from kvcache.transports import GPU_FIX, Host, UcxRead, inspect_host, ucx_log
from protocol.process.environment import safe_path
from protocol.settings import sources
from protocol.settings.machine import MIN_SECRET_BYTES
from protocol.settings.options import ApiKey, DecodeOptions, Seconds
from protocol.settings.settings import BatonSettings, parse

_BLOCK_TOKENS = 64
_SIZES = (8, 8, 64)  # numbers of layers, KV heads, and elements of a head
# Transfers over NVLink or within one PCIe switch exceed this rate. Copies through host
# memory stay below it.
_SLOW_GPU_BYTES_PER_S = 15e9
# Minimum size of transfers on GPUs. Transfers of this size take much longer than the
# fence, which is the exchange of messages after the KV has arrived.
_MIN_GPU_BYTES = 1 << 30
_MIN_SHM_BYTES = 64 << 20  # free shared memory that NCCL and UCX need
_MIN_MEMLOCK_BYTES = 64 << 30  # RDMA locks the whole KV pool in memory


class DoctorSettings(BatonSettings):
    """Checks the proxies and servers at URLS and pulls KV between servers. Without
    URLS, measures how fast KV moves between servers on this machine. Reports what
    needs fixing.
    """

    positional: ClassVar[str] = "urls"

    urls: sources.Listed[sources.Url] = ()
    """URL of a proxy or server to check (repeatable; none: check this machine). The
    servers of a proxy are checked, too
    """
    measure: bool = Field(
        True, description="measure transfers, not only inspect the host"
    )
    nbytes: int = Field(
        64 << 20,
        ge=1 << 20,
        le=1 << 34,
        description="minimum size of each transfer (bytes); on GPUs at least 1 GiB",
    )
    as_json: bool = Field(
        False, alias="json", description="print one JSON line instead of text"
    )
    max_pairs: int = Field(16, ge=0, le=1024)
    """with URLS, maximum number of pairs of servers between which KV is pulled"""
    timeout_s: Seconds = 30.0
    """with URLS, timeout of one request (s)"""
    limit_s: Seconds = 300.0
    """with URLS, time after which the checks end (s)"""
    admin_key: sources.Listed[ApiKey] = ()
    """admin key of the checked processes. Prefer the variable BATON_ADMIN_KEY"""
    api_key: sources.Listed[ApiKey] = ()
    """API key, used if there is no admin key. Prefer the variable BATON_API_KEY"""
    cluster_secret: SecretStr | None = Field(None, min_length=MIN_SECRET_BYTES)
    """cluster secret, for handshakes between this command and the servers. Prefer the
    variable BATON_CLUSTER_SECRET (None: only connections are checked)
    """
    tls_ca: str | None = Field(None, min_length=1)
    """PEM file with the certificate authorities of https:// URLs (None: the authorities
    of the system)
    """

    @field_validator("measure", "nbytes", "max_pairs", "timeout_s", "limit_s")
    @classmethod
    def _check_use(cls, value: float, info: ValidationInfo) -> float:
        """Refuses options that have no effect with, or without, URLS."""
        assert info.field_name is not None
        if value == cls.model_fields[info.field_name].default:
            return value
        is_for_urls = info.field_name in ("max_pairs", "timeout_s", "limit_s")
        has_urls = bool(info.data.get("urls"))
        if has_urls and not is_for_urls:
            raise ValueError("has no effect with URLS: leave it out")
        if is_for_urls and not has_urls:
            raise ValueError(
                "has no effect without URLS: name servers, or leave it out"
            )
        return value


@dataclass(frozen=True)
class Link:
    """The measured transfer from one process to another over one path.

    Attributes:
        path: "mapped" or "nixl".
        source: torch device of the process that owns the KV.
        target: torch device of the process that pulls the KV.
        bytes_per_s: None if the transfer failed.
        reason: Why the transfer failed; empty if it did not.
        ucx_read: The protocol and the transport by which UCX performed the reads; None
            for the path "mapped", or if UCX did not report them.
    """

    path: str
    source: str
    target: str
    bytes_per_s: float | None
    reason: str = ""
    ucx_read: UcxRead | None = None


def measure(path: str, source: str, target: str, nbytes: int) -> Link:
    """Pulls at least `nbytes` from another process four times; returns the best result.

    If anything fails, the result has the reason. The function starts the other process,
    and ends it before returning.

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
        setup = pair.DecodeSetup(
            size, (target,), mapped=path == "mapped", staging_bytes=0
        )
        with safe_path(), closing(pair.Remote(pair.Prefill, source, size)) as prefill:
            prefill.call("begin_case", side)
            with closing(pair.Decode(prefill, side, setup)) as decode:
                decode.connect()
                seconds = min(decode.pull(size.tokens).seconds for _ in range(4))
                decode.check()
                gpus = {"gpu_here": target != "cpu", "gpu_there": source != "cpu"}
                ucx_read = None if setup.mapped else ucx_log.read_between(**gpus)
    except Exception as error:  # any failure is a result to report to the user
        return Link(path, source, target, None, str(error) or repr(error))
    return Link(path, source, target, size.kv_bytes / seconds, ucx_read=ucx_read)


def measure_links(host: Host, nbytes: int) -> list[Link]:
    """Measures the paths "mapped" and "nixl" between GPUs 0 and 1 of this machine.

    With a single GPU, that GPU is both source and target. Without a GPU, the CPU is
    both.

    Args:
        nbytes: Minimum size of each transfer. On GPUs, the size is also at least
            _MIN_GPU_BYTES.
    """
    min_bytes = _MIN_GPU_BYTES if host.gpus else 0
    devices = [f"cuda:{index}" for index in range(len(host.gpus))]
    if not devices:
        devices = ["cpu"]
    source = devices[0]
    target = devices[1 % len(devices)]
    return [
        measure(path, source, target, max(nbytes, min_bytes))
        for path in ("mapped", "nixl")
    ]


def advice(host: Host, measured_links: Sequence[Link]) -> list[str]:
    """Returns one line for each problem found, with its fix.

    The line for a failed transfer has the reason instead of a fix.
    """
    gpus = host.gpus
    versions = host.packages
    rdma = ", ".join(host.rdma_devices)
    tls = host.ucx_environment.get("UCX_TLS", "all")
    memlock = host.memlock_bytes
    shm = f"/dev/shm has {host.shm_bytes >> 20} MiB left"
    is_problem_by_note: dict[str, object] = {
        "NIXL is not installed: no KV moves between hosts. Fix: pip install nixl.":
            not versions["nixl"],
        "Triton is not installed: no mapped path. Fix: pip install triton.":
            gpus and not versions["triton"],
        "FlashInfer is not installed. Fix: pip install flashinfer-python.":
            gpus and not versions["flashinfer-python"],
        f"No GPU can read the memory of another GPU. {GPU_FIX}":
            len(gpus) > 1 and not host.peer_access,
        f"UCX_TLS={tls} excludes cuda_ipc and cuda_copy. Fix: unset UCX_TLS.":
            gpus and tls != "all" and "cuda" not in tls,
        "kernel.yama.ptrace_scope is above 1: servers cannot map each other's memory. "
        "Fix: sysctl kernel.yama.ptrace_scope=1, or --transfer nixl.":
            not gpus and not host.can_read_peers,
        f"{shm}; NCCL and UCX need more. Fix: in compose, shm_size: 1gb or ipc: host.":
            host.shm_bytes < _MIN_SHM_BYTES,
        f"This host has RDMA devices ({rdma}) but no /dev/infiniband: KV moves over "
        "TCP between hosts. Fix: in compose, devices: /dev/infiniband.":
            rdma and not host.rdma_usable,
        f"RDMA ({rdma}) locks the KV pool in memory, but at most {memlock >> 20} MiB "
        "may be locked. Fix: ulimit -l unlimited; in compose, ulimits: memlock: -1.":
            rdma and host.rdma_usable and 0 <= memlock < _MIN_MEMLOCK_BYTES,
    }  # fmt: skip
    host_problems = [
        note for note, is_problem in is_problem_by_note.items() if is_problem
    ]
    link_problems = [_result_and_problem(link)[1] for link in measured_links]
    return [*host_problems, *filter(None, link_problems)]


def _result_and_problem(link: Link) -> tuple[str, str | None]:
    """Returns the result of a measured link, and a description of its problem.

    The description is None if there is no problem. It contains the fix, or the reason
    if the transfer failed.
    """
    name = f"{link.path}, {link.source} to {link.target}"
    if link.bytes_per_s is None:
        return "does not work", f"{name}: {link.reason}"
    rate = f"{link.bytes_per_s / 1e9:.2f} GB/s"
    if link.ucx_read is not None:
        warning = link.ucx_read.warning()
        remark = warning and f"{warning} The rate was {rate}."
        return f"{rate} by {link.ucx_read}", remark
    problem = None
    if link.source != link.target and link.bytes_per_s < _SLOW_GPU_BYTES_PER_S:
        problem = f"{name}: KV goes through host memory, at {rate}. {GPU_FIX}"
    remark = (
        "; UCX did not report its transport, so compare the rate with the hardware's"
    )
    if link.path == "mapped":
        remark = ""
    return rate + remark, problem


def used_path(transfer: str, measured_links: Sequence[Link]) -> str:
    """Returns the path that servers use on this machine, "mapped" or "nixl".

    If no path that `transfer` allows works, returns a phrase for the report instead.

    Args:
        transfer: The default of --transfer on this machine: "auto" if it has a GPU,
            otherwise "nixl".
    """
    allowed_paths = ("mapped", "nixl") if transfer == "auto" else ("nixl",)
    working_paths = (
        link.path
        for link in measured_links
        if link.path in allowed_paths and link.bytes_per_s is not None
    )
    failure = "no path; every pull would fail, and servers would recompute the prompts"
    return next(working_paths, failure)


def text(host: Host, measured_links: Sequence[Link], notes: Sequence[str]) -> str:
    """Returns the report as text."""
    num_pairs = len(host.gpus) * (len(host.gpus) - 1)
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
        num_pairs and f"peer access: {len(host.peer_access)} of {num_pairs} pairs",
        "packages: " + ", ".join(installed),
        f"UCX modules: {', '.join(host.ucx_modules) or 'the built-in ones only'}",
        host.rdma_devices and f"RDMA devices: {', '.join(host.rdma_devices)}",
        f"/dev/shm: {host.shm_bytes >> 20} MiB, locked memory: {memlock}",
        *(
            f"{link.path:7} {link.source} -> {link.target}: "
            f"{_result_and_problem(link)[0]}"
            for link in measured_links
        ),
        measured_links
        and f"--transfer {default} (the default here) uses: "
        f"{used_path(default, measured_links)}",
        *([f"WARNING: {note}" for note in notes] or ["nothing needs fixing"]),
    ]
    return "\n".join(str(line) for line in lines if line)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. Returns the exit status.

    The status is 1 if every measured transfer failed. With URLs, it is 1 if the checks
    found an error, or --tls-ca cannot be used. Otherwise it is 0.
    """
    settings = parse(DoctorSettings, argv, prog="baton doctor")
    if settings.urls:
        return _check_cluster(settings)
    host = inspect_host()
    measured_links = measure_links(host, settings.nbytes) if settings.measure else []
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


def _check_cluster(settings: DoctorSettings) -> int:
    from deploy.cluster_check.report import Options, check_cluster

    keys = [*settings.admin_key, *settings.api_key]
    secret = settings.cluster_secret
    options = Options(
        urls=list(dict.fromkeys(settings.urls)),
        key=keys[0].get_secret_value() if keys else None,
        secret=secret.get_secret_value().encode() if secret else None,
        ca_file=settings.tls_ca,
        timeout_s=settings.timeout_s,
        limit_s=settings.limit_s,
        max_pairs=settings.max_pairs,
    )
    try:
        return check_cluster(options, as_json=settings.as_json)
    except ValueError as error:  # an unusable --tls-ca
        print(f"baton doctor: error: {error}", file=sys.stderr)
        return 1

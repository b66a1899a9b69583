"""What this machine offers to move KV between two servers on it, and how fast each way is, through
the agent and the placers of the servers."""

import importlib.util
import multiprocessing
import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from itertools import permutations
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.link.agent import MemoryKind, ReadState
from kvcache.transfer.link.ucx_log import UcxRead, ucx_log
from kvcache.transfer.move.cuda_placer import CudaPlacer
from kvcache.transfer.move.peer_memory import NotMappable, describe
from kvcache.transfer.move.place import Placer, launches
from kvcache.transfer.plan.endpoint import Endpoint
from kvcache.transfer.plan.plan import Planner
from protocol.handshake import RankMetadata

_WAIT_S = 60.0
_HEADS, _LAYERS, _TOKENS, _HEAD_DIM = 8, 8, 64, 64


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


@dataclass(frozen=True)
class Link:
    """One way from one device to another; `bytes_per_s` is None where it does not work."""

    path: str  # "mapped" | "nixl"
    source: str
    target: str
    bytes_per_s: float | None
    reason: str = ""
    way: UcxRead | None = None  # by which UCX says that it read; None: it does not, or is not used


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


def measure(path: str, source: str, target: str, nbytes: int) -> Link:
    """Moves about `nbytes` out of a pool of another process.

    Args:
        path: "mapped" or "nixl".
        source, target: torch devices, of the process that owns the KV and of this one.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    layout = _layout(nbytes)
    process = context.Process(target=_own, args=(there, source, layout, path), daemon=True)
    process.start()
    try:
        if not here.poll(_WAIT_S):
            raise RuntimeError(f"no answer from the process on {source} within {_WAIT_S} s")
        rank = here.recv()
        if isinstance(rank, str):
            raise RuntimeError(rank)
        if path == "mapped":
            return Link(path, source, target, _mapped(rank, layout, target))
        return Link(path, source, target, *_read(rank, layout, target))
    except Exception as error:  # whatever it is, it is what the user has to know
        return Link(path, source, target, None, str(error) or repr(error))
    finally:
        here.close()  # ends the other process
        process.join(5)
        process.kill()


def _layout(nbytes: int) -> KVLayout:
    sizes = (_HEADS, _LAYERS, 2, _TOKENS, _HEAD_DIM)
    blocks = max(2, nbytes // (2 * prod(sizes)) + 1)
    return KVLayout("BHLCND", blocks, *sizes, "bfloat16")


def _kind(device: str) -> MemoryKind:
    return "VRAM" if device.startswith("cuda") else "DRAM"


def _registered(name: str, pool: KVPool) -> Any:
    """An agent with a pool."""
    from kvcache.transfer.link.nixl_agent import NixlAgent  # loads UCX

    agent = NixlAgent(name, device_id=pool.device.index, set_device=torch.cuda.set_device)
    kind = _kind(pool.device.type)
    agent.register(pool.base_address, pool.nbytes, device_id=pool.device_id, kind=kind)
    return agent


def _own(connection: Connection, device: str, layout: KVLayout, path: str) -> None:
    """The other process: a pool, until the connection ends."""
    try:
        if _kind(device) == "VRAM":
            torch.cuda.set_device(device)
        pool = KVPool(layout, device)
        pool.flat_bytes.fill_(1)
        agent = _registered("doctor-p", pool) if path == "nixl" else None
        if _kind(device) == "VRAM":
            torch.cuda.synchronize(device)
        connection.send(describe(pool, 0, agent.metadata() if agent else b"none"))
    except Exception as error:
        connection.send(str(error) or repr(error))
    try:
        connection.recv()
    except EOFError:
        os._exit(0)  # neither CUDA nor UCX need to be taken down


def _best(nbytes: int, action: Callable[[], None]) -> float:
    """Bytes a second of the best of four; the first one connects and makes memory resident."""
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return nbytes / min(seconds)


def _read(rank: RankMetadata, layout: KVLayout, target: str) -> tuple[float, str, UcxRead | None]:
    pool = KVPool(layout, target)
    agent = _registered("doctor-d", pool)
    peer = agent.add_peer(rank.agent_metadata)
    kinds = _kind(target), _kind(rank.device_kind)
    addresses = (pool.base_address, rank.base_address, layout.nbytes)
    runs = [np.array([number]) for number in addresses]
    devices = {"local_device": pool.device_id, "remote_device": rank.device_id}

    def read() -> None:
        handle = agent.read(peer, *runs, **devices, kinds=kinds)
        while (state := agent.poll(handle)) is ReadState.ACTIVE:
            pass
        agent.release(handle)
        if state is not ReadState.DONE:
            raise RuntimeError("a READ failed")

    try:
        rate, (here, there) = _best(layout.nbytes, read), (kind == "VRAM" for kind in kinds)
        return rate, "", ucx_log.read_between(gpu_here=here, gpu_there=there)
    finally:
        agent.close()


def _mapped(rank: RankMetadata, layout: KVLayout, target: str) -> float:
    pool = KVPool(layout, target)
    placer = CudaPlacer(pool) if pool.device.type == "cuda" else Placer(pool)
    placer.bind_thread()
    try:
        memory = placer.open(rank)
    except NotMappable as error:
        raise RuntimeError(f"it cannot be mapped: {error}") from error
    end = Endpoint(layout, 0, 1)
    blocks = list(range(1, layout.num_blocks))
    tokens = (0, len(blocks) * layout.block_size)
    copies = list(Planner(end, (end,), layout.num_heads).take(tokens, blocks, blocks).copies())

    def place() -> None:
        parts = launches(copies, placer.launch_bytes)
        for token in [placer.launch(part, memory, None) for part in parts]:
            while not placer.finished(token):
                pass

    try:
        return _best(sum(copy.nbytes for copy in copies), place)
    finally:
        memory.close()

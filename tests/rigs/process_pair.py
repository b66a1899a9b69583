"""Child processes that use NIXL: a prefill side, a rank of a decode side, a process
whose memory other processes can read, or any program.

The children are forked from a process that has imported torch, because the import takes
longer than most tests. That process has no NIXL agent. UCX reads the environment only
when it is loaded, so each child loads it with its own environment.
"""

import hashlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.pool import KVPool
from kvcache.transfer.agent import TransferAgent
from kvcache.transfer.local_rank import LocalRank
from kvcache.transfer.worker import TransferWorker
from protocol.messages import RemotePrefill
from tests import stopping
from tests.rigs.memory_pair import HEADS, Prefill, layout

multiprocessing.set_forkserver_preload([__name__])
_PROGRAM_TIMEOUT_S = 200.0


class Forked:
    """A process that runs `work(connection, *args)`.

    Args:
        env: variables that are added to the environment of the process.

    Attributes:
        greeting: the first message that the process sends.
    """

    def __init__(self, work: Callable[..., None], *args: Any, **env: str) -> None:
        is_program = multiprocessing.parent_process() is not None
        context: Any = multiprocessing.get_context(
            "fork" if is_program else "forkserver"
        )
        self._connection, child_connection = context.Pipe()
        self.process = context.Process(
            target=_run,
            args=(work, child_connection, args, env),
            daemon=work is not _execute,
        )
        self.process.start()
        child_connection.close()
        self.greeting = self._connection.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        stopping.send(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()

    def request(self, **query: Any) -> Any:
        self._connection.send(query)
        return self._connection.recv()


def _run(
    work: Callable[..., None],
    connection: Connection,
    args: tuple[Any, ...],
    env: dict[str, str],
) -> None:
    os.environ.update(env)
    try:
        work(connection, *args)
    except EOFError:  # the test closed the connection
        os._exit(0)


class Child(Forked):
    """A prefill side, or one rank ("worker") of a decode side."""

    def __init__(self, role: str, **options: Any) -> None:
        work = {"prefill": serve_prefill, "worker": serve_worker}[role]
        super().__init__(work, options)

    def lease(
        self, block_ids: list[int], num_tokens: int, **options: Any
    ) -> RemotePrefill:
        remote: RemotePrefill = self.request(
            block_ids=block_ids, num_tokens=num_tokens, **options
        )
        return remote


class MemoryPeer(Forked):
    """A process whose memory other processes can read through NIXL. The memory holds
    `pattern(nbytes)`.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(_serve_memory, nbytes)
        self.metadata, self.address = self.greeting
        self.memory = pattern(nbytes)

    kill = Forked.close


def run_program(program: str, **env: str) -> str:
    """Run the source text of a program in a new process. Return its output.

    The program must end with status 0.
    """
    with tempfile.NamedTemporaryFile() as file:
        process = Forked(_execute, program, file.name, **env).process
        process.join(_PROGRAM_TIMEOUT_S)
        code = process.exitcode
        process.kill()
        output = file.read().decode()
    assert code == 0, output
    return output


def _execute(connection: Connection, program: str, output: str) -> None:
    with open(output, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    connection.send(None)
    try:
        exec(compile(program, "program", "exec"), {})
    except Exception:
        # Exit at once: a normal exit would wait for child processes that the program
        # has suspended.
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()


def pattern(nbytes: int) -> npt.NDArray[np.uint8]:
    return (np.arange(nbytes, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8)


def nixl(name: str, device: str = "cpu") -> TransferAgent:
    from kvcache.transfer.nixl_agent import NixlAgent

    index = torch.device(device).index
    return NixlAgent(name, device_id=index)


def _serve_memory(connection: Connection, nbytes: int) -> None:
    memory = pattern(nbytes)
    agent = nixl("peer")
    agent.register(memory.ctypes.data, memory.nbytes)
    connection.send((agent.metadata(), memory.ctypes.data))
    connection.recv()


def serve_prefill(connection: Connection, options: dict[str, Any]) -> None:
    device = options.get("device", "cpu")
    prefill = Prefill(lambda: nixl("P", device), **options)
    connection.send({"port": prefill.server.address[1]})
    while query := connection.recv():
        if "free" in query:  # free the memory of P's KV
            prefill.pools.clear()
            torch.cuda.empty_cache()
            connection.send({})
        elif "counters" in query:
            connection.send(prefill.server.counters())
        else:
            connection.send(prefill.lease(**query))


def serve_worker(connection: Connection, options: dict[str, Any]) -> None:
    """Run one rank of D. Answer each query with a digest of the blocks that the query
    names.
    """
    rank = options["rank"]
    tp = options["tp"]
    dcp = options.get("dcp", 1)
    pool = KVPool(layout(tp, rank, dcp=dcp))
    local = LocalRank(rank, tp, HEADS, nixl("D"), pool, dcp=dcp)
    worker = TransferWorker(local, options["link"])
    worker.start()
    connection.send({"rank": rank})
    while query := connection.recv():
        connection.send(digest_of(pool, query["block_ids"]))


def digest_of(pool: KVPool, blocks: list[int]) -> str:
    """Return a digest of the KV in these blocks, in the order of `blocks`."""
    rows = pool.canonical[torch.tensor(blocks)].permute(0, 4, 1, 2, 3, 5)
    return digest(rows.flatten(0, 1).numpy())


def digest(tokens: Any) -> str:
    return hashlib.sha256(
        np.ascontiguousarray(tokens, dtype=np.float32).tobytes()
    ).hexdigest()

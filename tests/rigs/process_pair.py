"""The prefill side, or one rank of the decode side, in a process of its own over NIXL.

Run as a program this is that process: see `Child`. Questions and answers are lines of JSON.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from kvcache.pool import KVPool
from kvcache.transfer.link.agent import TransferAgent
from kvcache.transfer.worker.peer import LocalRank
from kvcache.transfer.worker.worker import TransferWorker
from protocol.messages import RemotePrefill
from tests import stopping
from tests.rigs.memory_pair import HEADS, Prefill, layout


class Child:
    """This module as a program."""

    def __init__(self, role: str, **options: Any) -> None:
        argv = [sys.executable, "-m", __name__, role, json.dumps(options)]
        pipe, root = subprocess.PIPE, Path(__file__).parents[2]
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=root)
        self.greeting = self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, **question: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def lease(self, block_ids: list[int], num_tokens: int, **options: Any) -> RemotePrefill:
        answer = self.ask(block_ids=block_ids, num_tokens=num_tokens, **options)
        return msgspec.convert(answer, RemotePrefill)

    def signal(self, number: int) -> None:
        stopping.send(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def run_program(program: str, **env: str) -> str:
    """In a process of its own, as UCX reads its environment once; what it printed. It has to end
    well."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **env},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def on_device(agent_kind: Callable[..., TransferAgent], name: str, device: str) -> TransferAgent:
    index = torch.device(device).index
    return agent_kind(name, device_id=index, set_device=torch.cuda.set_device)


def serve_prefill(agent_kind: Callable[..., TransferAgent], options: dict[str, Any]) -> None:
    device = options.get("device", "cpu")
    prefill = Prefill(lambda: on_device(agent_kind, "P", device), **options)
    say({"port": prefill.server.address[1]})
    for line in sys.stdin:
        question = json.loads(line)
        if "free" in question:  # its KV is not there any more
            prefill.pools.clear()
            torch.cuda.empty_cache()
            say({})
        elif "counters" in question:
            say(prefill.server.counters())
        else:
            say(msgspec.to_builtins(prefill.lease(**question)))


def serve_worker(agent_kind: Callable[[str], TransferAgent], options: dict[str, Any]) -> None:
    """One rank of D; answers with a digest of what lies in its blocks."""
    rank, tp, dcp = options["rank"], options["tp"], options.get("dcp", 1)
    pool = KVPool(layout(tp, rank, dcp=dcp))
    local = LocalRank(rank, tp, HEADS, agent_kind("D"), pool, dcp=dcp)
    worker = TransferWorker(local, options["address"])
    worker.start()
    say({"rank": rank})
    for line in sys.stdin:
        say(digest_of(pool, json.loads(line)["block_ids"]))


def digest_of(pool: KVPool, blocks: list[int]) -> str:
    rows = pool.canonical[torch.tensor(blocks)].permute(0, 4, 1, 2, 3, 5)
    return digest(rows.flatten(0, 1).numpy())


def digest(tokens: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype=np.float32).tobytes()).hexdigest()


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    from kvcache.transfer.link.nixl_agent import NixlAgent

    roles = {"prefill": serve_prefill, "worker": serve_worker}
    roles[sys.argv[1]](NixlAgent, json.loads(sys.argv[2]))
    os._exit(0)


if __name__ == "__main__":
    main()

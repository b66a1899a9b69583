"""KV that changes on its way between two real servers: never decoded from, and told."""

import mmap
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.e2e.matrix import ask
from tests.rigs.client import fresh_prompt, prefill
from tests.rigs.cluster import Server, assert_idle, running, start_decode, wait_until


def pool_of(server: Server) -> mmap.mmap:
    """The memory of its KV (kvcache/shared_memory.py)."""
    files = (
        file
        for pid in server.engine_pids()
        for file in Path(f"/proc/{pid}/fd").iterdir()
    )
    path = next(
        file for file in files if os.readlink(file).startswith("/memfd:baton-kv")
    )
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def test_a_wrong_bit_is_found_and_the_prompt_is_computed_again(tiny_cluster):
    """The decode server copies out of the prefill server's memory, where a bit is wrong at that
    moment only: the prefill server stands still meanwhile."""
    argv = "--transfer", "mapped", "--kv-verify", "all"
    p, d = tiny_cluster.prefill[0], start_decode(tiny_cluster.model, *argv)
    with running(d), ThreadPoolExecutor(1) as thread:
        first, prompt = fresh_prompt(), fresh_prompt()
        right = ask(d.url, first, 4, prefill(p.url, first, logprobs=1))
        assert right.kv["transferred"] == 150
        wait_until(lambda: d.metrics()["baton_kv_verified_tokens_total"] == 150)
        theirs, ours = pool_of(p), pool_of(d)
        before = np.frombuffer(theirs[:], np.uint8)
        params = prefill(p.url, prompt, logprobs=1)
        p.signal_engine(signal.SIGSTOP)
        at = int(np.flatnonzero(before != np.frombuffer(theirs[:], np.uint8))[0])
        theirs[at] ^= 4
        row = theirs[at - at % 32 : at - at % 32 + 32]
        answer = thread.submit(ask, d.url, prompt, 8, params)
        wait_until(lambda: ours.find(row) >= 0)
        theirs[at] ^= 4
        p.signal_engine(signal.SIGCONT)
        got = answer.result(60)
        assert got.token_ids == ask(p.url, prompt, 8).token_ids
        assert got.kv["recomputed"] == 150
        wait_until(lambda: d.metrics()["baton_kv_verify_failures_total"] == 1)
        metrics = d.metrics()
        assert metrics['baton_kv_transfer_failures_total{code="kv_corrupt"}'] == 1
        assert metrics["baton_kv_verified_tokens_total"] == 150
        assert_idle(p, d)

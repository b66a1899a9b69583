"""KV that is corrupted between two real servers is detected, reported and not used."""

import mmap
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.e2e.matrix import generate
from tests.rigs.client import fresh_prompt, prefill
from tests.rigs.cluster import Server, assert_idle, running, start_decode, wait_until


def map_pool(server: Server) -> mmap.mmap:
    """Map the shared memory that holds a server's KV (kvcache/shared_memory.py)."""
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


def test_wrong_bit_is_detected_and_the_prompt_is_recomputed(tiny_cluster):
    """One bit of the prefill server's KV is flipped while the decode server copies the
    KV.

    The prefill server is suspended until the bit is right again, and computes its
    digest only then.
    """
    (p,) = tiny_cluster.prefill
    d = start_decode(tiny_cluster.model, "--transfer", "mapped", "--kv-verify", "all")
    with running(d), ThreadPoolExecutor(1) as thread:
        first = fresh_prompt()
        prompt = fresh_prompt()
        first_reply = generate(d.url, first, 4, prefill(p.url, first, logprobs=1))
        assert first_reply.kv["transferred"] == 150
        wait_until(lambda: d.metrics()["baton_kv_verified_tokens_total"] == 150)
        p_pool = map_pool(p)
        d_pool = map_pool(d)
        before = np.frombuffer(p_pool[:], np.uint8)
        params = prefill(p.url, prompt, logprobs=1)
        p.signal_engine(signal.SIGSTOP)
        offset = int(np.flatnonzero(before != np.frombuffer(p_pool[:], np.uint8))[0])
        p_pool[offset] ^= 4
        row = p_pool[offset - offset % 32 : offset - offset % 32 + 32]
        answer = thread.submit(generate, d.url, prompt, 8, params)
        wait_until(lambda: d_pool.find(row) >= 0)
        p_pool[offset] ^= 4
        p.signal_engine(signal.SIGCONT)
        reply = answer.result(60)
        assert reply.token_ids == generate(p.url, prompt, 8).token_ids
        assert reply.kv["recomputed"] == 150
        wait_until(lambda: d.metrics()["baton_kv_verify_failures_total"] == 1)
        metrics = d.metrics()
        assert metrics['baton_kv_transfer_failures_total{code="kv_corrupt"}'] == 1
        assert metrics["baton_kv_verified_tokens_total"] == 150
        assert_idle(p, d)

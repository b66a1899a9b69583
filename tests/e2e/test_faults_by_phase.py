"""Servers are killed or suspended, and clients disconnect, in every phase of a request.

After each fault, every block must be free, a client must have received exactly one end,
and the next answer must be right.
"""

import asyncio
import contextlib
import json
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import stopping
from tests.e2e.reference import Reference
from tests.rigs.client import (
    MODEL,
    Stream,
    complete,
    complete_all,
    fresh_prompt,
    greedy,
    parse_kv,
    post,
    prefill,
)
from tests.rigs.cluster import (
    Cluster,
    Server,
    assert_idle,
    cluster,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
    wait_until,
)

# Leases are longer than any test. So a block that becomes free during a test was
# released, and is not free because its lease expired.
_LEASE_S = 120
# With one step per token, the prefill of a long prompt takes seconds.
_SLOW_PREFILL = ("--max-num-batched-tokens", "1")


@pytest.fixture(scope="module")
def slow_cluster(tiny_model: Path) -> Iterator[Cluster]:
    """A cluster with slow prefills. Each test must leave it working."""
    argv = ("--lease-s", str(_LEASE_S), *_SLOW_PREFILL)
    with cluster(tiny_model, prefill_argv=argv) as slow:
        yield slow


@contextlib.contextmanager
def _request_until_exit(
    server: Server, body: dict[str, Any]
) -> Iterator[socket.socket]:
    """Send a request. Close its connection when the block ends."""
    data = json.dumps(greedy(**body)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode() + data)
        yield connection


def _signal_server(server: Server, signum: int) -> None:
    """Send a signal to the engine processes of a server and to its HTTP process."""
    for pid in (*server.engine_pids(), server.child.pid):
        stopping.send(pid, signum)


def _is_busy(server: Server) -> bool:
    return server.metrics()["baton_requests_running"] > 0


def _assert_serves(cluster: Cluster, reference: Reference) -> None:
    prompt = fresh_prompt(90)
    answer = complete(cluster.url, prompt, 5)
    assert answer.token_ids == reference.generate(prompt, 5)
    assert answer.kv["transferred"] == 90


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_killed_proxy_leaves_no_block_and_no_request(
    slow_cluster, tiny_reference, phase
):
    (prefiller,) = slow_cluster.prefill
    (decode,) = slow_cluster.decode
    proxy = start_proxy([prefiller], [decode])
    with running(proxy):
        if phase == "prefill":
            Stream(proxy.url, fresh_prompt(1500), 5)
            wait_until(lambda: _is_busy(prefiller))
        else:
            Stream(proxy.url, fresh_prompt(50), 1900).wait_for_events()
        proxy.kill()
        assert_idle(prefiller, decode)
    _assert_serves(slow_cluster, tiny_reference)


def test_client_that_leaves_during_the_prefill_cancels_it(slow_cluster, tiny_reference):
    (prefiller,) = slow_cluster.prefill
    (decode,) = slow_cluster.decode
    steps = "baton_engine_steps_total"
    for prompt in (fresh_prompt(4000), [fresh_prompt(30), fresh_prompt(4000)]):
        before = prefiller.metrics()[steps]
        with _request_until_exit(
            slow_cluster.proxy, {"prompt": prompt, "max_tokens": 5}
        ):
            wait_until(lambda before=before: prefiller.metrics()[steps] > before + 20)
        assert_idle(prefiller, decode)
        assert prefiller.metrics()[steps] < before + 3900, "the prefill continued"
    _assert_serves(slow_cluster, tiny_reference)


def test_kv_is_freed_when_the_client_leaves_a_stopped_decode_server(
    slow_cluster, tiny_reference
):
    (prefiller,) = slow_cluster.prefill
    (decode,) = slow_cluster.decode
    _signal_server(decode, signal.SIGSTOP)
    try:
        with _request_until_exit(
            slow_cluster.proxy, {"prompt": fresh_prompt(20), "max_tokens": 5}
        ):
            wait_until(
                lambda: prefiller.metrics()['baton_kv_blocks{state="leased"}'] > 0
            )
        assert_idle(prefiller)
    finally:
        _signal_server(decode, signal.SIGCONT)
    slow_cluster.wait_until_ready("decode-0")
    _assert_serves(slow_cluster, tiny_reference)
    assert_idle(prefiller, decode)


@pytest.mark.parametrize(
    ("transfer", "stopped_s"),
    [
        ("auto", "until the lease expires"),
        pytest.param("nixl", "until the fence is given up", marks=pytest.mark.slow),
    ],
)
def test_prefill_server_that_stops_and_continues_corrupts_no_answer(
    tiny_model, tiny_cluster, tiny_reference, transfer, stopped_s
):
    """The lease expires while the prefill server is suspended. Then the server
    continues and reuses the blocks of the lease.
    """
    timeouts = ["--fence-timeout-s", "3", "--pull-timeout-s", "5"]
    p = partial(
        start_prefill, tiny_model, "--lease-s", "1", "--kv-cache-tokens", "2048"
    )
    d = partial(start_decode, tiny_model, "--transfer", transfer, *timeouts)
    starts = [p] if transfer == "auto" else [p, d]
    with started(*starts) as servers:
        prefiller, decode = [*servers, tiny_cluster.decode[0]][:2]
        warm = fresh_prompt()
        complete(decode.url, warm, 2, kv_transfer_params=prefill(prefiller.url, warm))
        prompt = fresh_prompt()
        expected = tiny_reference.generate(prompt, 8)
        params = prefill(prefiller.url, prompt)
        prefiller.signal_engine(signal.SIGSTOP)
        stream = Stream(
            decode.url, prompt, 8, kv_transfer_params=params
        ).wait_for_events(1)
        if "lease" in stopped_s:
            threading.Event().wait(1.5)
        else:
            stream.join(60)
        prefiller.signal_engine(signal.SIGCONT)
        complete_all(prefiller.url, [fresh_prompt(500) for _ in range(3)], 2)
        stream.assert_tokens(expected)
        assert_idle(prefiller, decode)

        def pulls() -> bool:
            """Run a request with a new prompt. Return whether its KV was pulled: on a
            slow machine, a lease may expire between the legs.
            """
            other = fresh_prompt()
            params = prefill(prefiller.url, other)
            answer = complete(decode.url, other, 6, kv_transfer_params=params)
            assert answer.token_ids == tiny_reference.generate(other, 6)
            return answer.kv["transferred"] == len(other)

        wait_until(pulls)


def test_queued_requests_move_to_another_server_with_their_leases(
    tiny_cluster, tiny_model, tiny_reference
):
    """A decode server ends while requests are in its queue.

    The other server takes the requests over and pulls their KV. No prompt is prefilled
    again, and no lease expires.
    """
    prefiller = tiny_cluster.prefill[0]
    wait_until(prefiller.all_blocks_free)
    events = ("granted", "completed", "aborted", "expired")
    before = [prefiller.leases(event) for event in events]
    filling_body = {
        "prompt": fresh_prompt(30),
        "n": 2,
        "max_tokens": 3900,
        "stream": True,
    }
    streamed_prompt = fresh_prompt()
    full_prompt = fresh_prompt()
    left_prompt = fresh_prompt()

    def lease_increases() -> list[float]:
        """Return the increase of each of the `events` since the start of the test."""
        counts = map(prefiller.leases, events)
        return [count - start for count, start in zip(counts, before, strict=True)]

    def wait_for_queue(server: Server, num_waiting: int) -> None:
        wait_until(lambda: server.metrics()["baton_requests_waiting"] == num_waiting)

    argv = ["--max-num-seqs", "2", "--shutdown-grace-s", "1"]
    start = partial(start_decode, tiny_model, *argv)
    pool = ThreadPoolExecutor(1)
    with (
        started(start, start) as decode,
        running(proxy := start_proxy([prefiller], decode)),
        pool,
    ):
        ending, other = decode
        # These two requests fill both servers.
        with (
            _request_until_exit(ending, filling_body),
            _request_until_exit(other, filling_body),
        ):
            for server in decode:
                wait_until(
                    lambda at=server: at.metrics()["baton_requests_running"] == 2
                )
            # By round robin, the first and the third request go to the server that will
            # end.
            with _request_until_exit(
                proxy, {"prompt": left_prompt, "n": 2, "max_tokens": 5}
            ):
                wait_for_queue(ending, 1)
                stream = Stream(proxy.url, streamed_prompt, 6)
                wait_for_queue(other, 1)
                full_answer = pool.submit(
                    post, proxy.url, **greedy(full_prompt, 6, n=2)
                )
                wait_for_queue(ending, 2)
                ending.child.signal(signal.SIGTERM)
                wait_for_queue(other, 3)
                assert lease_increases() == [3, 0, 0, 0]
            wait_for_queue(other, 2)
            wait_until(lambda: lease_increases() == [3, 0, 1, 0])
        stream.assert_tokens(tiny_reference.generate(streamed_prompt, 6))
        answer = full_answer.result()
        choices = answer.json()["choices"]
        expected = tiny_reference.generate(full_prompt, 6)
        assert [choice["token_ids"] for choice in choices] == [expected] * 2
        assert parse_kv(answer.headers["x-baton-kv"])["transferred"] == 150
        wait_until(lambda: prefiller.all_blocks_free() and other.all_blocks_free())
        assert lease_increases() == [3, 2, 1, 0]
        assert proxy.metrics()['baton_proxy_retries_total{leg="decode"}'] == 2
        assert proxy.metrics()['baton_proxy_retries_total{leg="prefill"}'] == 0


@pytest.mark.slow
def test_no_lease_expires_when_clients_leave_at_random_times(tiny_model):
    rng = random.Random(7)

    async def send(port: int, leaves_after_s: float | None) -> None:
        """Send a request. Disconnect after this many seconds, or after the whole answer
        if None.
        """
        prompt: Any = fresh_prompt(rng.randrange(20, 300))
        if rng.random() < 0.2:
            prompt = [prompt, fresh_prompt(40)]
        fields = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        body = json.dumps({**fields, "stream": rng.random() < 0.5}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(), leaves_after_s)
        if rng.random() < 0.5:
            writer.close()
        else:
            writer.transport.abort()

    async def send_all(port: int) -> None:
        started_at = asyncio.get_running_loop().time()
        for _ in range(4):
            await send(port, None)
        elapsed_s = asyncio.get_running_loop().time() - started_at
        long_s = elapsed_s / 4 * 3  # the duration of a request while five others run
        slots = asyncio.Semaphore(6)

        async def send_and_leave() -> None:
            async with slots:
                await send(port, rng.uniform(0, long_s))

        await asyncio.gather(*(send_and_leave() for _ in range(300)))

    with cluster(tiny_model, prefill_argv=("--lease-s", str(_LEASE_S))) as servers:
        (prefiller,) = servers.prefill
        (decode,) = servers.decode
        asyncio.run(send_all(servers.proxy.port))
        wait_until(lambda: prefiller.all_blocks_free() and decode.all_blocks_free(), 30)
        assert prefiller.leases("aborted") > 0

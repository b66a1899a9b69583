"""Servers that are killed or stopped, and clients that leave, in every phase of a request.

After each, every block comes home, the client has had one end, and the next answer is right.
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

_LEASE_S = 120  # whatever comes home sooner was given back, and did not expire
_SLOW_PREFILL = (
    "--max-num-batched-tokens",
    "1",
)  # a step per token: seconds for a long prompt


@pytest.fixture(scope="module")
def slow_cluster(tiny_model: Path) -> Iterator[Cluster]:
    """A cluster whose prefills take long, which is whole after each test."""
    with cluster(
        tiny_model, prefill_argv=("--lease-s", str(_LEASE_S), *_SLOW_PREFILL)
    ) as made:
        yield made


@contextlib.contextmanager
def _asked(server: Server, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request whose client leaves without a word at the end of the block."""
    data = json.dumps(greedy(**body)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode() + data)
        yield connection


def _stop(server: Server, number: int) -> None:
    """To the whole server: its HTTP process and its engine's."""
    for pid in (*server.engine_pids(), server.child.pid):
        stopping.send(pid, number)


def _is_busy(server: Server) -> bool:
    return server.metrics()["baton_requests_running"] > 0


def _assert_serves(cluster: Cluster, reference: Reference) -> None:
    prompt = fresh_prompt(90)
    answer = complete(cluster.url, prompt, 5)
    assert answer.token_ids == reference.generate(prompt, 5)
    assert answer.kv["transferred"] == 90


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_killed_proxy_leaves_nothing_behind(slow_cluster, tiny_reference, phase):
    servers = slow_cluster.prefill, slow_cluster.decode
    (prefiller,), (decode,) = servers
    with running(proxy := start_proxy(*servers)):
        if phase == "prefill":
            Stream(proxy.url, fresh_prompt(1500), 5)
            wait_until(lambda: _is_busy(prefiller))
        else:
            Stream(proxy.url, fresh_prompt(50), 1900).wait_for_events()
        proxy.kill()
        assert_idle(prefiller, decode)
    _assert_serves(slow_cluster, tiny_reference)


def test_a_client_that_leaves_during_the_prefill_ends_it(slow_cluster, tiny_reference):
    prefiller, decode = slow_cluster.prefill[0], slow_cluster.decode[0]
    steps = "baton_engine_steps_total"
    for prompt in (fresh_prompt(4000), [fresh_prompt(30), fresh_prompt(4000)]):
        before = prefiller.metrics()[steps]
        with _asked(slow_cluster.proxy, {"prompt": prompt, "max_tokens": 5}):
            wait_until(lambda before=before: prefiller.metrics()[steps] > before + 20)
        assert_idle(prefiller, decode)
        assert prefiller.metrics()[steps] < before + 3900, "its work was cancelled"
    _assert_serves(slow_cluster, tiny_reference)


def test_kv_goes_home_when_the_client_leaves_a_stopped_decode_server(
    slow_cluster, tiny_reference
):
    prefiller, decode = slow_cluster.prefill[0], slow_cluster.decode[0]
    _stop(decode, signal.SIGSTOP)
    try:
        with _asked(slow_cluster.proxy, {"prompt": fresh_prompt(20), "max_tokens": 5}):
            wait_until(
                lambda: prefiller.metrics()['baton_kv_blocks{state="leased"}'] > 0
            )
        assert_idle(prefiller)
    finally:
        _stop(decode, signal.SIGCONT)
    slow_cluster.wait_until_ready("decode-0")
    _assert_serves(slow_cluster, tiny_reference)
    assert_idle(prefiller, decode)


@pytest.mark.parametrize(
    ("transfer", "stopped_s"),
    [
        ("auto", "until the lease is over"),
        pytest.param("nixl", "until the fence is given up", marks=pytest.mark.slow),
    ],
)
def test_a_prefill_server_that_stops_and_goes_on_spoils_no_answer(
    tiny_model, tiny_cluster, tiny_reference, transfer, stopped_s
):
    """Its lease runs out while it cannot say so; then it goes on, and reuses the blocks."""
    timeouts = ("--fence-timeout-s", "3", "--pull-timeout-s", "5")
    p = partial(
        start_prefill, tiny_model, "--lease-s", "1", "--kv-cache-tokens", "2048"
    )
    d = partial(start_decode, tiny_model, "--transfer", transfer, *timeouts)
    with started(*((p,) if transfer == "auto" else (p, d))) as servers:
        prefiller, decode = (*servers, tiny_cluster.decode[0])[:2]
        warm = fresh_prompt()
        complete(decode.url, warm, 2, kv_transfer_params=prefill(prefiller.url, warm))
        prompt = fresh_prompt()
        expected = tiny_reference.generate(prompt, 8)
        params = prefill(prefiller.url, prompt)
        prefiller.signal_engine(signal.SIGSTOP)
        asked = Stream(
            decode.url, prompt, 8, kv_transfer_params=params
        ).wait_for_events(1)
        if "lease" in stopped_s:
            threading.Event().wait(1.5)
        else:
            asked.join(60)
        prefiller.signal_engine(signal.SIGCONT)
        complete_all(prefiller.url, [fresh_prompt(500) for _ in range(3)], 2)
        asked.assert_tokens(expected)
        assert_idle(prefiller, decode)

        def pulls() -> bool:
            """Unless this machine takes longer between the legs than a lease lasts."""
            other = fresh_prompt()
            params = prefill(prefiller.url, other)
            answer = complete(decode.url, other, 6, kv_transfer_params=params)
            assert answer.token_ids == tiny_reference.generate(other, 6)
            return answer.kv["transferred"] == len(other)

        wait_until(pulls)


def test_a_queue_moves_on_with_its_leases(tiny_cluster, tiny_model, tiny_reference):
    """Of a decode server that ends: another one pulls what was prefilled once, and no lease is left
    to expire."""
    prefiller = tiny_cluster.prefill[0]
    wait_until(prefiller.all_blocks_free)
    events = ("granted", "completed", "aborted", "expired")
    before = [prefiller.leases(event) for event in events]
    fills = {"prompt": fresh_prompt(30), "n": 2, "max_tokens": 3900, "stream": True}
    streamed, whole, left = (fresh_prompt() for _ in range(3))

    def leases() -> list[float]:
        now = map(prefiller.leases, events)
        return [count - then for count, then in zip(now, before, strict=True)]

    def waits(server: Server, num: int) -> None:
        wait_until(lambda: server.metrics()["baton_requests_waiting"] == num)

    argv = ("--max-num-seqs", "2", "--shutdown-grace-s", "1")
    start = partial(start_decode, tiny_model, *argv)
    pool = ThreadPoolExecutor(1)
    with (
        started(start, start) as decode,
        running(proxy := start_proxy([prefiller], decode)),
        pool,
    ):
        ending, other = decode
        with _asked(ending, fills), _asked(other, fills):  # both run all that they may
            for server in decode:
                wait_until(
                    lambda at=server: at.metrics()["baton_requests_running"] == 2
                )
            # Round robin: the first of each two asks the server that will end.
            with _asked(proxy, {"prompt": left, "n": 2, "max_tokens": 5}):
                waits(ending, 1)
                stream = Stream(proxy.url, streamed, 6)
                waits(other, 1)
                whole_answer = pool.submit(post, proxy.url, **greedy(whole, 6, n=2))
                waits(ending, 2)
                ending.child.signal(signal.SIGTERM)
                waits(other, 3)
                assert leases() == [3, 0, 0, 0]
            waits(other, 2)
            wait_until(lambda: leases() == [3, 0, 1, 0])
        stream.assert_tokens(tiny_reference.generate(streamed, 6))
        answer = whole_answer.result()
        choices = answer.json()["choices"]
        assert [c["token_ids"] for c in choices] == [
            tiny_reference.generate(whole, 6)
        ] * 2
        assert parse_kv(answer.headers["x-baton-kv"])["transferred"] == 150
        wait_until(lambda: prefiller.all_blocks_free() and other.all_blocks_free())
        assert leases() == [3, 2, 1, 0]
        assert proxy.metrics()['baton_proxy_retries_total{leg="decode"}'] == 2
        assert proxy.metrics()['baton_proxy_retries_total{leg="prefill"}'] == 0


@pytest.mark.slow
def test_whenever_clients_leave_no_lease_has_to_expire(tiny_model):
    dice = random.Random(7)

    async def ask(port: int, leaves_after_s: float | None) -> None:
        prompt: Any = fresh_prompt(dice.randrange(20, 300))
        if dice.random() < 0.2:
            prompt = [prompt, fresh_prompt(40)]
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        body = json.dumps({**asked, "stream": dice.random() < 0.5}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(), leaves_after_s)
        writer.close() if dice.random() < 0.5 else writer.transport.abort()

    async def ask_all(port: int) -> None:
        began = asyncio.get_running_loop().time()
        for _ in range(4):
            await ask(port, None)
        long_s = (
            (asyncio.get_running_loop().time() - began) / 4 * 3
        )  # beside five others
        turns = asyncio.Semaphore(6)

        async def take_turn() -> None:
            async with turns:
                await ask(port, dice.uniform(0, long_s))

        await asyncio.gather(*(take_turn() for _ in range(300)))

    with cluster(tiny_model, prefill_argv=("--lease-s", str(_LEASE_S))) as made:
        prefiller, decode = made.prefill[0], made.decode[0]
        asyncio.run(ask_all(made.proxy.port))
        wait_until(lambda: prefiller.all_blocks_free() and decode.all_blocks_free(), 30)
        assert prefiller.leases("aborted") > 0

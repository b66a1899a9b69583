"""Leased KV that nobody has heard of, or has no use for, comes home long before its lease ends.

Between the proxy and the prefill server stands a gate that can keep back what is answered.
"""

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.reference import Reference
from tests.rigs.client import MODEL, complete, fresh_prompt, prefill
from tests.rigs.cluster import Cluster, Server, cluster, running, start_proxy, wait_until

_SOON_S = 10.0  # a lease lasts for 30
_LEASED = 'baton_kv_blocks{state="leased"}'


class Gate:
    """Passes connections on to a server. Of what the server answers to prefill legs, only the first
    `lets_through` bytes go back.

    Attributes:
        kept: bytes that have come of an answer, once it is whole.
    """

    def __init__(self, server: Server, lets_through: int) -> None:
        self._server = server
        self._lets_through = lets_through
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.kept = 0

    def __enter__(self) -> "Gate":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server.port))
                is_leg = threading.Event()
                for run in (self._ask, self._answer):
                    threading.Thread(target=run, args=(client, server, is_leg), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket, is_leg: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if data.startswith(b"POST /v1/"):
                    is_leg.set()
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _answer(
        self, client: socket.socket, server: socket.socket, is_leg: threading.Event
    ) -> None:
        answer = b""
        with contextlib.suppress(OSError), client, server:
            while data := server.recv(65536):
                passed = max(0, self._lets_through - len(answer)) if is_leg.is_set() else len(data)
                client.sendall(data[:passed])
                answer += data
                if is_leg.is_set() and answer.endswith(b"}"):
                    self.kept = len(answer)


@contextlib.contextmanager
def _gated(tiny_cluster: Cluster, lets_through: int) -> Iterator[tuple[Gate, Server]]:
    """A gate in front of the cluster's prefill server, and a proxy that knows it by the gate."""
    with Gate(tiny_cluster.prefill[0], lets_through) as gate:
        proxy = start_proxy([gate], tiny_cluster.decode, "--shutdown-grace-s", "0.1")  # type: ignore[list-item]
        with running(proxy):
            yield gate, proxy


@pytest.mark.parametrize(
    ("who", "lets_through"),
    [("client", 0), ("client", 700), ("proxy", 700)],
    ids=["client-nothing of it", "client-half a body", "proxy-half a body"],
)
def test_kv_comes_home_of_which_the_answer_is_under_way_when_somebody_leaves(
    tiny_cluster: Cluster, who: str, lets_through: int
) -> None:
    prefiller = tiny_cluster.prefill[0]
    wait_until(prefiller.all_blocks_home)
    before = prefiller.leases("aborted")
    body = json.dumps(
        {"model": MODEL, "prompt": [fresh_prompt(), fresh_prompt()], "max_tokens": 5}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with _gated(tiny_cluster, lets_through) as (gate, proxy):
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
            client.sendall(head.encode() + body)
            wait_until(lambda: gate.kept > 1000)
            wait_until(lambda: prefiller.metrics()[_LEASED] > 0)
            if who == "proxy":
                assert proxy.stop() == 0
        wait_until(prefiller.all_blocks_home, _SOON_S)
        wait_until(lambda: prefiller.leases("aborted") == before + 2)


def test_kv_of_a_reference_that_a_decode_server_rejects_comes_home(
    tiny_cluster: Cluster, tiny_reference: Reference
) -> None:
    prefiller, decode = tiny_cluster.prefill[0], tiny_cluster.decode[0]
    wait_until(prefiller.all_blocks_home)
    before = prefiller.leases("aborted")
    prompt, other = fresh_prompt(), fresh_prompt()
    params = prefill(prefiller.url, other)
    wait_until(lambda: prefiller.metrics()[_LEASED] > 0)  # an engine tells now and then
    answer = complete(decode.url, prompt, 6, kv_transfer_params=params)
    assert answer.token_ids == tiny_reference.generate(prompt, 6)
    assert answer.kv["transferred"] == 0
    wait_until(prefiller.all_blocks_home, _SOON_S)
    wait_until(lambda: prefiller.leases("aborted") == before + 1)


@pytest.mark.slow
def test_whenever_clients_leave_no_lease_has_to_expire(tiny_model: Path) -> None:
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
        long_s = (asyncio.get_running_loop().time() - began) / 4 * 3  # beside five others
        turns = asyncio.Semaphore(6)

        async def take_turn() -> None:
            async with turns:
                await ask(port, dice.uniform(0, long_s))

        await asyncio.gather(*(take_turn() for _ in range(300)))

    with cluster(tiny_model, prefill_argv=("--lease-s", "120")) as made:
        prefiller, decode = made.prefill[0], made.decode[0]
        asyncio.run(ask_all(made.proxy.port))
        wait_until(lambda: prefiller.all_blocks_home() and decode.all_blocks_home(), 30)
        assert prefiller.leases("aborted") > 0

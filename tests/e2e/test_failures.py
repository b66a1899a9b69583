"""Faults of servers, or of connections between servers, never change the text that a
client gets.
"""

import json
import signal
import threading
from pathlib import Path

import httpx
import pytest

from tests import stopping
from tests.rigs.client import Stream, complete, fresh_prompt, greedy, post, prefill
from tests.rigs.cluster import (
    Server,
    cluster,
    prefill_ports,
    running,
    start_decode,
    start_prefill,
    wait_until,
)
from tests.rigs.plain_http import http


@pytest.fixture
def prompt() -> list[int]:
    return fresh_prompt()


def _assert_recomputed(
    decode: Server, prompt: list[int], params: object, expected: list[int]
) -> None:
    answer = complete(decode.url, prompt, len(expected), kv_transfer_params=params)
    assert answer.token_ids == expected
    assert answer.kv["transferred"] == 0
    assert answer.kv["recomputed"] + answer.kv["skipped"] == len(prompt)
    wait_until(decode.all_blocks_free)


def test_released_kv_is_freed_and_not_used(tiny_cluster, tiny_reference, prompt):
    server = tiny_cluster.prefill[0]
    params = prefill(server.url, prompt)
    # The values in /metrics are updated with a short delay.
    wait_until(lambda: not server.all_blocks_free())
    for offered, released in (
        ({**params, "lease_id": "0" * 32}, 0),
        (params, 1),
        (params, 1),
    ):
        body = {"kv_transfer_params": offered}
        answer = http.post(f"{server.url}/release_kv", json=body, timeout=30)
        assert (answer.status_code, answer.json()) == (200, {"released": released})
    wait_until(server.all_blocks_free, 10)  # the lease would last for 30 s
    expected = tiny_reference.generate(prompt, 6)
    _assert_recomputed(tiny_cluster.decode[0], prompt, params, expected)


def test_stopping_prefill_server_waits_for_pulls_until_a_second_signal(
    tiny_cluster, tiny_model, tiny_reference, prompt
):
    server = start_prefill(tiny_model, "--shutdown-grace-s", "600")
    with running(server):
        params = prefill(server.url, prompt)
        prefill(server.url, fresh_prompt())  # no server pulls this KV
        ranks = server.engine_pids()
        server.child.signal(signal.SIGTERM)
        wait_until(lambda: not _listens(server))
        answer = complete(
            tiny_cluster.decode[0].url, prompt, 6, kv_transfer_params=params
        )
        assert answer.token_ids == tiny_reference.generate(prompt, 6)
        assert answer.kv["transferred"] == len(prompt)
        server.child.signal(signal.SIGTERM)
        assert server.child.exited.wait(60)
        assert server.child.process.returncode == 130
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))


def _listens(server: Server) -> bool:
    try:
        http.get(f"{server.url}/health", timeout=10)
    except httpx.TransportError:
        return False
    return True


def test_prefill_server_killed_during_a_transfer_loses_no_answer(
    tiny_model, tiny_reference, prompt, ports
):
    argv = (
        "--transfer",
        "nixl",
        "--fence-timeout-s",
        "20",
        "--handshake-timeout-s",
        "3",
    )
    # A READ over TCP needs the process of the prefill server, which the test suspends.
    tcp = {"UCX_TLS": "tcp,self"}
    port_argv = prefill_ports(*ports)
    with cluster(
        tiny_model, prefill_argv=port_argv, decode_argv=argv, env=tcp
    ) as killed_cluster:
        (prefiller,) = killed_cluster.prefill
        (decode,) = killed_cluster.decode
        complete(killed_cluster.url, fresh_prompt(70), 3)  # completes the handshake
        expected = tiny_reference.generate(prompt, 12)
        params = prefill(prefiller.url, prompt)
        prefiller.signal_engine(signal.SIGSTOP)  # now no READ can end
        stream = Stream(decode.url, prompt, 12, kv_transfer_params=params)
        stream.wait_for_events(1)  # the first token arrives before any KV
        assert decode.metrics()["baton_requests_receiving"] <= 1
        prefiller.signal_engine(signal.SIGKILL)
        stream.assert_tokens(expected)
        wait_until(decode.all_blocks_free)
        # The prefill server ends after its engine has died. The proxy continues without
        # it.
        assert prefiller.child.exited.wait(30)
        assert prefiller.child.process.returncode == 1
        answer = complete(killed_cluster.url, prompt, 12)
        assert answer.token_ids == expected and answer.kv["transferred"] == 0
        with running(start_prefill(tiny_model, *port_argv, **tcp)):
            killed_cluster.wait_until_ready("prefill-0")
            after = fresh_prompt(90)
            answer = complete(killed_cluster.url, after, 5)
            assert answer.token_ids == tiny_reference.generate(after, 5)
            assert answer.kv["transferred"] == 90
            wait_until(decode.all_blocks_free)


def _stop_during_a_request(server: Server, prompt: list[int], seconds: float) -> None:
    """Suspend a server's HTTP process, during a request, for longer than
    --hang-timeout-s.

    The engine is not suspended and keeps sending. So the server must not regard it as
    hanging.
    """
    body = greedy(prompt, 400, stream=True)
    with http.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=60
    ) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        stopping.send(server.child.pid, signal.SIGSTOP)
        threading.Event().wait(seconds)
        stopping.send(server.child.pid, signal.SIGCONT)
        *_, last = lines
    assert last == "data: [DONE]"


def test_hanging_engine_is_given_up(tiny_model, prompt):
    decode = start_decode(
        tiny_model, "--hang-timeout-s", "2", "--shutdown-grace-s", "1"
    )
    with running(decode):
        complete(decode.url, prompt, 2)
        _stop_during_a_request(decode, prompt, 2.5)
        decode.signal_engine(signal.SIGSTOP)
        answer = post(decode.url, prompt=prompt, max_tokens=4)
        assert answer.status_code == 503
        assert "--hang-timeout-s" in answer.json()["error"]["message"]
        assert decode.child.exited.wait(30)
        assert decode.child.process.returncode == 1


_KILLED = "decode.{}: killed by SIGKILL"


def _rank_pid(server: Server, rank: int) -> int:
    """Return the pid of this rank's process."""
    for pid in server.engine_pids():
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if argv[argv.index(b"--rank") + 1] == str(rank).encode():
            return pid
    raise AssertionError(f"{server.name} has no rank {rank}")


@pytest.mark.parametrize(
    ("tp", "rank", "signum", "message"),
    [
        pytest.param(
            2, 1, signal.SIGKILL, _KILLED.format(1), id="a follower is killed"
        ),
        pytest.param(
            4,
            2,
            signal.SIGKILL,
            _KILLED.format(2),
            id="one of three followers is killed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            0,
            signal.SIGKILL,
            _KILLED.format(0),
            id="rank 0 is killed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            1,
            signal.SIGSTOP,
            "--hang-timeout-s",
            id="a follower stops",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_lost_rank_ends_its_engine_with_one_error(
    tiny_model, prompt, tp, rank, signum, message
):
    hang_s = "2" if signum == signal.SIGSTOP else "60"
    decode = start_decode(tiny_model, "--tp", str(tp), "--hang-timeout-s", hang_s)
    with running(decode):
        complete(decode.url, prompt, 2)
        stream = Stream(decode.url, prompt, 400).wait_for_events()
        stopping.send(_rank_pid(decode, rank), signum)
        stream.join(60)
        error = json.loads(stream.events[-1])["error"]
        assert error["code"] == "engine_died"
        assert message in error["message"]
        assert decode.child.exited.wait(60)
        assert decode.child.process.returncode == 1

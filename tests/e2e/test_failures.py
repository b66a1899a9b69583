"""Faults between two servers: no client ever gets other text because of them."""

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


def test_kv_that_was_released_comes_home_and_is_not_used(
    tiny_cluster, tiny_reference, prompt
):
    server = tiny_cluster.prefill[0]
    params = prefill(server.url, prompt)
    wait_until(
        lambda: not server.all_blocks_free()
    )  # what /metrics tells is of a moment ago
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


def test_a_prefill_server_told_to_end_waits_for_its_kv_and_told_twice_for_nothing(
    tiny_cluster, tiny_model, tiny_reference, prompt
):
    server = start_prefill(tiny_model, "--shutdown-grace-s", "600")
    with running(server):
        params = prefill(server.url, prompt)
        prefill(server.url, fresh_prompt())  # for whose KV nobody comes
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


def test_a_prefill_server_killed_in_mid_transfer_costs_no_answer_and_its_successor_is_used(
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
    tcp = {"UCX_TLS": "tcp,self"}  # over which a stopped server's KV cannot be read
    port_argv = prefill_ports(*ports)
    with cluster(tiny_model, prefill_argv=port_argv, decode_argv=argv, env=tcp) as own:
        prefiller, decode = own.prefill[0], own.decode[0]
        complete(own.url, fresh_prompt(70), 3)  # the handshake is done
        expected = tiny_reference.generate(prompt, 12)
        params = prefill(prefiller.url, prompt)
        prefiller.signal_engine(signal.SIGSTOP)  # no READ can end
        asked = Stream(decode.url, prompt, 12, kv_transfer_params=params)
        asked.wait_for_events(1)  # the first token comes before any KV has moved
        assert decode.metrics()["baton_requests_receiving"] <= 1
        prefiller.signal_engine(signal.SIGKILL)
        asked.assert_tokens(expected)
        wait_until(decode.all_blocks_free)
        # The server whose engine died ends as a whole, and the proxy goes on without it.
        assert prefiller.child.exited.wait(30)
        assert prefiller.child.process.returncode == 1
        answer = complete(own.url, prompt, 12)
        assert answer.token_ids == expected and answer.kv["transferred"] == 0
        with running(start_prefill(tiny_model, *port_argv, **tcp)):
            own.wait_until_ready("prefill-0")
            after = fresh_prompt(90)
            answer = complete(own.url, after, 5)
            assert answer.token_ids == tiny_reference.generate(after, 5)
            assert answer.kv["transferred"] == 90
            wait_until(decode.all_blocks_free)


def _stop_beside_a_request(server: Server, prompt: list[int], seconds: float) -> None:
    """Stops the HTTP process for longer than an engine may be silent; its own speaks meanwhile."""
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


def test_an_engine_that_hangs_is_given_up(tiny_model, prompt):
    decode = start_decode(
        tiny_model, "--hang-timeout-s", "2", "--shutdown-grace-s", "1"
    )
    with running(decode):
        complete(decode.url, prompt, 2)
        _stop_beside_a_request(decode, prompt, 2.5)
        decode.signal_engine(signal.SIGSTOP)
        answer = post(decode.url, prompt=prompt, max_tokens=4)
        assert answer.status_code == 503
        assert "--hang-timeout-s" in answer.json()["error"]["message"]
        assert decode.child.exited.wait(30) and decode.child.process.returncode == 1


_KILLED = "decode.{}: killed by SIGKILL"


def _rank_pid(server: Server, rank: int) -> int:
    """The process of one rank."""
    for pid in server.engine_pids():
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if argv[argv.index(b"--rank") + 1] == str(rank).encode():
            return pid
    raise AssertionError(f"{server.name} has no rank {rank}")


@pytest.mark.parametrize(
    ("tp", "rank", "number", "told"),
    [
        pytest.param(
            2, 1, signal.SIGKILL, _KILLED.format(1), id="a follower is killed"
        ),
        pytest.param(
            4,
            2,
            signal.SIGKILL,
            _KILLED.format(2),
            id="one of three is",
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
def test_a_lost_rank_ends_its_engine_with_one_error(
    tiny_model, prompt, tp, rank, number, told
):
    hang_s = "2" if number == signal.SIGSTOP else "60"
    decode = start_decode(tiny_model, "--tp", str(tp), "--hang-timeout-s", hang_s)
    with running(decode):
        complete(decode.url, prompt, 2)
        asked = Stream(decode.url, prompt, 400).wait_for_events()
        stopping.send(_rank_pid(decode, rank), number)
        asked.join(60)
        error = json.loads(asked.events[-1])["error"]
        assert error["code"] == "engine_died" and told in error["message"], error
        assert decode.child.exited.wait(60) and decode.child.process.returncode == 1

"""`python -m proxy` as a process."""

import queue
import signal
import socket
import sys

import httpx

from protocol.process import lifecycle


def start(*argv: str) -> tuple[lifecycle.Child, "queue.Queue[lifecycle.Event]"]:
    events: queue.Queue[lifecycle.Event] = queue.Queue()
    command = [sys.executable, "-m", "proxy", *argv]
    return lifecycle.spawn(command, name="proxy", on_event=events.put), events


def test_it_reports_its_port_serves_and_ends_with_a_signal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    child, events = start("--port", "0", "--prefill", nobody, "--decode", nobody)
    try:
        ready = events.get(timeout=60)
        assert isinstance(ready, lifecycle.Ready)
        url = ready.info["url"]
        assert url == f"http://127.0.0.1:{ready.info['port']}"
        with httpx.Client(base_url=url, trust_env=False, verify=False, timeout=30) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
            assert client.post("/v1/completions", json={}).status_code == 503
        child.signal(signal.SIGTERM)
        ended = events.get(timeout=60)
        assert isinstance(ended, lifecycle.Exited)
        assert ended.returncode == 0
    finally:
        child.kill()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child, events = start("--port", str(port), "--decode", "http://127.0.0.1:1")
        failed = events.get(timeout=60)
        assert isinstance(failed, lifecycle.Failed)
        assert str(port) in failed.reason
        ended = events.get(timeout=60)
        assert isinstance(ended, lifecycle.Exited)
        assert ended.returncode == 1
        assert child.failure == failed.reason


def test_a_proxy_without_a_decode_server_could_answer_nothing() -> None:
    _, events = start("--port", "0", "--prefill", "http://127.0.0.1:1")
    failed = events.get(timeout=60)
    assert isinstance(failed, lifecycle.Failed)
    assert "--decode" in failed.reason
    ended = events.get(timeout=60)
    assert isinstance(ended, lifecycle.Exited)
    assert ended.returncode == 2

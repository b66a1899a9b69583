"""`baton up` starts, supervises and stops its programs, which are fakes here."""

import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request

import pytest

from tests.ports import reserved_ports
from tests.rigs.launcher import DEADLINE_S, get, has_ended, launched, query_processes


def test_up_starts_all_processes_prints_ready_and_ends_on_sigterm():
    with launched("serve,serve,serve", "--prefill.count=2") as launcher:
        endpoint = launcher.endpoint()
        curl = launcher.until("curl ")
        processes_by_url = query_processes(endpoint)
        assert len(processes_by_url) == 4
        for process in processes_by_url.values():
            assert "BATON_CLUSTER_SECRET" in process["environ"]
            assert "secret" not in " ".join(process["argv"])
        assert f"{endpoint}/v1/completions" in curl and '"model": "fake"' in curl
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 0
        assert launcher.lines[-2:] == ["baton | stopping", "baton | stopped"]
        assert "prefill-1 | prefill starts" in launcher.lines
        assert all(has_ended(process["pid"]) for process in processes_by_url.values())


def test_the_page_is_announced_first_then_the_endpoint():
    with launched("serve,serve,serve") as launcher:
        endpoint = launcher.endpoint()
        launcher.until("curl ")
        page, api = launcher.lines[-3:-1]
        assert (
            page == f"ready {endpoint}/    (page of this cluster: open it in a browser)"
        )
        assert api == f"      {endpoint}/v1  (endpoint for OpenAI clients)"


def test_without_the_page_only_the_endpoint_is_announced():
    with launched("serve,serve,serve", "--no-ui") as launcher:
        ready = launcher.until("ready ")
        assert ready.split()[1].endswith("/v1")
        assert launcher.until("curl ") and "page" not in " ".join(launcher.lines[-2:])


def test_cluster_is_ready_after_the_proxy_and_prints_what_the_proxy_waits_for():
    with launched("serve,serve,waiting", "--start-timeout-s=8") as launcher:
        assert launcher.end() == 1
        assert not any(line.startswith("ready ") for line in launcher.lines)
        missing = "the proxy to find its servers (no prefill server is ready)"
        assert launcher.lines[-1].endswith(f"(--start-timeout-s), waited for {missing}")


def test_warming_ends_once_the_servers_are_ready(monkeypatch):
    monkeypatch.setenv("ONLY_WARM", "1")
    # The port is in use, as if a cluster were serving on it.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = f"--port={listener.getsockname()[1]}"
        with launched("serve,serve,never", port) as launcher:
            assert launcher.end() == 0
    output = "\n".join(launcher.lines)
    assert "baton | models and compiled kernels are stored" in output
    assert "proxy |" not in output and "ready http" not in output


def test_http_proxy_variable_and_slow_model_list_do_not_matter(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        closed_url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("http_proxy", closed_url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with launched("serve,serve,slow") as launcher:
        assert '"model": "fake"' in launcher.until("curl ")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 0


def test_ctrl_c_reaches_only_the_launcher_and_ends_all():
    with launched("serve,serve,serve") as launcher:
        processes_by_url = query_processes(launcher.endpoint())
        # Like a terminal, send the signal to the whole process group.
        os.killpg(launcher.process.pid, signal.SIGINT)
        assert launcher.end() == 0
        assert all(has_ended(process["pid"]) for process in processes_by_url.values())


@pytest.mark.parametrize(
    ("modes", "reason"),
    [
        (
            "fail,serve,serve",
            "prefill-0: no model here: see --tp, --model and --hang-timeout-s",
        ),
        ("serve,crash,serve", "ValueError: --tp 3 does not divide 4 heads"),
        ("serve,serve,fail", "proxy: no model here"),
    ],
)
def test_failed_start_ends_all_processes_and_prints_the_reason_last(modes, reason):
    with launched(modes) as launcher:
        assert launcher.end() == 1
        last = launcher.lines[-1]
        assert last.startswith("baton up: error: ") and reason in last
        name, output = last.removeprefix("baton up: error: ").split(": ", 1)
        assert name in ("prefill-0", "decode-0 ended", "proxy")
        if name == "prefill-0":
            assert f"prefill-0 | error: {output}" in launcher.lines


def test_waiting_is_explained_and_times_out():
    with launched("serve,hang,fail", "--start-timeout-s=5") as launcher:
        assert launcher.end() == 1
        # The first lines may name both servers. The last line must name only the
        # hanging one.
        notes = [line for line in launcher.lines if "waiting for" in line]
        assert notes and re.fullmatch(
            r"baton \| \d+ s, waiting for decode-0 \(starting\)", notes[-1]
        )
        output = "not ready in time (--start-timeout-s), waited for decode-0 (starting)"
        assert launcher.lines[-1] == f"baton up: error: {output}"


@pytest.mark.parametrize("killed", [False, True])
def test_without_restarts_a_process_that_dies_ends_the_cluster_and_is_named(killed):
    with launched("serve,serve,serve", "--max-restarts=0") as launcher:
        processes_by_url = query_processes(launcher.endpoint())
        _, prefill_url, decode_url = processes_by_url
        if killed:
            os.kill(processes_by_url[decode_url]["pid"], signal.SIGKILL)
        else:
            with pytest.raises(OSError):
                get(f"{prefill_url}/die")
        assert launcher.end() == 1
        last = launcher.lines[-1]
        if killed:
            assert "decode-0 ended: " in last and "SIGKILL" in last
        else:
            assert last.endswith("prefill-0 ended: out of luck (exit status 3)")
        assert all(has_ended(process["pid"]) for process in processes_by_url.values())


def test_sigkill_of_the_launcher_leaves_no_orphan():
    with launched("serve,serve,serve", "--decode.count=2") as launcher:
        processes_by_url = query_processes(launcher.endpoint())
        launcher.process.kill()
        assert all(has_ended(process["pid"]) for process in processes_by_url.values())


@pytest.mark.parametrize(
    ("grace_s", "num_signals", "status"), [(0.1, 1, 1), (1000, 2, 130)]
)
def test_hung_process_is_killed_after_the_grace_period_or_a_second_ctrl_c(
    grace_s, num_signals, status
):
    with launched("serve,stubborn,serve", f"--shutdown-grace-s={grace_s}") as launcher:
        processes_by_url = query_processes(launcher.endpoint())
        launcher.process.send_signal(signal.SIGINT)
        if num_signals > 1:
            launcher.until("baton | stopping")
            launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == status
        assert status > 1 or "killed" in launcher.lines[-1]
        assert all(has_ended(process["pid"]) for process in processes_by_url.values())


def test_stop_signal_during_the_start_ends_all_processes():
    with launched("serve,hang,serve") as launcher:
        launcher.until("decode-0 | decode starts")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 0


@pytest.mark.parametrize(
    "reads_at_end", [False, True], ids=["never read", "read at its end"]
)
def test_launcher_serves_and_ends_though_its_output_is_not_read(reads_at_end):
    with (
        reserved_ports(1) as (port,),
        launched("serve,chatty,serve", f"--port={port}") as launcher,
    ):
        endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                assert get(f"{endpoint}/v1/models")["data"]
                break
            except urllib.error.URLError:
                assert time.monotonic() < deadline
        processes_by_url = query_processes(endpoint)
        launcher.process.send_signal(signal.SIGTERM)
        if reads_at_end:
            assert launcher.end() == 0
            assert launcher.lines[-1] == "baton | stopped"
            assert any("lines were dropped" in line for line in launcher.lines)
        else:
            assert launcher.process.wait(DEADLINE_S) == 0
        assert all(has_ended(process["pid"]) for process in processes_by_url.values())


def test_a_taken_port_is_refused_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with launched("serve,serve,serve", f"--port={port}") as launcher:
            assert launcher.end() == 1
            assert f"cannot listen on 127.0.0.1:{port}" in launcher.lines[-1]
            assert "make serve PORT=" in launcher.lines[-1]
            assert not any("starts" in line for line in launcher.lines)

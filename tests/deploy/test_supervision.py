"""`baton up` restarts its parts, gives up on those that flap, and scales.

The programs are fakes; tests/e2e/test_supervision.py has real servers.
"""

import json
import os
import signal
import threading
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import local
from deploy.cluster.cluster import Cluster
from deploy.cluster.places import LocalPlace, OnEvent, PlaceError
from deploy.cluster.restarts import RestartBudget
from deploy.cluster.supervisor import Part, State, Supervisor
from deploy.commands import Command, proxy_command
from protocol.settings.machine import cluster_secret
from protocol.settings.settings import ServeSettings, UpSettings, load
from protocol.settings.sources import ConfigError
from tests.rigs.cluster import wait_until
from tests.rigs.launcher import get, has_ended, launched, query_processes


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def die(url: str) -> None:
    with pytest.raises(OSError):
        get(f"{url}/die")


def wait_for_another(url: str, pid: int) -> dict[str, Any]:
    """Wait until a process with another pid serves at a URL; return its answer."""
    answers: list[dict[str, Any]] = []

    def is_restarted() -> bool:
        try:
            answers.append(get(url))
        except OSError:
            return False
        return bool(answers[-1]["pid"] != pid)

    wait_until(is_restarted, 60)
    return answers[-1]


# -- back-off


def test_backoff_doubles_to_its_limit_and_starts_again_after_the_window():
    now = [0.0]
    budget = RestartBudget(7, 600.0, lambda: now[0])
    assert [budget.take() for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, None]
    now[0] = 599.9
    assert budget.take() is None
    now[0] = 600.0
    assert budget.take() == 1.0


def test_restarts_that_are_spread_out_are_never_too_many():
    now = [0.0]
    budget = RestartBudget(2, 10.0, lambda: now[0])
    for now[0] in range(0, 100, 6):
        assert budget.take() in (1.0, 2.0)


# -- restarts


@pytest.mark.parametrize("part", ["decode-1", "proxy"])
def test_killed_part_is_restarted_with_the_same_options_at_the_same_url(part):
    with launched("serve,serve,serve", "--decode.count=2") as launcher:
        processes_by_url = query_processes(launcher.endpoint())
        proxy_url, *_, decode_url = processes_by_url
        url = proxy_url if part == "proxy" else decode_url
        os.kill(processes_by_url[url]["pid"], signal.SIGKILL)
        notice = launcher.until(f"baton | {part} ended: killed by SIGKILL")
        assert "restarting it in 1 s (restart 1 of 5 within 600 s)" in notice
        assert url in launcher.until(f"baton | {part} is ready again at")
        restarted = get(url)
        options = {"argv", "environ"}
        before = {name: processes_by_url[url][name] for name in options}
        after = {name: restarted[name] for name in options}
        # The first run chose a free port. The second run gets this port as an option.
        for each in (before, after):
            each["argv"] = sorted(
                word for word in each["argv"] if not word.startswith(("--port", "--si"))
            )
        assert after == before
        # The other parts were not restarted.
        for other, process in processes_by_url.items():
            assert other == url or get(other)["pid"] == process["pid"]
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 0
        assert has_ended(restarted["pid"])


def test_lines_of_both_runs_are_printed_and_not_mixed():
    with launched("serve,numbered,serve") as launcher:
        processes_by_url = query_processes(launcher.endpoint())
        decode_url = [*processes_by_url][-1]
        os.kill(processes_by_url[decode_url]["pid"], signal.SIGKILL)
        launcher.until("baton | decode-0 is ready again")
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 0
    lines = [line for line in launcher.lines if line.startswith("decode-0 | ")]
    run = ["decode starts", *(f"line {number}" for number in range(2000))]
    assert lines == [f"decode-0 | {text}" for text in 2 * run]
    (death,) = [i for i, line in enumerate(launcher.lines) if "SIGKILL" in line]
    assert launcher.lines.index(lines[-1]) < death
    assert launcher.lines[death:].count(lines[0]) == 1


def test_part_that_flaps_ends_the_cluster_and_is_named_with_its_last_words():
    options = ["--max-restarts=1", "--restart-window-s=60"]
    with launched("serve,serve,serve", *options) as launcher:
        processes_by_url = query_processes(launcher.endpoint())
        _, prefill_url, _ = processes_by_url
        die(prefill_url)
        assert "out of luck" in launcher.until("baton | prefill-0 ended: ")
        wait_for_another(prefill_url, processes_by_url[prefill_url]["pid"])
        launcher.until("baton | prefill-0 is ready again")
        die(prefill_url)
        assert launcher.end() == 1
        assert launcher.lines[-1] == (
            "baton up: error: prefill-0 ended: out of luck (exit status 3); no restart "
            "is left: it has had 1 within 60 s (--max-restarts, --restart-window-s)"
        )
        for process in processes_by_url.values():
            assert has_ended(process["pid"])


@pytest.mark.slow
def test_restarted_part_that_cannot_start_is_retried_until_no_restart_is_left():
    options = ["--max-restarts=2", "--decode.count=1"]
    with launched("serve,fragile,serve", *options) as launcher:
        *_, decode_url = query_processes(launcher.endpoint())
        die(decode_url)
        assert launcher.end() == 1
        last = launcher.lines[-1]
        assert "decode-0 ended: the device is gone; no restart is left" in last
        delays = [line for line in launcher.lines if "restarting it in" in line]
        assert "in 1 s (restart 1 of 2" in delays[0]
        assert "in 2 s (restart 2 of 2" in delays[1] and len(delays) == 2


def test_ctrl_c_during_the_backoff_ends_the_cluster():
    with launched("serve,serve,serve") as launcher:
        processes_by_url = query_processes(launcher.endpoint())
        *_, decode_url = processes_by_url
        die(decode_url)
        launcher.until("baton | decode-0 ended: out of luck")
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end() == 0
        assert "baton | decode-0 is ready again" not in "\n".join(launcher.lines)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--max-restarts=0", "--restart-window-s=60"], "leave one of the two out"),
        (["--max-restarts=-1"], "--max-restarts"),
        (["--ray-address=a:1"], "--ray-address: a:1 has no effect without --on ray"),
        (["--on=ray", "--ray-address=ray://a:1"], "ray job submit"),
        (["--on=rai"], "--on"),
    ],
)
def test_options_without_effect_are_refused(argv, problem):
    with pytest.raises(ConfigError, match=problem):
        load(UpSettings, argv)


def test_ray_that_is_not_installed_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(local, "find_spec", lambda _name: None)
    with pytest.raises(PlaceError, match=r"pip install 'baton-pd\[ray\]'"):
        local.create_place(load(UpSettings, ["--on=ray"]), only_warm=False)
    with pytest.raises(PlaceError, match="run `baton warm` without --on ray"):
        local.create_place(load(UpSettings, ["--on=ray"]), only_warm=True)


class StillPlace(LocalPlace):
    """A place with a single process, whose events the test sends."""

    def __init__(self) -> None:
        super().__init__()
        self.process = StillProcess()

    def spawn(self, command: Command, on_event: OnEvent) -> Any:
        self.process.send = on_event
        return self.process


class StillProcess:
    send: OnEvent

    def __init__(self) -> None:
        self.exited = threading.Event()
        self.output_ended = threading.Event()
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.exited.set()
        self.send("exited", None)

    def reason(self) -> str:
        return "killed by SIGKILL"


def test_end_of_a_removed_part_is_not_an_end_of_the_cluster():
    """The part ends while `baton scale` drains it, just before its removal."""
    supervisor = Supervisor(
        max_restarts=0, restart_window_s=60, start_timeout_s=60, grace_s=1
    )
    place = StillPlace()
    command = Command("decode-1", "decode", argv=())
    part = supervisor.add("decode-1", "decode", lambda: command, place)
    place.process.send("ready", {"port": 1})
    supervisor.take_event(0)
    place.process.exited.set()
    place.process.send("exited", None)
    supervisor.retire(part)
    supervisor.take_event(0)
    assert supervisor.parts == []
    assert part.state is not State.BACKING_OFF


def make_supervisor(max_restarts: int = 5) -> Supervisor:
    return Supervisor(
        max_restarts=max_restarts, restart_window_s=60, start_timeout_s=60, grace_s=0
    )


def add_ready_part(supervisor: Supervisor, place: StillPlace) -> Part:
    command = Command("decode-1", "decode", argv=())
    part = supervisor.add("decode-1", "decode", lambda: command, place)
    place.process.send("ready", {"port": 1})
    supervisor.take_event(0)
    return part


def end(supervisor: Supervisor, place: StillPlace) -> None:
    place.process.exited.set()
    place.process.output_ended.set()
    place.process.send("exited", None)
    supervisor.take_event(0)


class FullPlace(StillPlace):
    """A place that cannot start its process again after it has ended."""

    def spawn(self, command: Command, on_event: OnEvent) -> Any:
        if self.process.exited.is_set():
            raise BlockingIOError("no process is left")
        return super().spawn(command, on_event)


def test_restart_that_cannot_be_started_is_tried_again_later():
    supervisor = make_supervisor()
    place = FullPlace()
    part = add_ready_part(supervisor, place)
    end(supervisor, place)
    assert part.state is State.BACKING_OFF
    part.deadline = 0.0  # ends the back-off
    supervisor.take_event(0)
    supervisor.take_event(0)
    assert part.state is State.BACKING_OFF
    assert part.last_words == "it could not be started: no process is left"
    assert part.budget.num_restarts == 2


def test_added_part_that_cannot_be_started_is_removed_with_the_reason():
    supervisor = make_supervisor()
    reasons: list[str] = []
    supervisor.on_removed = lambda _part, reason: reasons.append(reason)
    place = FullPlace()
    place.process.exited.set()
    command = Command("decode-1", "decode", argv=())
    supervisor.add("decode-1", "decode", lambda: command, place, is_added=True)
    supervisor.take_event(0)
    assert reasons == ["it could not be started: no process is left"]


def test_server_that_ends_while_it_is_drained_does_not_end_the_cluster():
    supervisor = make_supervisor(max_restarts=0)
    place = StillPlace()
    add_ready_part(supervisor, place).is_leaving = True
    end(supervisor, place)
    assert supervisor.parts == []


def test_server_that_ends_already_gets_no_second_signal():
    """A second signal would kill the server at once."""
    supervisor = make_supervisor()
    place = StillPlace()
    part = add_ready_part(supervisor, place)
    supervisor.retire(part)
    supervisor.end_all()
    assert place.process.signals == [signal.SIGTERM]


def test_scaling_servers_that_the_cluster_does_not_have_is_refused():
    cluster = Cluster(load(ServeSettings, []), LocalPlace())
    cluster._on_request({"id": "x", "role": "prefill", "count": 1})
    assert cluster._problem == "this cluster has decode servers only"


def test_cluster_has_the_secret_of_the_store_that_its_servers_use(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))

    def secret(*argv: str) -> str:
        return Cluster(load(ServeSettings, argv), LocalPlace())._secret

    assert secret() != secret()
    store = "--host-kv=127.0.0.1:9000"
    assert secret(store) == cluster_secret(None).decode()
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "a secret that the user gave")
    assert secret(store) == secret() == "a secret that the user gave"
    # It is passed as a variable, because other users can read command lines.
    urls = {"prefill": [], "decode": ["http://127.0.0.1:1"]}
    command = proxy_command(load(ServeSettings, []), urls, secret())
    assert "a secret that the user gave" not in " ".join(command.argv)
    assert "a secret that the user gave" in command.env["BATON_CLUSTER_SECRET"]


def test_optional_part_that_hangs_is_ended_while_the_others_have_time(monkeypatch):
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("deploy.cluster.supervisor.time", clock)
    supervisor = Supervisor(
        max_restarts=5, restart_window_s=60, start_timeout_s=60, grace_s=1
    )
    command = Command("kv", "kv", argv=())
    supervisor.add("kv", "kv", lambda: command, StillPlace(), is_optional=True)
    now_s = 29.0
    supervisor.take_event(0)
    assert len(supervisor.parts) == 1
    now_s = 31.0
    supervisor.take_event(0)  # kills the part
    supervisor.take_event(0)  # handles the end of the part
    assert supervisor.parts == []


# -- scaling


def cluster_report(endpoint: str) -> dict[str, Any]:
    return dict(get(f"{endpoint}/admin/cluster"))


def member_urls(endpoint: str) -> set[str]:
    return {member["url"] for member in get(f"{endpoint}/admin/members")["members"]}


def part_report(endpoint: str, name: str) -> dict[str, Any]:
    parts = cluster_report(endpoint).get("parts", [])
    return next((dict(part) for part in parts if part["name"] == name), {})


def states(endpoint: str) -> dict[str, str]:
    parts = cluster_report(endpoint).get("parts", [])
    return {part["name"]: part["state"] for part in parts}


def scale(endpoint: str, role: str, count: int) -> None:
    post(f"{endpoint}/admin/scale", {"role": role, "count": count})


def test_scaling_adds_servers_to_the_proxy_and_drains_before_it_ends_them():
    with launched("serve,serve,serve") as launcher:
        endpoint = launcher.endpoint()
        scale(endpoint, "decode", 3)
        expected = dict.fromkeys(
            ["prefill-0", "decode-0", "proxy", "decode-1", "decode-2"], "ready"
        )
        wait_until(lambda: states(endpoint) == expected, 60)
        members = member_urls(endpoint)
        parts = cluster_report(endpoint)["parts"]
        urls = {part["name"]: part["url"] for part in parts if part["name"] != "proxy"}
        assert members == set(urls.values())
        removed = [get(urls[name]) for name in ("decode-1", "decode-2")]
        scale(endpoint, "decode", 1)
        wait_until(lambda: len(states(endpoint)) == 3, 60)
        assert all(has_ended(process["pid"]) for process in removed)
        members = member_urls(endpoint)
        assert members == {urls["prefill-0"], urls["decode-0"]}
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 0
        lines = launcher.lines
        assert lines.index("baton | decode-2 finishes its requests and then ends") < (
            lines.index("baton | decode-2 has ended")
        )


def test_repeated_refusal_of_the_proxy_is_printed_once():
    with launched("serve,serve,refusing") as launcher:
        endpoint = launcher.endpoint()
        scale(endpoint, "decode", 2)
        wait_until(lambda: get(endpoint)["refusals"] >= 3, 60)
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end() == 0
        line = "baton | the proxy's members are not up to date yet: the name is taken"
        assert launcher.lines.count(line) == 1


def test_report_shows_that_a_part_waits_for_its_restart():
    with launched("serve,fragile,serve") as launcher:
        endpoint = launcher.endpoint()
        *_, decode_url = query_processes(endpoint)
        die(decode_url)

        def is_backing_off() -> bool:
            report = part_report(endpoint, "decode-0")
            return report.get("state") == "backing_off"

        wait_until(is_backing_off, 60)
        report = part_report(endpoint, "decode-0")
        assert report["restarts"] >= 1
        assert report["last_words"] in (
            "out of luck (exit status 3)",
            "the device is gone",
        )


def test_added_server_that_cannot_start_is_reported_and_ends_nothing():
    with launched("serve,first,serve") as launcher:
        endpoint = launcher.endpoint()
        scale(endpoint, "decode", 2)
        problem = "decode-1 ended before it was ready: no memory is left"
        wait_until(lambda: cluster_report(endpoint).get("problem") == problem, 60)
        assert states(endpoint).keys() == {"prefill-0", "decode-0", "proxy"}


def test_scaling_beyond_the_devices_is_refused_by_name():
    options = ["--prefill.devices=0", "--decode.devices=1,2", "--decode.count=2"]
    with launched("serve,serve,serve", *options) as launcher:
        endpoint = launcher.endpoint()
        scale(endpoint, "decode", 3)
        wait_until(lambda: bool(cluster_report(endpoint).get("problem")), 60)
        problem = cluster_report(endpoint)["problem"]
        assert problem.startswith("--decode.devices 1,2 are too few for decode-2: ")


@pytest.mark.slow
def test_restarted_proxy_knows_the_servers_that_were_added():
    with launched("serve,serve,serve") as launcher:
        endpoint = launcher.endpoint()
        scale(endpoint, "decode", 2)
        wait_until(lambda: states(endpoint).get("decode-1") == "ready", 60)
        pid = get(endpoint)["pid"]
        os.kill(pid, signal.SIGKILL)
        restarted = wait_for_another(endpoint, pid)
        assert sum(word.startswith("--decode=") for word in restarted["argv"]) == 2
        wait_until(lambda: states(endpoint).get("decode-1") == "ready", 60)

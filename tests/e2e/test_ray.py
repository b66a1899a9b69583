"""`baton up --on ray` on three nodes of this machine. Tests end one of the nodes."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ports import reserved_ports
from tests.rigs.client import MODEL, Stream, complete_all, fresh_prompt
from tests.rigs.cluster import wait_until
from tests.rigs.plain_http import http
from tests.rigs.programs import BATON, ROOT, environment, launched
from tests.rigs.ray_nodes import RayCluster, ray_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

NUM_STREAMS = 4
NUM_TOKENS = 700
# The time limit includes the time until Ray detects the loss of a node, and the start
# of new servers.
RESTART_TIMEOUT_S = 240.0
SERVERS = ("prefill_server", "decode_server")


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    """Yield a Ray cluster of three nodes. The head node runs no servers."""
    with ray_cluster([0, 2, 2], num_spare=1) as cluster:
        yield cluster


def options_of(model: Path, address: str) -> list[str]:
    options = ["up", "--on", "ray", "--ray-address", address, "--model", str(model)]
    options += ["--served-model-name", MODEL, "--port", "0", "--device", "cpu"]
    options += ["--dtype", "float32"]
    return [*options, "--prefill.threads", "1", "--decode.threads", "1"]


def refused(command: Sequence[str]) -> str:
    """Run a command that must end with status 1. Return its last line."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(lines) == 1, done.stderr
    return lines[0].partition("error: ")[2]


def test_servers_that_no_node_can_run_are_refused(tiny_model, ray):
    options = options_of(tiny_model, ray.address)
    message = refused([*BATON, *options, "--decode.threads", "4"])
    assert message == (
        "decode-0 needs 4 CPU on one node, and no node of the Ray cluster has that; "
        "the nodes have 2 CPU; 2 CPU; neither GPU nor CPU. Add a node, or change "
        "--prefill.threads and --decode.threads"
    )
    message = refused([*BATON, *options, "--decode.count", "6"])
    assert message.startswith("7 servers need 7 CPU, and the Ray cluster has 4; ")


def test_address_without_a_cluster_is_refused(tiny_model):
    with reserved_ports(1) as (port,):
        options = options_of(tiny_model, f"127.0.0.1:{port}")
        message = refused([*BATON, *options])
    assert message.startswith(f"no Ray cluster at 127.0.0.1:{port} can be used; ")
    message = refused([*BATON, *options_of(tiny_model, "head")])
    assert message.startswith("head (--ray-address or RAY_ADDRESS) is not HOST:PORT")


@pytest.mark.parametrize(
    ("version", "python"), [("2.9.9", "3.11"), (None, "3.9.1")], ids=["Ray", "Python"]
)
def test_cluster_of_another_version_is_refused(version, python, tiny_model, ray):
    program = (
        "import sys, ray, ray._private.utils as utils; from deploy.cli import main; "
        f"versions = ({version!r} or ray.__version__, {python!r}); "
        "utils.compute_version_info = lambda: versions; sys.exit(main(sys.argv[1:]))"
    )
    options = options_of(tiny_model, ray.address)
    message = refused([sys.executable, "-c", program, *options])
    assert message.startswith("the Ray cluster runs Ray ")
    assert f"and Python {python}; use the same versions" in message
    assert version is None or f"this environment has Ray {version} and" in message


def parts_of(url: str) -> dict[str, Any]:
    """Return the launcher's report of each part, by its name."""
    report = http.get(f"{url}/admin/cluster", timeout=10).json()
    return {part["name"]: part for part in report["parts"]}


def test_streams_outlive_a_node_whose_servers_restart_on_another(tiny_model, ray):
    options = [*options_of(tiny_model, ray.address), "--decode.count", "2"]
    with launched([*BATON, *options]) as program:
        url = program.read_until("ready http").split()[1].rstrip("/")
        wait_until(lambda: http.get(f"{url}/admin/cluster").status_code == 200)
        prompts = [fresh_prompt(40 + 100 * index) for index in range(NUM_STREAMS)]
        answers = complete_all(url, prompts, NUM_TOKENS)
        streams = [Stream(url, prompt, NUM_TOKENS) for prompt in prompts]
        for stream in streams:
            stream.wait_for_events(5)
        # No node has CPUs for all three servers, so one decode server runs on another
        # node and continues.
        (lost,) = [node for node in ray.nodes if node.has("prefill_server")]
        lost.kill()
        program.read_until("baton | prefill-0 ended: ")
        wait_until(
            lambda: not any(stream.is_alive() for stream in streams), RESTART_TIMEOUT_S
        )
        for stream, answer in zip(streams, answers, strict=True):
            stream.assert_tokens(answer.token_ids)
        # The other node has CPUs for two servers. The third waits for a new node.
        new_node = ray.add_node(2)

        def is_complete() -> bool:
            parts = parts_of(url)
            is_ready = all(part["state"] == "ready" for part in parts.values())
            return is_ready and parts["prefill-0"]["restarts"] == 1

        wait_until(is_complete, RESTART_TIMEOUT_S)
        assert any(new_node.has(server) for server in SERVERS)
        assert " its last line: " in parts_of(url)["prefill-0"]["last_words"]
        wait_until(lambda: len(servers_of(url)) == 3 and all(servers_of(url)), 60)
        (answer,) = complete_all(url, [fresh_prompt(200)], 4)
        assert answer.kv["transferred"] > 0
        _check_scaling(url)
        program.process.send_signal(signal.SIGINT)
        assert program.end() == 0, program.lines[-20:]
        assert not any(node.has(each) for node in ray.nodes for each in SERVERS)


def servers_of(url: str) -> list[bool]:
    """Return whether each member of the proxy is ready."""
    return [*http.get(f"{url}/ready", timeout=10).json()["servers"].values()]


def _check_scaling(url: str) -> None:
    """Scale to one decode server while both decode servers have streams. All streams
    must continue.
    """
    prompts = [fresh_prompt(60) for _ in range(NUM_STREAMS)]
    answers = complete_all(url, prompts, NUM_TOKENS)
    streams = [Stream(url, prompt, NUM_TOKENS) for prompt in prompts]
    for stream in streams:
        stream.wait_for_events(5)
    done = subprocess.run(
        [*BATON, "scale", "decode", "1", "--url", url],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RESTART_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "decode-1 draining" in done.stdout
    assert done.stdout.splitlines()[-1] == "decode-0 ready"
    for stream, answer in zip(streams, answers, strict=True):
        stream.assert_tokens(answer.token_ids)

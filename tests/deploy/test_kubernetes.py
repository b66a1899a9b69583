"""The manifests of deploy/k8s, as `kubectl kustomize` renders them.

They are valid for Kubernetes, and every option, variable, port, path and metric in them
is one of Baton's. tests/deploy/test_kubelet.py runs their pods.
"""

import functools
import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.cli import COMMANDS
from protocol.metrics import TABLE
from protocol.settings.settings import PROGRAMS, load
from protocol.settings.sources import MACHINE_VARIABLES, field_paths, variable_name
from tests.rigs.kubernetes import (
    K8S,
    ROOT,
    Manifest,
    Objects,
    containers_of,
    missing_requirement,
    pod_templates,
    render,
)

if reason := missing_requirement():
    pytest.skip(reason, allow_module_level=True)

# The oldest version for which the manifests are made.
KUBERNETES_VERSION = "1.34"
MONITOR = K8S / "components" / "monitor"
NAMES = ["base", *sorted(path.name for path in (K8S / "overlays").iterdir())]
SCHEMAS = yaml.safe_load(Path(__file__).with_name("custom_resources.yml").read_text())
# Values that the API server and LeaderWorkerSet set in a pod.
FIELDS = {"status.podIP": "10.244.1.7"}
GROUP = {
    "LWS_LEADER_ADDRESS": "baton-0.baton.default",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
}


@functools.cache
def manifests(name: str) -> list[Manifest]:
    return render(K8S / name if name == "base" else K8S / "overlays" / name)


@functools.cache
def secret() -> Manifest:
    """Return the Secret that a user makes from secret.env.example."""
    text = (K8S / "secret" / "secret.env.example").read_text()
    names = re.findall(r"(?m)^([\w-]+)=$", text)
    return {
        "kind": "Secret",
        "metadata": {"name": "baton"},
        "data": dict.fromkeys(names, "YSBzZWNyZXQgb2YgdGhpcyB0ZXN0"),
    }


def programs(name: str) -> list[tuple[str, Manifest, Manifest]]:
    """Return the pod's name, its spec and the container, for each program of Baton."""
    return [
        (pod, template["spec"], container)
        for pod, template in pod_templates(manifests(name))
        for container in containers_of(template["spec"])
        if container.get("command", [""])[0] == "baton"
    ]


def http_programs(name: str) -> list[tuple[str, Manifest, Manifest]]:
    """Return `programs` without KV stores, because KV stores serve no HTTP."""
    return [each for each in programs(name) if "kv" not in each[2]["command"]]


def environment(name: str, spec: Manifest, container: Manifest) -> dict[str, str]:
    objects = Objects([*manifests(name), secret()])
    group = GROUP if name == "multi-host" else {}
    env = [{"name": key, "value": value} for key, value in group.items()]
    env += container["env"]
    return objects.environment(spec, {**container, "env": env}, FIELDS)


@pytest.mark.parametrize("name", NAMES)
def test_manifests_are_valid(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in manifests(name):
        if schema := SCHEMAS.get(manifest["kind"]):
            assert manifest["apiVersion"] == schema["apiVersion"]
            jsonschema.validate(manifest["spec"], schema["spec"])
            continue
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_pod_templates_of_custom_resources_are_valid(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    templates = list(pod_templates(manifests(name)))
    assert templates, "the manifests have no pods"
    for _, template in templates:
        pod_manifest = {"apiVersion": "v1", "kind": "Pod", **template}
        pod_manifest["metadata"] = {"name": "a", **template["metadata"]}
        kubernetes_validate.validate(pod_manifest, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_program_starts_with_its_command_and_variables(name, monkeypatch):
    """Each variable is an option of this program, with a valid value, and the declared
    ports are those that the program listens on.
    """
    assert programs(name)
    for pod, spec, container in programs(name):
        _, command, *argv = container["command"]
        assert command in COMMANDS
        settings_class = PROGRAMS[f"baton {command}"]
        valid_names = set(map(variable_name, field_paths(settings_class)))
        env = environment(name, spec, container)
        given = {key for key in env if key.startswith("BATON_")}
        assert given - valid_names - MACHINE_VARIABLES == set(), pod
        with monkeypatch.context() as patch:
            for key, value in env.items():
                patch.setenv(key, value)
            settings: Any = load(settings_class, argv)
        ports = {port["containerPort"] for port in container.get("ports", [])}
        if command == "kv":
            assert not ports, "only the containers of its pod reach the store"
            continue
        expected = {settings.port}
        if command != "proxy":
            expected.add(settings.side_channel_port)
            if settings.nnodes > 1:
                expected.add(settings.rendezvous_address[1])
        assert ports == (set() if pod.endswith("workerTemplate") else expected)


@pytest.mark.parametrize("name", NAMES)
def test_servers_register_the_addresses_of_their_pods_with_the_proxies(
    name, monkeypatch
):
    """Every pod of the proxy has to get the registration, even before it is ready,
    because it is not ready before servers have registered.
    """
    objects = Objects(manifests(name))
    for pod, spec, container in http_programs(name):
        if "proxy" in container["command"]:
            continue
        env = environment(name, spec, container)
        service_name, port = re.fullmatch(
            r"http://([\w-]+):(\d+)", env["BATON_REGISTER"]
        ).groups()
        service = objects.get("Service", service_name)["spec"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
        assert service["ports"][0]["port"] == int(port) == 8000
        address = GROUP["LWS_LEADER_ADDRESS"] if env.get("BATON_NNODES") else None
        address = address or FIELDS["status.podIP"]
        assert env["BATON_SIDE_CHANNEL_HOST"] == address, pod
        assert env["BATON_ADVERTISE_URL"] == f"http://{address}:{env['BATON_PORT']}"


@pytest.mark.parametrize("name", NAMES)
def test_probes_request_paths_of_the_program_at_its_port(name):
    for pod, _, container in http_programs(name):
        if pod.endswith("workerTemplate"):
            continue  # a worker pod serves no HTTP
        port = container["ports"][0]["name"]
        paths = {}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[kind]["httpGet"]["port"] == port
            paths[kind] = container[kind]["httpGet"]["path"]
        assert paths == {
            "startupProbe": "/health",
            "readinessProbe": "/ready",
            "livenessProbe": "/health",
        }


@pytest.mark.parametrize("name", NAMES)
def test_a_drain_can_end_within_the_grace_period(name):
    """A server drains for half of BATON_SHUTDOWN_GRACE_S. Then its engine may take all
    of BATON_SHUTDOWN_GRACE_S to end. A proxy drains and ends within
    BATON_SHUTDOWN_GRACE_S.
    """
    for pod, spec, container in http_programs(name):
        env = environment(name, spec, container)
        grace_s = float(env["BATON_SHUTDOWN_GRACE_S"])
        hook = container.get("lifecycle", {}).get("preStop", {})
        needed_s = hook.get("sleep", {}).get("seconds", 0) + grace_s
        if "proxy" in container["command"]:
            assert hook, "clients connect until the Service is updated"
        else:
            needed_s += 1 + grace_s / 2
        assert spec["terminationGracePeriodSeconds"] > needed_s, pod


@pytest.mark.parametrize("name", NAMES)
def test_pods_run_as_the_user_of_the_image_without_privileges(name):
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    (user,) = re.findall(r"(?m)^USER (\d+)$", text)
    for pod, spec, container in programs(name):
        assert spec["securityContext"]["runAsUser"] == int(user), pod
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # With service links, Kubernetes would set BATON_* variables for a Service named
        # baton. They are not options of Baton.
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        assert container["resources"]["requests"] and container["resources"]["limits"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        if "proxy" not in container["command"]:
            assert {"/tmp", "/dev/shm", "/home/baton/.cache"} <= mounts


@pytest.mark.parametrize("name", NAMES)
def test_images_and_options_are_replaced_everywhere(name):
    """By default, kustomize replaces images and names of ConfigMaps only in the kinds
    of Kubernetes itself, not in custom resources.
    """
    tag = "cpu" if name == "cpu" else "gpu"
    for pod, _, container in programs(name):
        assert container["image"] == f"baton:{tag}", pod
        for source in container.get("envFrom", []):
            Objects(manifests(name)).get("ConfigMap", source["configMapRef"]["name"])


@pytest.mark.parametrize("name", NAMES)
def test_services_and_budgets_select_pods_and_their_ports(name):
    templates = [template for _, template in pod_templates(manifests(name))]
    for manifest in manifests(name):
        spec = manifest["spec"] if "spec" in manifest else {}
        if manifest["kind"] == "Service":
            selector = spec["selector"]
        elif manifest["kind"] == "PodDisruptionBudget":
            selector = spec["selector"]["matchLabels"]
        else:
            continue
        selected = [
            template
            for template in templates
            if selector.items() <= template["metadata"]["labels"].items()
        ]
        assert len(selected) == 1, manifest["metadata"]["name"]
        ports = {
            port["name"]
            for container in selected[0]["spec"]["containers"]
            for port in container.get("ports", [])
        }
        assert {port["targetPort"] for port in spec.get("ports", [])} <= ports


def test_metrics_of_autoscalers_and_adapter_are_gauges_of_servers():
    gauges = {spec.name for spec in TABLE if spec.kind == "gauge"}
    text = (K8S / "components" / "hpa" / "prometheus-adapter.yaml").read_text()
    (rule,) = yaml.safe_load(text)["rules"]["custom"]
    offered = set(re.findall(r"baton_\w+", rule["seriesQuery"]))
    used = {
        metric["pods"]["metric"]["name"]
        for manifest in manifests("hpa")
        if manifest["kind"] == "HorizontalPodAutoscaler"
        for metric in manifest["spec"]["metrics"]
    }
    assert used == offered
    assert "baton_queue_seconds" in used and used <= gauges


def test_only_autoscalers_set_the_number_of_pods():
    objects = Objects(manifests("hpa"))
    for scaler in objects.of_kind("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        deployment = objects.get(target["kind"], target["name"])
        assert "replicas" not in deployment["spec"]


def test_pod_monitors_scrape_each_job_that_alerts_name_with_a_key_that_opens_metrics():
    jobs = {}
    for monitor in Objects(manifests("monitor")).of_kind("PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] == "/metrics"
        (relabeling,) = endpoint["relabelings"]
        key = endpoint["authorization"]["credentials"]["key"]
        jobs[relabeling["replacement"]] = (endpoint["portNumber"], key)
    assert jobs == {
        "baton-proxy": (8000, "admin-key"),
        "baton-prefill": (8100, "server-key"),
        "baton-decode": (8200, "server-key"),
    }


def test_grafana_finds_the_dashboard_and_prometheus_the_alerts():
    """tests/deploy/test_observability.py compares dashboard and alerts with those for
    compose.
    """
    objects = Objects(manifests("monitor"))
    config = objects.get("ConfigMap", "baton-dashboard")
    assert config["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(config["data"]["grafana-dashboard.json"])["panels"]
    (group,) = objects.get("PrometheusRule", "baton")["spec"]["groups"]
    assert group["rules"]


def relative(path: Path, folder: Path) -> str:
    """Return a path as kustomize accepts it: relative to the kustomization's folder."""
    return os.path.relpath(path, folder)


def test_model_volume_can_be_added_to_every_kind_of_server(tmp_path):
    """Users combine components in an overlay of their own."""
    for name in ("base", "overlays/gpu-pair"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        content = {
            "resources": [relative(K8S / name, folder)],
            "components": [relative(K8S / "components" / "model-volume", folder)],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
        for pod, template in pod_templates(render(folder)):
            volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
            is_proxy = pod == "baton-proxy"
            assert ("cache" in volumes) != is_proxy
            assert is_proxy or "persistentVolumeClaim" in volumes["cache"]


def test_every_server_uses_the_store_of_its_pod(tmp_path):
    """The store is a sidecar: it starts before the servers, ends after them, and keeps
    running when a server is restarted.
    """
    for name in ("base", "overlays/cpu", "overlays/gpu-pair"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        content = {
            "resources": [relative(K8S / name, folder)],
            "components": [relative(K8S / "components" / "kv-store", folder)],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
        objects = Objects([*render(folder), secret()])
        for pod, template in pod_templates(objects.manifests):
            spec = template["spec"]
            if pod == "baton-proxy":
                assert "initContainers" not in spec
                continue
            (store,) = spec["initContainers"]
            assert store["restartPolicy"] == "Always"
            assert store["image"] == spec["containers"][0]["image"] != "baton"
            server_mounts = spec["containers"][0]["volumeMounts"]
            assert all(mount in server_mounts for mount in store["volumeMounts"])
            store_env = objects.environment(spec, store, FIELDS)
            limit = store["resources"]["limits"]["memory"].removesuffix("Gi")
            assert int(store_env["BATON_HOST_KV_BYTES"]) <= (int(limit) - 4) * 2**30
            for server in spec["containers"]:
                env = objects.environment(spec, server, FIELDS)
                assert env["BATON_HOST_KV"] == f"127.0.0.1:{store_env['BATON_PORT']}"
                secrets = [each["BATON_CLUSTER_SECRET"] for each in (env, store_env)]
                assert secrets[0] == secrets[1]


def test_store_of_a_pair_sees_the_gpus_of_its_pod():
    for _, spec, container in programs("kv-store"):
        if "kv" in container["command"]:
            (claim,) = container["resources"]["claims"]
            assert claim in spec["containers"][0]["resources"]["claims"]
            servers_env = environment("kv-store", spec, spec["containers"][0])
            env = environment("kv-store", spec, container)
            assert env["CUDA_DEVICE_ORDER"] == servers_env["CUDA_DEVICE_ORDER"]


def test_overlay_of_the_docs_changes_options_image_and_namespace(tmp_path):
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (example,) = re.findall(r"(?m)^    # kustomization.yaml\n((?:    .*\n)+)", text)
    example = example.replace("path/to/deploy/k8s", relative(K8S, tmp_path))
    (tmp_path / "kustomization.yaml").write_text(textwrap.dedent(example))
    objects = Objects(render(tmp_path))
    options = {}
    for config in objects.of_kind("ConfigMap"):
        options |= config["data"]
    assert (options["BATON_MODEL"], options["BATON_TP"]) == ("Qwen/Qwen3-32B", "2")
    assert {each["metadata"]["namespace"] for each in objects.manifests} == {"baton"}
    images = {
        container["image"]
        for _, template in pod_templates(objects.manifests)
        for container in template["spec"]["containers"]
    }
    assert images == {"registry.example.com/baton:gpu"}
    assert objects.of_kind("PersistentVolumeClaim")


def test_no_secret_has_a_value_in_the_repository():
    for name in NAMES:
        assert not Objects(manifests(name)).of_kind("Secret")
    references = {
        variable["valueFrom"]["secretKeyRef"]["key"]
        for name in NAMES
        for _, _, container in programs(name)
        for variable in container["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    assert references == set(secret()["data"])


def test_pool_has_the_servers_at_the_port_of_both_legs():
    """An endpoint picker uses one port of all pods, for metrics and for requests."""
    objects = Objects(manifests("gateway"))
    pool = objects.get("InferencePool", "baton")["spec"]
    selector = pool["selector"]["matchLabels"]
    (port,) = pool["targetPorts"]
    roles = {}
    for _, template in pod_templates(manifests("gateway")):
        labels = template["metadata"]["labels"]
        if not selector.items() <= labels.items():
            continue
        roles[labels["llm-d.ai/role"]] = template["spec"]
    assert set(roles) == {"prefill", "decode"}
    (prefill,) = roles["prefill"]["containers"]
    assert prefill["ports"][0]["containerPort"] == port["number"]
    (sidecar,) = roles["decode"]["initContainers"]
    assert f"--port={port['number']}" in sidecar["args"]
    # 8200 is the sidecar's default for the port of the decode server.
    (decode,) = roles["decode"]["containers"]
    assert decode["ports"][0]["containerPort"] == 8200
    service = objects.get("Service", pool["endpointPickerRef"]["name"])["spec"]
    assert service["ports"][0]["port"] == pool["endpointPickerRef"]["port"]["number"]


def test_picker_can_read_the_metrics_without_a_key_under_the_names_of_vllm():
    (config,) = [
        manifest["data"]
        for manifest in Objects(manifests("gateway")).of_kind("ConfigMap")
        if "BATON_MODEL" in manifest["data"]
    ]
    assert config["BATON_PUBLIC_METRICS"] == "true"
    assert config["BATON_METRIC_ALIASES"] == "vllm"

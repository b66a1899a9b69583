"""Manifests as `kubectl kustomize` renders them, and the data that pods get from them.

This module replaces those parts of Kubernetes that need no processes: the objects, the
environment of a container, and the selection of a service's pods. kubelet.py runs the
pods.
"""

import base64
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
Manifest = dict[str, Any]
_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_.-][\w.-]*)\))")


def missing_requirement() -> str | None:
    """Return what this machine lacks to render manifests, or None."""
    return None if shutil.which("kubectl") else "kubectl is not installed"


def render(folder: Path) -> list[Manifest]:
    """Return the manifests of a kustomization.

    Raises:
        AssertionError: kubectl rejects the kustomization. The message is kubectl's.
    """
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the name and the content of each pod template in Deployments and
    DisaggregatedSets.
    """
    for manifest in manifests:
        match manifest["kind"]:
            case "Deployment":
                yield manifest["metadata"]["name"], manifest["spec"]["template"]
            case "DisaggregatedSet":
                for role in manifest["spec"]["roles"]:
                    group = role["spec"]["leaderWorkerTemplate"]
                    for part in ("leaderTemplate", "workerTemplate"):
                        if part in group:
                            yield f"{role['name']} {part}", group[part]


def sidecars_of(pod_spec: Manifest) -> list[Manifest]:
    """Return the containers that start before the others and end after them."""
    sidecars: list[Manifest] = pod_spec.get("initContainers", [])
    assert all(each["restartPolicy"] == "Always" for each in sidecars)
    return sidecars


def containers_of(pod_spec: Manifest) -> list[Manifest]:
    """Return the containers of a pod in the order of their start."""
    return [*sidecars_of(pod_spec), *pod_spec["containers"]]


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


@dataclass(frozen=True)
class Objects:
    """The objects of one namespace."""

    manifests: list[Manifest]

    def get(self, kind: str, name: str) -> Manifest:
        for manifest in self.manifests:
            if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name):
                return manifest
        raise LookupError(f"there is no {kind} {name}")

    def of_kind(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def environment(
        self, pod_spec: Manifest, container: Manifest, fields: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the variables that Kubernetes sets in a container.

        Args:
            fields: the values of the downward API, such as "status.podIP".
        """
        env: dict[str, str] = {}
        if pod_spec.get("enableServiceLinks", True):
            for service in self.of_kind("Service"):
                if service["spec"].get("clusterIP") != "None":
                    env |= _service_links(service)
        for source in container.get("envFrom", []):
            config = self.get("ConfigMap", source["configMapRef"]["name"])
            env |= config["data"]
        for variable in container.get("env", []):
            value = self._value(variable, fields)
            if value is not None:
                env[variable["name"]] = _expand(value, env)
        return env

    def _value(self, variable: Manifest, fields: Mapping[str, str]) -> str | None:
        """Return the value of a variable, or None if its optional key is missing."""
        if "value" in variable:
            return str(variable["value"])
        match variable["valueFrom"]:
            case {"fieldRef": {"fieldPath": path}}:
                return fields[path]
            case {"secretKeyRef": reference}:
                data = self.get("Secret", reference["name"]).get("data", {})
                if reference["key"] in data:
                    return base64.b64decode(data[reference["key"]]).decode()
                if reference.get("optional"):
                    return None
                raise LookupError(f"the secret has no key {reference['key']}")
        raise NotImplementedError(f"valueFrom of {variable['name']}")


def _expand(value: str, env: Mapping[str, str]) -> str:
    """Replace each $(NAME) by the value of that variable in `env`. Unknown names
    remain.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return _REFERENCE.sub(replace, value)


def _service_links(service: Manifest) -> dict[str, str]:
    """Return the variables that Kubernetes sets for a service in each pod, unless the
    pod disables `enableServiceLinks`.
    """
    name = service["metadata"]["name"].upper().replace("-", "_")
    port = service["spec"]["ports"][0]["port"]
    address = "10.96.0.10"
    return {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_PORT": f"tcp://{address}:{port}",
    }

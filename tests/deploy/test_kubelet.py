"""The pods of the overlay `cpu` run, roll and end as Kubernetes would have them do.

tests/rigs/kubelet.py takes the place of kubelet: it runs the rendered pod templates in
namespaces, with their commands, variables, users, probes, preStop hooks and grace
periods.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.make_models import ensure_model
from tests.rigs import hosts, kubernetes
from tests.rigs.client import TIMEOUT_S, make_prompt
from tests.rigs.cluster import wait_until
from tests.rigs.kubelet import NODE
from tests.rigs.kubernetes import K8S, Objects, render
from tests.rigs.kubernetes_cluster import Cluster
from tests.rigs.plain_http import http
from tests.rigs.pod_files import root_file_system

_KEYS = {"api-key": "the key of the client", "admin-key": "the key of the operator"}
_SECRETS = {
    **_KEYS,
    "cluster-secret": "a secret of this test's cluster",
    "server-key": "the key of the servers",
}
_NUM_CLIENTS = 6
_VOLUME = {"name": "models", "mountPath": "/models", "readOnly": True}


@contextlib.contextmanager
def _running(
    folder: Path,
    overlay: str,
    options: list[str],
    patches: list[Any],
    *,
    has_store: bool = False,
) -> Iterator[Cluster]:
    """Run the pods of an overlay, changed as a user changes it to serve a model from a
    volume.

    Args:
        options: variables of all servers.
        has_store: whether each pod has a KV store.
    """
    reason = kubernetes.missing_requirement() or hosts.missing_requirement()
    if reason:
        pytest.skip(reason)
    for parent in [folder, *folder.parents][:3]:
        parent.chmod(0o755)  # the user of the containers has to reach the files
    user_overlay = folder / "overlay"
    _write_secret(user_overlay / "secret")
    options = ["BATON_MODEL=/models", "BATON_SERVED_MODEL_NAME=m", *options]
    kustomization: dict[str, Any] = {
        "resources": [os.path.relpath(K8S / "overlays" / overlay, user_overlay)],
        "configMapGenerator": [
            {"name": "baton-server", "behavior": "merge", "literals": options}
        ],
        "patches": patches,
    }
    kustomization["resources"].append("secret")
    if has_store:
        component = K8S / "components" / "kv-store"
        kustomization["components"] = [os.path.relpath(component, user_overlay)]
    (user_overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    objects = Objects(render(user_overlay))
    with (
        root_file_system(folder / "image") as files,
        contextlib.closing(Cluster(objects, files, folder)) as cluster,
    ):
        cluster.apply()
        yield cluster


def _write_secret(folder: Path) -> None:
    folder.mkdir(parents=True)
    shutil.copy(K8S / "secret" / "kustomization.yaml", folder)
    lines = [f"{name}={value}" for name, value in _SECRETS.items()]
    (folder / "secret.env").write_text("\n".join(lines))


def _model_patches(folder: Path, pod_path: str) -> list[dict[str, Any]]:
    """Return patches that mount the test model in a pod.

    Args:
        pod_path: path of the pod's spec in the manifest.
    """
    model = folder / "model"
    if not model.exists():
        shutil.copytree(ensure_model("gqa"), model)
        for file in model.iterdir():
            file.chmod(0o644)  # the user of the containers reads it
    volume = {"name": "models", "hostPath": {"path": str(model)}}
    return [
        {"op": "add", "path": f"{pod_path}/volumes/-", "value": volume},
        {
            "op": "add",
            "path": f"{pod_path}/containers/0/volumeMounts/-",
            "value": _VOLUME,
        },
    ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    selector = "app.kubernetes.io/component in (prefill, decode)"
    patches = _model_patches(folder, "/spec/template/spec")
    size_path = "/spec/template/spec/initContainers/0/env/0/value"
    patches.append({"op": "replace", "path": size_path, "value": str(2**26)})
    target = {"kind": "Deployment", "labelSelector": selector}
    patch = {"target": target, "patch": yaml.safe_dump(patches)}
    options = ["BATON_THREADS=1"]
    with _running(folder, "cpu", options, [patch], has_store=True) as cluster:
        yield cluster


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Cluster]:
    """A prefill server and a decode server, each on two hosts, without GPUs."""
    options = ["BATON_THREADS=1", "BATON_DEVICE=cpu", "BATON_TP=2", "BATON_EP=1"]
    options.append("BATON_KV_CACHE_BYTES=268435456")
    patches = [{"op": "replace", "path": "/spec/roles/1/spec/replicas", "value": 1}]
    for role in range(2):
        group = f"/spec/roles/{role}/spec/leaderWorkerTemplate"
        for part in ("leaderTemplate", "workerTemplate"):
            patches += _model_patches(tmp_path, f"{group}/{part}/spec")
    target = {"kind": "DisaggregatedSet"}
    patch = {"target": target, "patch": yaml.safe_dump(patches)}
    with _running(tmp_path, "multi-host", options, [patch]) as cluster:
        yield cluster


def _body(index: int) -> dict[str, Any]:
    body = {
        "prompt": make_prompt(seed=index, length=60 + 20 * index),
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0.0,
    }
    if index % 2:
        body |= {"temperature": 1.0, "seed": index}
    return body


def _stream(cluster: Cluster, body: dict[str, Any]) -> list[int]:
    """Return the tokens of a stream. The calling thread must be in the node's network.

    Raises:
        AssertionError: the stream is an error or has no proper end.
    """
    address = random.choice(cluster.endpoints("baton"))
    headers = {"authorization": f"Bearer {_KEYS['api-key']}"}
    url = f"http://{address}:8000/v1/completions"
    token_ids: list[int] = []
    lines: list[str] = []
    with http.stream(
        "POST", url, json=body, headers=headers, timeout=TIMEOUT_S
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200, lines
    assert lines[-1] == "data: [DONE]", lines[-3:]
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            token_ids += choice["token_ids"] or []
    return token_ids


@dataclass
class _Load:
    """Clients that send requests until they are stopped."""

    cluster: Cluster
    expected: dict[int, list[int]]
    num_answers: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._send, args=(index,))
            for index in range(_NUM_CLIENTS)
        ]

    def __enter__(self) -> "_Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _send(self, first: int) -> None:
        with self.cluster.hosts.inside(NODE):
            for number in itertools.count(first):
                if self._is_over.is_set():
                    return
                index = number % _NUM_CLIENTS
                try:
                    token_ids = _stream(self.cluster, _body(index))
                    assert token_ids == self.expected[index], "other tokens"
                except Exception as error:
                    self.problems.append(repr(error))
                with self._lock:
                    self.num_answers += 1

    def wait_for_answers(self, count: int) -> None:
        goal = self.num_answers + count
        wait_until(lambda: self.num_answers >= goal, TIMEOUT_S)


def _proxy_total(cluster: Cluster, name: str, **labels: str) -> float:
    """Return the sum of the samples with these labels, over all ready proxies. The
    calling thread must be in the node's network.
    """
    headers = {"authorization": f"Bearer {_KEYS['admin-key']}"}
    total = 0.0
    for address in cluster.endpoints("baton"):
        url = f"http://{address}:8000/metrics"
        text = http.get(url, headers=headers, timeout=10).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
    return total


@pytest.mark.slow
def test_no_stream_breaks_while_all_pods_are_replaced(cluster: Cluster) -> None:
    """Every answer has the tokens of an undisturbed run."""
    with cluster.hosts.inside(NODE):
        bodies = {index: _body(index) for index in range(_NUM_CLIENTS)}
        expected = {index: _stream(cluster, body) for index, body in bodies.items()}
        assert all(len(token_ids) == 300 for token_ids in expected.values())
        with _Load(cluster, expected) as load:
            load.wait_for_answers(_NUM_CLIENTS)
            cluster.roll("baton-decode")
            moved = {"outcome": "resumed", "reason": "moved"}
            assert _proxy_total(cluster, "baton_proxy_resumes_total", **moved) > 0
            cluster.roll("baton-prefill")
            cluster.evict("baton-decode")
            cluster.evict("baton-prefill")
            cluster.roll("baton-proxy")
            load.wait_for_answers(_NUM_CLIENTS)
        assert load.problems == []
        assert _proxy_total(cluster, "baton_proxy_requests_total", path="pd") > 0
    assert len(cluster.ended_pods) == 7
    for pod in cluster.ended_pods:
        assert set(pod.exit_codes.values()) == {0} and not pod.was_killed, (
            pod.exit_codes,
            pod.log("baton"),
        )
    pods = [pod for pods in cluster.pods.values() for pod in pods]
    assert [pod.problems for pod in [*pods, *cluster.ended_pods]] == [[]] * 12


@pytest.mark.slow
def test_servers_keep_kv_in_the_store_of_their_pod(cluster: Cluster) -> None:
    headers = {"authorization": f"Bearer {_SECRETS['server-key']}"}

    def num_stored(address: str) -> float:
        url = f"http://{address}:8200/metrics"
        text = http.get(url, headers=headers, timeout=10).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "baton_host_kv_demotions_total"
            and sample.labels["outcome"] == "stored"
        )

    with cluster.hosts.inside(NODE):
        addresses = [pod.address for pod in cluster.pods["baton-decode"]]
        before = sum(map(num_stored, addresses))
        _stream(cluster, _body(2))
        wait_until(lambda: sum(map(num_stored, addresses)) > before, TIMEOUT_S)
    for pod in cluster.pods["baton-decode"]:
        assert set(pod.exit_codes) == set() and not pod.problems


@pytest.mark.slow
def test_servers_of_two_hosts_answer_and_end_as_a_whole(two_hosts: Cluster) -> None:
    """The rig also replaces LeaderWorkerSet, and sets its variables in pods."""
    with two_hosts.hosts.inside(NODE):
        assert len(_stream(two_hosts, _body(1))) == 300
        assert _proxy_total(two_hosts, "baton_proxy_requests_total", path="pd") == 1
    leader, worker = two_hosts.pods["decode"]
    worker.close()  # as if its node were lost
    wait_until(lambda: leader.problems, 60)
    assert leader.problems == ["baton ended with status 1"], leader.log("baton")

"""Deployments, DisaggregatedSets and services, with the pods of kubelet.py.

This module replaces the controllers of Kubernetes and of LeaderWorkerSet. The names of
services and leaders resolve to the same pods as in Kubernetes.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.rigs.cluster import wait_until
from tests.rigs.hosts import Hosts
from tests.rigs.kubelet import NODE, START_TIMEOUT_S, Node, Pod
from tests.rigs.kubernetes import Manifest, Objects, containers_of, matches
from tests.rigs.pod_files import RootFileSystem


class Cluster:
    """The pods of one namespace, on one node.

    Args:
        folder: folder for the files of the pods.
    """

    def __init__(self, objects: Objects, files: RootFileSystem, folder: Path) -> None:
        folder.chmod(0o755)
        names_file = folder / "hosts"
        names_file.write_text("127.0.0.1 localhost\n")
        self.objects = objects
        self.hosts = Hosts(NODE, folder=folder)
        self._node = Node(
            self.hosts, objects, files, folder, names_file, on_change=self.publish
        )
        # The keys are names of deployments and of roles of a DisaggregatedSet.
        self.pods: dict[str, list[Pod]] = {}
        self.ended_pods: list[Pod] = []
        self._lock = threading.Lock()
        self._num_created = 0

    def close(self) -> None:
        for pods in self.pods.values():
            for pod in pods:
                pod.close()
        self.hosts.close()

    def publish(self) -> None:
        """Write the addresses of services and leaders to the file that all pods have as
        /etc/hosts.
        """
        with self._lock:
            lines = ["127.0.0.1 localhost"]
            for service in self.objects.of_kind("Service"):
                name = service["metadata"]["name"]
                lines += [f"{address} {name}" for address in self.endpoints(name)]
            # In LeaderWorkerSet, a leader's name resolves even before it is ready.
            for pods in self.pods.values():
                lines += [
                    f"{pod.address} {pod.name}.lws" for pod in pods if pod.address
                ]
            # The pods have a bind mount of this file, so it is overwritten in place. A
            # new file at its path would not appear in the pods.
            self._node.names_file.write_text("\n".join(lines) + "\n")

    def endpoints(self, service: str) -> list[str]:
        """Return the addresses of the pods to which a service routes now."""
        spec = self.objects.get("Service", service)["spec"]
        is_for_all = spec.get("publishNotReadyAddresses", False)
        return [
            pod.address
            for pods in self.pods.values()
            for pod in pods
            if matches(spec["selector"], pod.labels) and pod.address
            if is_for_all or pod.is_ready
        ]

    def apply(self) -> None:
        """Start all pods and wait until they are ready."""
        for deployment in self.objects.of_kind("Deployment"):
            name = deployment["metadata"]["name"]
            self.pods[name] = []
            for _ in range(deployment["spec"]["replicas"]):
                self._create(name)
        for disaggregated_set in self.objects.of_kind("DisaggregatedSet"):
            for role in disaggregated_set["spec"]["roles"]:
                self.pods[role["name"]] = []
                for _ in range(role["spec"]["replicas"]):
                    self._create_group(role)
        for pods in self.pods.values():
            for pod in pods:
                self._wait_until_ready(pod)

    def roll(self, name: str) -> None:
        """Replace the pods of a deployment, with maxSurge 1 and maxUnavailable 0.

        Returns when the old pods have ended.
        """
        strategy = self.objects.get("Deployment", name)["spec"]["strategy"]
        assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        old_pods = list(self.pods[name])
        endings: list[Future[None]] = []
        with ThreadPoolExecutor(len(old_pods)) as pool:
            for pod in old_pods:
                self._wait_until_ready(self._create(name))
                endings.append(pool.submit(self._delete, name, pod))
        for ending in endings:
            ending.result()

    def evict(self, name: str) -> None:
        """Evict a pod of a deployment, like draining its node does, and replace the
        pod.
        """
        self._delete(name, self.pods[name][0])
        self._wait_until_ready(self._create(name))

    def _create(self, name: str) -> Pod:
        template = self.objects.get("Deployment", name)["spec"]["template"]
        return self._start_pod(name, template, {})

    def _create_group(self, role: Manifest) -> None:
        """Start the pods of one server, as LeaderWorkerSet does: a leader first."""
        group = role["spec"]["leaderWorkerTemplate"]
        leader = f"{role['name']}-{self._num_created + 1}.lws"
        for index in range(group["size"]):
            part = "workerTemplate" if index else "leaderTemplate"
            variables = {
                "LWS_LEADER_ADDRESS": leader,
                "LWS_GROUP_SIZE": str(group["size"]),
                "LWS_WORKER_INDEX": str(index),
            }
            self._start_pod(role["name"], group[part], variables)

    def _start_pod(
        self, name: str, template: Manifest, variables: Mapping[str, str]
    ) -> Pod:
        self._num_created += 1
        pod = Pod(self._node, f"{name}-{self._num_created}", template, variables)
        self.pods[name].append(pod)
        pod.start()
        self.publish()
        return pod

    def _delete(self, name: str, pod: Pod) -> None:
        pod.terminate()
        self.pods[name].remove(pod)
        self.ended_pods.append(pod)
        self.publish()

    def _wait_until_ready(self, pod: Pod) -> None:
        try:
            wait_until(lambda: pod.is_ready or pod.problems, START_TIMEOUT_S)
        finally:
            if not pod.is_ready:
                for container in containers_of(pod.spec):
                    log = pod.log(container["name"])
                    print(f"{pod.name} {container['name']}: {pod.problems}\n{log}")
        assert pod.is_ready, pod.problems

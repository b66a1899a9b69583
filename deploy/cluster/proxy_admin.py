"""Calls the admin API of a proxy.

The API changes the members of the proxy, and passes requests and reports between
`baton scale` and the launcher of the proxy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.request import OpenerDirector

from deploy.healthcheck import direct, fetch

MEMBERS_PATH = "/admin/members"
CLUSTER_PATH = "/admin/cluster"
SCALE_PATH = "/admin/scale"
TIMEOUT_S = 2.0


class ProxyRefused(Exception):
    """The proxy or its launcher cannot fulfill a request. The message is the reason."""


@dataclass(frozen=True)
class ProxyAdmin:
    """The admin API of one proxy.

    Every method raises OSError if the proxy does not respond within TIMEOUT_S. It
    raises ProxyRefused if the response is an error, or not that of a Baton proxy.

    Args:
        endpoint: URL of the proxy.
        key: An admin key; None if the proxy has no keys.
        opener: Opens the URLs; by default without a check of certificates.
    """

    endpoint: str
    key: str | None = None
    opener: OpenerDirector = direct

    def members(self) -> list[dict[str, Any]]:
        """Returns all members; see `proxy/discovery/admin.py`."""
        return list(self._call(MEMBERS_PATH)["members"])

    def add(self, role: str, url: str) -> None:
        """Makes a server a member."""
        self._call(MEMBERS_PATH, {"role": role, "url": url})

    def remove(self, url: str) -> None:
        """Requests the removal of a member, without waiting for it. The member gets no
        new requests, and is removed when its last request has ended."""
        self._call(f"{MEMBERS_PATH}/remove", {"server": url})

    def drain(self, url: str) -> None:
        """Makes the proxy send no new requests to a server, which stays a member."""
        self._call(f"{MEMBERS_PATH}/drain", {"server": url})

    def report(self, report: Mapping[str, Any]) -> None:
        """Sends the launcher's report about the cluster to the proxy."""
        self._call(CLUSTER_PATH, report)

    def cluster(self) -> dict[str, Any]:
        """Returns the launcher's last report about the cluster."""
        return self._call(CLUSTER_PATH)

    def scale(self, role: str, count: int) -> str:
        """Requests `count` servers of a role from the launcher.

        Returns:
            The id of the request. The launcher's report has the id of the last request
            that the launcher has received.
        """
        return str(self._call(SCALE_PATH, {"role": role, "count": count})["id"])

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.endpoint}{path}"
        status, answer = fetch(url, TIMEOUT_S, self.key, body=data, opener=self.opener)
        try:
            content = json.loads(answer)
        except ValueError:
            content = None
        if status < 400 and isinstance(content, dict):
            return content
        try:
            message = str(content["error"]["message"])
        except (LookupError, TypeError):
            message = f"status {status}, unlike a Baton proxy"
        raise ProxyRefused(message)

"""Passes an operator's requests on to `baton up`, which has started this proxy.

POST /admin/scale    {"role": .., "count": ..}   request a number of servers
GET  /admin/cluster                              return the launcher's last report
POST /admin/cluster  {...}                       store a report of the launcher

POST /admin/scale is answered with an `id`, without waiting for the launcher. The
launcher's report has the `id` of the last request that the launcher has received.
"""

import uuid
from typing import Annotated, Any

import msgspec

from protocol.errors import InvalidRequest
from protocol.process import lifecycle
from protocol.process.logging import get_logger
from proxy.membership import Kind

logger = get_logger(__name__)

SCALE_PATH = "/admin/scale"
CLUSTER_PATH = "/admin/cluster"
PATHS = (SCALE_PATH, CLUSTER_PATH)
# A report has an entry for each part of the cluster: up to 128 servers of each kind.
# Each entry has up to 500 characters about the end of the part's last run, and JSON
# escapes a character in up to 6 bytes.
MAX_BODY_BYTES = 2**20


class _Scale(msgspec.Struct, forbid_unknown_fields=True):
    role: Kind
    count: Annotated[int, msgspec.Meta(ge=1, le=64)]


class Launcher:
    """The launcher of this proxy, if it has one."""

    def __init__(self) -> None:
        self._report: dict[str, Any] | None = None

    def report(self) -> dict[str, Any]:
        """Return the launcher's last report. Raises InvalidRequest if there is none."""
        if self._report is None:
            raise InvalidRequest(
                "this proxy has no launcher: it was not started by `baton up`. Start "
                "and stop servers yourself; /admin/members changes the members"
            )
        return self._report

    def take(self, path: str, body: bytes) -> dict[str, Any]:
        """Execute a POST to one of PATHS; return the answer.

        Raises:
            InvalidRequest: the body is invalid, or this proxy has no launcher.
        """
        try:
            if path == CLUSTER_PATH:
                self._report = msgspec.json.decode(body, type=dict[str, Any])
                return {"status": "stored"}
            scale = msgspec.json.decode(body, type=_Scale)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(f"the body of {path}: {error}") from None
        self.report()
        request_id = uuid.uuid4().hex
        lifecycle.request_of_parent(
            {"id": request_id, "role": scale.role.value, "count": scale.count}
        )
        logger.info(
            "an operator requested %d %s servers", scale.count, scale.role.value
        )
        return {"id": request_id}

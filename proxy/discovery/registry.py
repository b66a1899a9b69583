"""Registration of servers. A server stays a member until its registration ends.

A registration ends when the server sends a record that it leaves, or when it expires.
"""

import asyncio
import contextvars
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from protocol.http.deadlines import Countdown
from protocol.pairing import same_model
from protocol.process.logging import get_logger
from protocol.registration import (
    MAX_AGE_S,
    REGISTER_PATH,
    BadRecord,
    Record,
    check_advertised,
    open_record,
)
from protocol.settings.sources import base_url
from protocol.short_repr import short_repr
from proxy.errors import RegistrationRefused
from proxy.health import Health
from proxy.membership import Fleet, Kind

logger = get_logger(__name__)

REGISTERED = "registered"  # the source of members that register themselves
MAX_SERVERS = 1024
MAX_RECORD_BYTES = 8192
# At most this many warnings about refused records are logged in each _WARNING_PERIOD_S,
# because a server without the secret may retry endlessly.
_MAX_WARNINGS = 20
_WARNING_PERIOD_S = 60.0

_Key = tuple[Kind, str]


class _LastRecord(NamedTuple):
    """The newest record of one server.

    Attributes:
        timer: ends the registration, or forgets the record of a server that has left.
    """

    issued_ms: int
    timer: Countdown


class Registry:
    """Handles the registration records that servers send.

    Args:
        secret: the cluster secret; if it is None, no server may register.
    """

    path = REGISTER_PATH

    def __init__(self, fleet: Fleet, secret: bytes | None) -> None:
        self._fleet = fleet
        self._secret = secret
        self._records: dict[_Key, _LastRecord] = {}
        self._num_warnings = 0
        self._period_started_at = -_WARNING_PERIOD_S

    def take(self, body: bytes) -> dict[str, object]:
        """Apply a server's record if its signature is valid; return the answer.

        Raises:
            RegistrationRefused: the record is refused. The reason is also logged.
        """
        try:
            if self._secret is None:
                raise BadRecord(
                    "this proxy takes no registrations: start it with the servers' "
                    "BATON_CLUSTER_SECRET"
                )
            record = open_record(body, self._secret, int(time.time() * 1000))
            return self._apply(record)
        except BadRecord as error:
            self._warn(error)
            raise RegistrationRefused(
                f"this registration is refused: {error}"
            ) from None

    def _apply(self, record: Record) -> dict[str, object]:
        try:
            url = check_advertised(base_url(record.url))
        except ValueError as error:
            raise BadRecord(str(error)) from None
        # A server of both kinds joins as a decode server. When its health report
        # confirms the role, the fleet adds a second member of kind prefill.
        kind = Kind("decode" if record.role == "both" else record.role)
        key = (kind, url)
        last = self._records.get(key)
        if last is not None and record.issued_ms <= last.issued_ms:
            raise BadRecord(
                f"there is a newer record of {url}: this record is a copy, or the "
                "server's clock is wrong"
            )
        if record.leaving:
            self._end(key, record.issued_ms)
            return {"status": "leaving"}
        if last is None and len(self._records) >= MAX_SERVERS:
            raise BadRecord(f"{MAX_SERVERS} servers are registered, which is the limit")
        try:
            self._check_model(record, key)
        except BadRecord:  # a member that has restarted with another model must leave
            self._end(key, record.issued_ms)
            raise
        health = Health(models=(record.model,), kv_digest=record.kv_digest)
        server = self._fleet.join(kind, url, REGISTERED, health)
        self._store(key, record.issued_ms, record.ttl_s, self._expire)
        return {"status": REGISTERED, "server": server.name, "ttl_s": record.ttl_s}

    def _check_model(self, record: Record, key: _Key) -> None:
        """Check that servers with the same model name serve the same model.

        Raises:
            BadRecord: another server serves different weights under this name.
        """
        kind, url = key
        member = self._fleet.find(kind, url)
        if member is not None and member.sources:
            if member.health.kv_digest == record.kv_digest:
                return
        for other in self._fleet.servers:
            if other.url == url or not other.sources:
                continue
            if record.model not in other.health.models:
                continue
            if not same_model(other.health.kv_digest, record.kv_digest):
                raise BadRecord(
                    f"{url} and {other.name} serve different models as "
                    f"{short_repr(record.model)}: their fingerprints differ; give both "
                    "the same weights, or change one --served-model-name"
                )

    def _expire(self, key: _Key) -> None:
        kind, url = key
        logger.warning("the registration of %s server %s has expired", kind.value, url)
        self._end(key, self._records[key].issued_ms)

    def _end(self, key: _Key, issued_ms: int) -> None:
        """End a registration; refuse older records until their signatures expire."""
        if server := self._fleet.find(*key):
            self._fleet.leave(server, REGISTERED)
        self._store(key, issued_ms, 2 * MAX_AGE_S, self._records.pop)

    def _store(
        self,
        key: _Key,
        issued_ms: int,
        after_s: float,
        on_timeout: Callable[[_Key], object],
    ) -> None:
        """Store a server's newest record; call `on_timeout` after `after_s` seconds."""
        if last := self._records.get(key):
            last.timer.cancel()
        # The context is empty, so that the timer's log lines do not show the id of the
        # registration request.
        context = contextvars.Context()
        loop = asyncio.get_running_loop()
        timer = context.run(Countdown, loop, after_s, partial(on_timeout, key))
        self._records[key] = _LastRecord(issued_ms, timer)

    def _warn(self, error: BadRecord) -> None:
        now_s = time.monotonic()
        if now_s - self._period_started_at >= _WARNING_PERIOD_S:
            self._num_warnings = 0
            self._period_started_at = now_s
        self._num_warnings += 1
        if self._num_warnings <= _MAX_WARNINGS:
            logger.warning("a registration is refused: %s", error)

    def close(self) -> None:
        for record in self._records.values():
            record.timer.cancel()

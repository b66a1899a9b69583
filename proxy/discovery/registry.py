"""Members that registered: each stays until its time ends, or it says that it leaves."""

import asyncio
import contextvars
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from protocol.handshake import same_model
from protocol.http.deadlines import Countdown
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

REGISTERED = "registered"  # the source
MAX_SERVERS = 1024
MAX_RECORD_BYTES = 8192
_WARNINGS = 20  # about refusals in each `_WARNINGS_S`: who has no secret may come again and again
_WARNINGS_S = 60.0

_Key = tuple[Kind, str]


class _Heard(NamedTuple):
    """Of one server: when its last record was issued, and what happens in the end."""

    issued_ms: int
    timer: Countdown


class Registry:
    """Takes the records that servers send.

    Args:
        secret: of the cluster; None: nobody may register.
    """

    path = REGISTER_PATH

    def __init__(self, fleet: Fleet, secret: bytes | None) -> None:
        self._fleet, self._secret = fleet, secret
        self._heard: dict[_Key, _Heard] = {}
        self._warnings, self._warned_at = 0, -_WARNINGS_S

    def take(self, body: bytes) -> dict[str, object]:
        """Does what an authentic record says. Returns what the server is told.

        Raises:
            RegistrationRefused: the log has it too.
        """
        try:
            if self._secret is None:
                fix = "start it with BATON_CLUSTER_SECRET, that of the servers"
                raise BadRecord(f"this proxy takes no registrations: {fix}")
            return self._taken(open_record(body, self._secret, int(time.time() * 1000)))
        except BadRecord as error:
            self._warn(error)
            raise RegistrationRefused(
                f"this registration is refused: {error}"
            ) from None

    def _taken(self, record: Record) -> dict[str, object]:
        try:
            url = check_advertised(base_url(record.url))
        except ValueError as error:
            raise BadRecord(str(error)) from None
        key = (
            Kind("decode" if record.role == "both" else record.role),
            url,
        )  # its twin follows
        heard = self._heard.get(key)
        if heard is not None and record.issued_ms <= heard.issued_ms:
            raise BadRecord(
                f"a newer record of {url} is known: it is a copy, or a clock is wrong"
            )
        if record.leaving:
            self._end(key, record.issued_ms)
            return {"status": "leaving"}
        if heard is None and len(self._heard) >= MAX_SERVERS:
            raise BadRecord(f"{MAX_SERVERS} servers are registered, which are the most")
        try:
            self._check_model(record, key)
        except BadRecord:  # it has started anew, with another model
            self._end(key, record.issued_ms)
            raise
        said = Health(models=(record.model,), kv_digest=record.kv_digest)
        server = self._fleet.join(*key, REGISTERED, said)
        self._again(key, record.issued_ms, record.ttl_s, self._lapse)
        return {"status": REGISTERED, "server": server.name, "ttl_s": record.ttl_s}

    def _check_model(self, record: Record, key: _Key) -> None:
        """Whoever joins under a name serves the model of those that were there before."""
        own, url = self._fleet.find(*key), key[1]
        if own is not None and own.sources and own.health.kv_digest == record.kv_digest:
            return
        for other in self._fleet.servers:
            known = other.health
            if (
                other.url == url
                or record.model not in known.models
                or not other.sources
            ):
                continue
            if not same_model(known.kv_digest, record.kv_digest):
                raise BadRecord(
                    f"{url} serves another model as {short_repr(record.model)} than {other.name}: "
                    "their fingerprints differ; give it the same weights, or another "
                    "--served-model-name"
                )

    def _lapse(self, key: _Key) -> None:
        logger.warning(
            "the registration of %s server %s has lapsed", key[0].value, key[1]
        )
        self._end(key, self._heard[key].issued_ms)

    def _end(self, key: _Key, issued_ms: int) -> None:
        if server := self._fleet.find(*key):
            self._fleet.leave(server, REGISTERED)
        # Older records of it are copies for as long as somebody would believe them.
        self._again(key, issued_ms, 2 * MAX_AGE_S, self._heard.pop)

    def _again(
        self, key: _Key, issued_ms: int, after_s: float, then: Callable[[_Key], object]
    ) -> None:
        if heard := self._heard.get(key):
            heard.timer.cancel()
        own = (
            contextvars.Context()
        )  # what it logs is not of the request that brought the record
        loop = asyncio.get_running_loop()
        timer = own.run(Countdown, loop, after_s, partial(then, key))
        self._heard[key] = _Heard(issued_ms, timer)

    def _warn(self, error: BadRecord) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_at >= _WARNINGS_S:
            self._warnings, self._warned_at = 0, now_s
        self._warnings += 1
        if self._warnings <= _WARNINGS:
            logger.warning("a registration is refused: %s", error)

    def close(self) -> None:
        for heard in self._heard.values():
            heard.timer.cancel()

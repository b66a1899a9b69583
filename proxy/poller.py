"""Checks the health of every member of the fleet, periodically."""

import asyncio
import contextlib
import contextvars
import random
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from protocol.http.access import REDACTED
from protocol.messages import HostTierReport
from protocol.metrics import ENGINE_TOTALS
from protocol.pairing import FOREIGN
from protocol.process.logging import get_logger
from protocol.settings.settings import ProxySettings
from proxy.discovery.readiness import Readiness
from proxy.health import HealthReport, RequestLimits, SideChannel, pause_s
from proxy.membership import Fleet, Kind, Server
from proxy.placement.load_tracker import LoadTracker
from proxy.placement.speed import StepTotals
from proxy.upstream import (
    HttpUpstream,
    Lost,
    OutOfSockets,
    TimedOut,
    Unreachable,
    within,
)

logger = get_logger(__name__)

JITTER = 0.2  # share of the interval, so that proxies do not poll all at once
_MAX_REASON_CHARS = 200


class _Polling(NamedTuple):
    """The task that checks one server, and the event that ends the task's pause."""

    task: asyncio.Task[None]
    hurry: asyncio.Event


@dataclass
class Poller:
    """Checks each server in its own task. A hung server does not delay other checks."""

    fleet: Fleet
    upstream: HttpUpstream
    load_tracker: LoadTracker
    settings: ProxySettings

    def __post_init__(self) -> None:
        self.readiness = Readiness(self.fleet, self.settings)
        self._pollings: dict[Server, _Polling] = {}

    def watch(self, server: Server) -> None:
        """Start the periodic checks of a new member."""
        hurry = asyncio.Event()
        # The context is empty, so that the task's log lines do not show the id of the
        # request by which the server joined.
        context = contextvars.Context()
        task = asyncio.create_task(self._poll(server, hurry), context=context)
        self._pollings[server] = _Polling(task, hurry)

    def unwatch(self, server: Server) -> None:
        self._pollings.pop(server).task.cancel()

    def hurry(self, server: Server) -> None:
        """Check a server at once, because it has just stopped being ready."""
        self._pollings[server].hurry.set()

    async def close(self) -> None:
        tasks = [polling.task for polling in self._pollings.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self, server: Server, hurry: asyncio.Event) -> None:
        while True:
            hurry.clear()
            try:
                await self._check(server)
            except Exception:  # a bug must not end the checks of a server
                logger.exception("handling the health check of %s failed", server)
            jitter = random.uniform(1 - JITTER, 1 + JITTER)
            interval_s = pause_s(server.health, self.settings.health_interval_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s * jitter):
                    await hurry.wait()

    async def _check(self, server: Server) -> None:
        started_at = time.monotonic()
        timeout_s = self.settings.health_timeout_s
        try:
            async with within(timeout_s):
                report = await self._fetch_report(server)
        except (Unreachable, Lost) as error:
            reason = f"{error.failure.value}: {error}"
            report = HealthReport(ready=False, reason=reason, answered=False)
            self.fleet.polled(server, report, started_at)
        except (TimeoutError, TimedOut):
            self.fleet.silent(server, f"no answer within {timeout_s:g} s")
        except OutOfSockets:
            logger.warning(
                "no descriptors or ports are left for the health check of %s; raise "
                "the limit of open files (ulimit -n), or lower --max-in-flight",
                server,
            )
        except Exception:
            logger.exception("the health check of %s failed", server)
            self.fleet.silent(server, "the health check failed")
        else:
            if report.is_bare and not self.settings.passes_keys_on:
                report = HealthReport(
                    ready=False,
                    reason="it has API keys: set --upstream-api-key to one of its "
                    "admin keys",
                )
            self._on_report(server, report, started_at)

    def _on_report(
        self, server: Server, report: HealthReport, started_at: float
    ) -> None:
        self.fleet.polled(server, report, started_at)
        self.readiness.update()
        if not server.has_left:
            health = server.health
            is_lender = health.ready and health.side_channel is not None
            self.load_tracker.set_lender(server, is_lender)
        if report.ready and report.totals is not None:
            self.load_tracker.on_report(
                server,
                report.capacity,
                report.totals,
                report.itl_target_s,
                report.host_tier,
            )

    async def _fetch_report(self, server: Server) -> HealthReport:
        if not (server.health.ready and server.health.is_foreign):
            status, body = await self._get(server, "/ready")
            if status != 404:
                return _parse_ready(server.kind, status, body)
        health_status, _ = await self._get(server, "/health")
        models_status, models_body = await self._get(server, "/v1/models")
        return _parse_foreign(health_status, models_status, models_body)

    async def _get(self, server: Server, path: str) -> tuple[int, bytes]:
        response = await self.upstream.send(server.url, "GET", path)
        return response.status, await response.read()


class _ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


def _parse_foreign(
    health_status: int, models_status: int, models_body: bytes
) -> HealthReport:
    """Return the report of a server without /ready, such as vLLM's.

    Args:
        health_status: status of the server's answer to GET /health.
        models_status: status of the server's answer to GET /v1/models.
        models_body: body of the server's answer to GET /v1/models.
    """
    cards: list[_ModelCard] = []
    if models_status == 200:
        with contextlib.suppress(msgspec.MsgspecError):
            cards = msgspec.json.decode(models_body, type=_ModelList).data
    hides_names = models_status in (401, 403)
    if not cards and not hides_names:
        return HealthReport(
            ready=False,
            reason="GET /ready answers with status 404, unlike a Baton server",
        )
    lengths = [card.max_model_len for card in cards if card.max_model_len]
    return HealthReport(
        ready=health_status == 200,
        reason=f"GET /health answers with status {health_status}",
        limits=RequestLimits(max(lengths)) if lengths else None,
        models=tuple(card.id for card in cards),
        kv_digest=FOREIGN,
        is_foreign=True,
    )


def _parse_ready(kind: Kind, status: int, body: bytes) -> HealthReport:
    """Return the report in an answer to GET /ready.

    Args:
        kind: the kind of the member, which the server's role must match.
    """
    ready = status == 200
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = None
    if not isinstance(answer, dict):
        return HealthReport(
            ready,
            f"GET /ready answers with status {status}, unlike a Baton server",
        )

    def typed(name: str, *types: type) -> Any:
        """Return a member if it has one of these types, else None."""
        value = answer.get(name)
        return value if type(value) in types else None

    role = answer.get("role")
    if role in ("prefill", "decode") and role != kind.value:
        return HealthReport(
            ready=False,
            reason=f"it is a {role} server; name it by --{role}, not by --{kind.value}",
        )
    error = typed("error", dict) or answer
    reason = error.get("message", answer.get("reason"))
    if not isinstance(reason, str):
        reason = f"status {status}"
    num_blocks = typed("num_blocks", int)
    block_size = typed("block_size", int)
    capacity = None
    if num_blocks is not None and block_size is not None:
        capacity = num_blocks * block_size
    counters = [typed(name, int, float) for name in ENGINE_TOTALS]
    totals = None if None in counters else StepTotals(*counters)
    itl_target_s = typed("itl_target_s", float)
    model = typed("model", str)
    return HealthReport(
        ready=ready,
        reason=reason[:_MAX_REASON_CHARS],
        limits=_request_limits(answer),
        capacity=capacity,
        totals=totals,
        itl_target_s=itl_target_s if itl_target_s and itl_target_s > 0 else None,
        models=(model,) if model else (),
        kv_digest=typed("kv_digest", str) or "",
        is_bare=REDACTED.items() <= answer.items(),
        is_both=role == "both",
        side_channel=_side_channel(answer),
        subscribes=bool(answer.get("subscribes")),
        host_tier=_host_tier(answer),
    )


def _request_limits(answer: dict[str, Any]) -> RequestLimits | None:
    """Return the limits that the answer has; None if it has none."""
    limits = {}
    for name in RequestLimits.__dataclass_fields__:
        limit = answer.get(name)
        if type(limit) is int and limit > 0:
            limits[name] = limit
    return RequestLimits(**limits) if limits else None


def _side_channel(answer: dict[str, Any]) -> SideChannel | None:
    if not answer.get("subscribes"):
        return None
    fields = {
        "engine_id": answer.get("engine_id"),
        "incarnation": answer.get("incarnation"),
        "host": answer.get("side_channel_host"),
        "port": answer.get("side_channel_port"),
    }
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(fields, SideChannel)
    return None


def _host_tier(answer: dict[str, Any]) -> HostTierReport | None:
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(answer.get("host_tier"), HostTierReport | None)
    return None

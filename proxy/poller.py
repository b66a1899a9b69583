"""Asks every member of the fleet whether it is ready, again and again."""

import asyncio
import contextlib
import contextvars
import random
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from protocol.handshake import FOREIGN
from protocol.http.access import REDACTED
from protocol.metrics import ENGINE_TOTALS
from protocol.process.logging import get_logger
from protocol.settings.settings import ProxySettings
from proxy.discovery.readiness import Readiness
from proxy.health import Room, Said, SideChannel, pause_s
from proxy.knowledge import Knowledge, Totals
from proxy.membership import Fleet, Kind, Server
from proxy.upstream import Exhausted, HttpUpstream, Lost, TimedOut, Unreachable, within

logger = get_logger(__name__)

JITTER = 0.2  # of the interval, so that many proxies do not ask in step


@dataclass
class Poller:
    """One task per server; a server that hangs delays no other's check."""

    fleet: Fleet
    upstream: HttpUpstream
    knowledge: Knowledge
    settings: ProxySettings

    def __post_init__(self) -> None:
        self.readiness = Readiness(self.fleet, self.settings)
        self._polls: dict[Server, tuple[asyncio.Task[None], asyncio.Event]] = {}

    def watch(self, server: Server) -> None:
        """Checks a new member until it has left."""
        hurry, own = asyncio.Event(), contextvars.Context()
        # Not in the context of the request by which it joined: its log lines are not of that.
        self._polls[server] = (
            asyncio.create_task(self._poll(server, hurry), context=own),
            hurry,
        )

    def leave(self, server: Server) -> None:
        task, _ = self._polls.pop(server)
        task.cancel()

    def hurry(self, server: Server) -> None:
        """Asks at once: a connection broke, which may be all that is wrong with the server."""
        self._polls[server][1].set()

    async def close(self) -> None:
        tasks = [task for task, _ in self._polls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self, server: Server, hurry: asyncio.Event) -> None:
        while True:
            hurry.clear()
            try:
                await self._check(server)
            except Exception:  # our own bug must not leave a server unwatched
                logger.exception("what the health check of %s found", server)
            jitter = random.uniform(1 - JITTER, 1 + JITTER)
            interval_s = (
                pause_s(server.health, self.settings.health_interval_s) * jitter
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await hurry.wait()

    async def _check(self, server: Server) -> None:
        started_at, timeout_s = time.monotonic(), self.settings.health_timeout_s
        try:
            async with within(timeout_s):
                said = await self._ask(server)
            if said.is_bare and not self.settings.passes_keys_on:
                fix = "set --upstream-api-key to one of its admin keys"
                said = Said(False, f"it has API keys: {fix}")
        except (Unreachable, Lost) as error:
            said = Said(False, f"{error.failure.value}: {error}", answered=False)
            self.fleet.polled(server, said, started_at)
        except (TimeoutError, TimedOut):
            self.fleet.silent(server, f"no answer within {timeout_s:g} s")
        except Exhausted:
            logger.warning("no descriptors are left for the health check of %s", server)
        except Exception:
            logger.exception("health check of %s", server)
            self.fleet.silent(server, "the health check failed")
        else:
            self.fleet.polled(server, said, started_at)
            self.readiness.update()
            health = server.health
            if not server.has_left:
                self.knowledge.lends(
                    server, health.ready and health.side_channel is not None
                )
            if said.ready and said.totals is not None:
                self.knowledge.told(
                    server, said.capacity, said.totals, said.itl_target_s
                )

    async def _ask(self, server: Server) -> Said:
        if not (server.health.ready and server.health.is_foreign):
            status, body = await self._get(server, "/ready")
            if status != 404:
                return _said(server.kind, status, body)
        (healthy, _), (status, body) = [
            await self._get(server, path) for path in ("/health", "/v1/models")
        ]
        return _foreign(healthy, status, body)

    async def _get(self, server: Server, path: str) -> tuple[int, bytes]:
        response = await self.upstream.send(server.url, "GET", path)
        return response.status, await response.read()


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def _foreign(healthy: int, status: int, body: bytes) -> Said:
    """What the answers to /health and /v1/models say of a server without /ready, as vLLM's are."""
    found: list[_Card] = []
    if status == 200:
        with contextlib.suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(body, type=_Cards).data
    if not found and status not in (401, 403):  # which hide its names
        return Said(False, "GET /ready answers with status 404, unlike a Baton server")
    lengths = [card.max_model_len for card in found if card.max_model_len]
    room = Room(max(lengths)) if lengths else None
    names = tuple(card.id for card in found)
    reason = f"GET /health answers with status {healthy}"
    return Said(
        healthy == 200, reason, room, models=names, kv_digest=FOREIGN, is_foreign=True
    )


def _said(kind: Kind, status: int, body: bytes) -> Said:
    """What a server's answer means to a proxy that was told of it as one of `kind`."""
    ready = status == 200
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        said = None
    if not isinstance(said, dict):
        return Said(
            ready, f"GET /ready answers with status {status}, unlike a Baton server"
        )

    def told(name: str, *kinds: type) -> Any:
        """A member, if it is of one of these types."""
        return value if type(value := said.get(name)) in kinds else None

    role, error = said.get("role"), told("error", dict) or said
    if role in ("prefill", "decode") and role != kind.value:
        return Said(
            False, f"it is a {role} server; name it by --{role}, not by --{kind.value}"
        )
    text = error.get("message", said.get("reason"))
    lengths = {name: told(name, int) or 0 for name in Room.__dataclass_fields__}
    limits = {name: length for name, length in lengths.items() if length > 0}
    blocks, size = told("num_blocks", int), told("block_size", int)
    totals = [n for name in ENGINE_TOTALS if (n := told(name, int, float)) is not None]
    target_s = told("itl_target_s", float)
    return Said(
        ready,
        text[:200] if isinstance(text, str) else f"status {status}",
        Room(**limits) if limits else None,
        None if None in (blocks, size) else blocks * size,
        Totals(*totals) if len(totals) == len(ENGINE_TOTALS) else None,
        target_s if target_s and target_s > 0 else None,
        models=tuple(filter(None, [told("model", str)])),
        kv_digest=told("kv_digest", str) or "",
        is_bare=REDACTED.items() <= said.items(),
        is_both=role == "both",
        side_channel=_side_channel(said),
        subscribes=bool(said.get("subscribes")),
    )


def _side_channel(said: dict[str, Any]) -> SideChannel | None:
    told = {name: said.get(name) for name in ("engine_id", "incarnation")}
    told |= {name: said.get(f"side_channel_{name}") for name in ("host", "port")}
    with contextlib.suppress(msgspec.ValidationError):
        if said.get("subscribes"):
            return msgspec.convert(told, SideChannel)
    return None

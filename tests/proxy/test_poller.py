"""What health checks that were not answered say about a server, and what they do not; timeouts:
what is late, and what only seems so."""

import asyncio
import socket
import time
from collections.abc import Callable

import pytest
import uvloop

from proxy.health import LONG_SILENCE, SILENCES, Room, Said
from proxy.knowledge import Knowledge
from proxy.membership import Fleet, Kind
from proxy.poller import Poller, _said
from proxy.upstream import Exhausted, Response, TimedOut, UpstreamError, within
from tests.proxy.fakes import until

DECODE = {Kind.DECODE: ["http://d1"]}


class Failing:
    """An upstream that fails in one way."""

    def __init__(self, error: UpstreamError) -> None:
        self.error = error
        self.asked = 0

    async def send(self, *_: object) -> Response:
        self.asked += 1
        raise self.error


@pytest.mark.parametrize(("error", "is_told"), [(TimedOut("1 s"), True), (Exhausted("24"), False)])
async def test_a_check_that_could_not_be_made_says_nothing_about_a_server(
    error: UpstreamError, is_told: bool
) -> None:
    told: list[bool] = []

    fleet = Fleet(DECODE, on_silence=lambda _server, is_long: told.append(is_long))
    (server,) = fleet.servers
    fleet.polled(server, Said(True), 0.0)
    upstream = Failing(error)
    poller = Poller(fleet, upstream, Knowledge(), interval_s=1e-4, timeout_s=1.0)
    poller.start()
    await until(lambda: upstream.asked > LONG_SILENCE)
    await poller.close()
    assert server.health.ready is not is_told
    short = LONG_SILENCE - SILENCES
    assert told[: short + 1] == ([False] * short + [True] if is_told else [])


async def test_a_server_is_watched_on_whatever_becomes_of_what_was_found() -> None:
    def broken(*_change: object) -> None:
        raise RuntimeError("it cannot be shown")

    fleet = Fleet(DECODE, on_change=broken)
    upstream = Failing(TimedOut("1 s"))
    poller = Poller(fleet, upstream, Knowledge(), interval_s=1e-4, timeout_s=1.0)
    poller.start()
    await until(lambda: upstream.asked > 2)
    await poller.close()


def test_something_else_at_the_address_of_a_server_is_told_as_such() -> None:
    said = _said(Kind.DECODE, 404, b"<html>no such page</html>")
    assert not said.ready
    assert said.reason == "GET /ready answers with status 404, unlike a Baton server"


@pytest.mark.parametrize(
    ("told", "room"),
    [
        (b'{"max_model_len": 300, "max_num_seqs": 8}', Room(300, 8)),
        (b'{"max_num_seqs": 8}', Room(None, 8)),
        (b'{"max_model_len": 0, "max_num_seqs": true}', None),
        (b'{"max_model_len": "300", "max_num_seqs": 8.5}', None),
        (b"[]", None),
    ],
)
def test_a_server_has_the_room_that_it_tells_in_whole_numbers(
    told: bytes, room: Room | None
) -> None:
    assert _said(Kind.DECODE, 200, told).room == room


LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("make_loop", LOOPS)
def test_what_came_while_the_loop_was_busy_is_not_late(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test() -> None:
        here, there = socket.socketpair()
        with there:
            reader, writer = await asyncio.open_connection(sock=here)

            def be_busy() -> None:
                time.sleep(0.1)
                there.send(b"x")

            async with within(0.02):
                asyncio.get_running_loop().call_soon(be_busy)
                assert await reader.readexactly(1) == b"x"
            writer.close()
            await writer.wait_closed()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(test())


@pytest.mark.parametrize("make_loop", LOOPS)
def test_what_does_not_come_is_late(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        with pytest.raises(TimeoutError):
            async with within(0.02):
                await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(test())


async def test_being_cancelled_is_no_timeout() -> None:
    async def wait() -> None:
        async with within(60.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

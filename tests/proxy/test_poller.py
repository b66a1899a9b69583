"""What health checks that were not answered say about a server, and what they do not."""

import pytest

from protocol.settings.settings import ProxySettings
from proxy.health import LONG_SILENCE, SILENCES, HealthReport, Room
from proxy.membership import Fleet, Kind, Watch
from proxy.placement.load_tracker import LoadTracker
from proxy.poller import Poller, _parse_ready
from proxy.upstream import Exhausted, Response, TimedOut, UpstreamError
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


async def watch(fleet: Fleet, upstream: Failing, num_polls: int) -> int:
    poller = Poller(
        fleet, upstream, LoadTracker(), ProxySettings(health_interval_s=1e-4)
    )
    for server in fleet.servers:
        poller.watch(server)
    await until(lambda: upstream.asked > num_polls)
    await poller.close()
    return upstream.asked


@pytest.mark.parametrize(
    ("error", "is_told"), [(TimedOut("1 s"), True), (Exhausted("24"), False)]
)
async def test_a_check_that_could_not_be_made_says_nothing_about_a_server(
    error, is_told
):
    told: list[bool] = []
    fleet = Fleet(
        DECODE, Watch(on_silence=lambda _server, is_long: told.append(is_long))
    )
    (server,) = fleet.servers
    fleet.polled(server, HealthReport(True), 0.0)
    await watch(fleet, Failing(error), LONG_SILENCE)
    assert server.health.ready is not is_told
    short = LONG_SILENCE - SILENCES
    assert told[: short + 1] == ([False] * short + [True] if is_told else [])


async def test_a_server_is_watched_on_whatever_becomes_of_what_was_found():
    def broken(*_change: object) -> None:
        raise RuntimeError("it cannot be shown")

    fleet = Fleet(DECODE, Watch(on_change=broken))
    assert await watch(fleet, Failing(TimedOut("1 s")), 2) > 2


def test_something_else_at_the_address_of_a_server_is_told_as_such():
    said = _parse_ready(Kind.DECODE, 404, b"<html>no such page</html>")
    assert not said.ready
    assert said.reason == "GET /ready answers with status 404, unlike a Baton server"


@pytest.mark.parametrize(
    ("told", "room", "itl_target_s"),
    [
        (
            b'{"max_model_len": 300, "max_num_seqs": 8, "itl_target_s": 0.05}',
            Room(300, 8),
            0.05,
        ),
        (b'{"max_num_seqs": 8, "itl_target_s": 0}', Room(None, 8), None),
        (
            b'{"max_model_len": 0, "max_num_seqs": true, "itl_target_s": -1.5}',
            None,
            None,
        ),
        (
            b'{"max_model_len": "300", "max_num_seqs": 8.5, "itl_target_s": "x"}',
            None,
            None,
        ),
        (b'{"itl_target_s": null}', None, None),
        (b"[]", None, None),
    ],
)
def test_a_server_has_the_room_and_the_time_that_it_tells_in_numbers(
    told, room, itl_target_s
):
    said = _parse_ready(Kind.DECODE, 200, told)
    assert (said.room, said.itl_target_s) == (room, itl_target_s)

"""The effect of health checks on a server's state, in particular of unanswered ones."""

import pytest

from protocol.settings.settings import ProxySettings
from proxy.health import LONG_SILENCE, SILENCES, HealthReport, RequestLimits
from proxy.membership import Fleet, Kind, Server, Watch
from proxy.placement.load_tracker import LoadTracker
from proxy.poller import Poller, _parse_ready
from proxy.upstream import OutOfSockets, Response, TimedOut, UpstreamError
from tests.proxy.fakes import until

DECODE = {Kind.DECODE: ["http://d1"]}


class Failing:
    """An HTTP client on which every request fails with the given error.

    Attributes:
        num_polls: number of requests so far.
    """

    def __init__(self, error: UpstreamError) -> None:
        self.error = error
        self.num_polls = 0

    async def send(self, *_: object) -> Response:
        self.num_polls += 1
        raise self.error


async def watch(fleet: Fleet, upstream: Failing, num_polls: int) -> int:
    settings = ProxySettings(health_interval_s=1e-4)
    poller = Poller(fleet, upstream, LoadTracker(), settings)
    for server in fleet.servers:
        poller.watch(server)
    await until(lambda: upstream.num_polls > num_polls)
    await poller.close()
    return upstream.num_polls


@pytest.mark.parametrize(
    ("error", "is_silence"), [(TimedOut("1 s"), True), (OutOfSockets("24"), False)]
)
async def test_check_that_could_not_be_sent_does_not_count_as_silence(
    error, is_silence
):
    silences: list[bool] = []

    def on_silence(_server: Server, is_long: bool) -> None:
        silences.append(is_long)

    fleet = Fleet(DECODE, Watch(on_silence=on_silence))
    (server,) = fleet.servers
    fleet.polled(server, HealthReport(True), 0.0)
    await watch(fleet, Failing(error), LONG_SILENCE)
    assert server.health.ready is not is_silence
    num_short = LONG_SILENCE - SILENCES
    expected = [False] * num_short + [True] if is_silence else []
    assert silences[: num_short + 1] == expected


async def test_polling_continues_after_an_error_in_the_handling_of_a_report():
    def broken(*_change: object) -> None:
        raise RuntimeError("a bug")

    fleet = Fleet(DECODE, Watch(on_change=broken))
    assert await watch(fleet, Failing(TimedOut("1 s")), 2) > 2


def test_reason_says_that_an_address_is_not_of_a_baton_server():
    report = _parse_ready(Kind.DECODE, 404, b"<html>no such page</html>")
    assert not report.ready
    assert report.reason == "GET /ready answers with status 404, unlike a Baton server"


@pytest.mark.parametrize(
    ("body", "limits", "itl_target_s"),
    [
        (
            b'{"max_model_len": 300, "max_num_seqs": 8, "itl_target_s": 0.05}',
            RequestLimits(300, 8),
            0.05,
        ),
        (b'{"max_num_seqs": 8, "itl_target_s": 0}', RequestLimits(None, 8), None),
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
def test_only_positive_numbers_of_the_right_type_in_reports_are_used(
    body, limits, itl_target_s
):
    report = _parse_ready(Kind.DECODE, 200, body)
    assert (report.limits, report.itl_target_s) == (limits, itl_target_s)

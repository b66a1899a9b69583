"""Error events, countdowns, and the memory of refused bodies.

Connections are tested in tests/proxy/test_connections.py.
"""

import asyncio
import json
import traceback
from typing import Any

import pytest

from protocol.errors import Overloaded, TransferFailed
from protocol.http import sse
from protocol.http.bodies import read_body
from protocol.http.deadlines import Countdown
from tests.rigs.client import sse_events


def test_error_event_has_the_type_error_and_openais_error_object():
    ((name, data),) = sse_events(sse.error_event(TransferFailed("cut off")).decode())
    payload = json.loads(data)
    assert (name, payload["type"], payload["error"]["code"]) == (
        "error",
        "error",
        "transfer_failed",
    )


class _Loop(asyncio.SelectorEventLoop):
    """An event loop with a clock that the test sets."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def half_seconds(*spans: tuple[float, float]) -> list[float]:
    """Returns all multiples of 0.5 s in these spans of time."""
    return [
        half / 2
        for start, stop in spans
        for half in range(int(2 * start), int(2 * stop) + 1)
    ]


@pytest.mark.parametrize(
    ("turn_times", "cancelled_at", "end"),
    [
        (half_seconds((0, 10)), 5.0, 4.0),
        (half_seconds((0, 6)), 3.0, None),
        # After a suspension of the loop, the remaining parts of the countdown must
        # still pass:
        (half_seconds((0, 0.5), (100, 110)), None, 103.0),
        (half_seconds((0, 2.5), (100, 110)), None, 101.0),
        (half_seconds((0, 3.5), (100, 110)), None, 101.0),
        # Every turn of the loop is late:
        ([100.0 * turn for turn in range(10)], None, 500.0),
    ],
)
def test_countdown_of_4_s_ends_or_is_cancelled(turn_times, cancelled_at, end):
    end_times: list[float] = []

    async def run_turns() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _Loop)
        countdown = Countdown(loop, 4.0, lambda: end_times.append(loop.now_s))
        for loop.now_s in turn_times:
            if loop.now_s == cancelled_at:
                countdown.cancel()
            for _ in range(3):
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(run_turns())
    assert end_times == ([] if end is None else [end])


async def test_error_of_a_connection_does_not_keep_the_body_alive():
    connection_state: dict[str, Any] = {"refusal": None}
    error = Overloaded("too many")

    async def receive() -> dict[str, Any]:
        connection_state["refusal"] = error
        return {"type": "http.request", "body": b"x" * 1000, "more_body": False}

    scope = {"extensions": {"baton.connection": connection_state}}
    with pytest.raises(Overloaded):
        await read_body(scope, receive, 10_000)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    parts = next(
        frame.f_locals["parts"] for frame in frames if "parts" in frame.f_locals
    )
    assert parts == []

"""Server-sent events, limits on silence, and bodies that are refused half-way. The proxy's
test_bodies.py has the rest."""

import asyncio
import json
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import Overloaded, TransferFailed
from protocol.http import sse
from protocol.http.connections import Countdown, read_body
from tests.rigs.client import sse_events


def test_an_error_event_has_its_name_and_openai_s_shape() -> None:
    ((name, data),) = sse_events(sse.error_event(TransferFailed("cut off")).decode())
    assert name == "error"
    assert json.loads(data)["error"]["code"] == "transfer_failed"


class _Loop(asyncio.SelectorEventLoop):
    """One whose clock the test sets."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def ends(at_s: list[float], cancelled: bool = False) -> float | None:
    """When a countdown of 4 s from 0 on ends, on a loop that looks at these times."""
    found: list[float] = []

    async def look() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _Loop)
        countdown = Countdown(loop, 4.0, lambda: found.append(loop.now_s))
        for index, loop.now_s in enumerate(at_s):
            if cancelled and index == len(at_s) // 2:
                countdown.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
        countdown.cancel()

    make: Callable[[], _Loop] = _Loop
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(look())
    return found[0] if found else None


def seconds(*spans: tuple[float, float]) -> list[float]:
    """All half seconds of these spans."""
    return [half / 2 for start, stop in spans for half in range(int(2 * start), int(2 * stop) + 1)]


def test_silence_ends_when_its_time_is_over() -> None:
    assert ends(seconds((0, 10))) == 4.0
    assert ends(seconds((0, 10)), cancelled=True) == 4.0
    assert ends(seconds((0, 6)), cancelled=True) is None


@pytest.mark.parametrize("stopped_at", [0, 0.5, 1, 2.5, 3, 3.5])
def test_a_process_that_stood_still_looks_again_before_it_gives_up(stopped_at: float) -> None:
    end = ends(seconds((0, stopped_at), (100, 110)))
    assert end is not None and end >= 101.0


def test_a_loop_that_is_always_late_gives_up_in_the_end() -> None:
    assert ends([100.0 * turn for turn in range(10)]) == 500.0


async def test_the_error_of_a_connection_keeps_nothing_of_the_body() -> None:
    known: dict[str, Any] = {"refusal": None}
    error = Overloaded("too many")

    async def receive() -> dict[str, Any]:
        known["refusal"] = error
        return {"type": "http.request", "body": b"x" * 1000, "more_body": False}

    with pytest.raises(Overloaded):
        await read_body({"extensions": {"baton.connection": known}}, receive, 10_000)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    kept = next(frame.f_locals["parts"] for frame in frames if "parts" in frame.f_locals)
    assert kept == []

"""What a body that is refused half-way leaves behind; test_bodies.py of the proxy has the rest."""

import traceback
from typing import Any

import pytest

from protocol.errors import Overloaded
from protocol.http.connections import read_body


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

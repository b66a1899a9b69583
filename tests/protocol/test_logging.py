"""Log lines: one per event, with who and which request."""

import asyncio
import io
import logging
import re
from collections.abc import Iterator

import pytest

from protocol.process.logging import escape, get_logger, request_context, setup_logging

TOUCHED = ("", "baton")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    before = [(logging.getLogger(n), logging.getLogger(n).handlers[:]) for n in TOUCHED]
    levels = [logging.getLogger(n).level for n in TOUCHED]
    text = io.StringIO()
    yield text
    logging.captureWarnings(False)
    for (logger, handlers), level in zip(before, levels, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)


def test_line_has_time_sender_request_and_logger(stream):
    setup_logging("decode", rank=1, stream=stream)
    with request_context("r-1"):
        get_logger("engine.core").info("admitted, %d blocks", 3)
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    pattern = (
        stamp + r" INFO    decode/1 \[r-1\] baton\.engine\.core: admitted, 3 blocks\n"
    )
    assert re.fullmatch(pattern, stream.getvalue())


def test_a_request_id_cannot_forge_a_line(stream):
    setup_logging("proxy", stream=stream)
    with request_context("a\n2026 ERROR forged\x1b[2J"):
        get_logger("proxy").warning("first\nsecond")
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert r"[a\n2026 ERROR forged\x1b[2J]" in stream.getvalue()
    assert r"first\nsecond" in stream.getvalue()
    assert escape("grüße 東京\u2028\x85") == r"grüße 東京\u2028\x85"


def test_each_task_logs_its_request_id(stream):
    setup_logging("proxy", stream=stream)
    turn = asyncio.Event()

    async def serve(name: str) -> None:
        with request_context(name):
            await turn.wait()
            get_logger("x").info("from %s", name)

    async def both() -> None:
        tasks = [asyncio.create_task(serve(name)) for name in ("a", "b")]
        await asyncio.sleep(0)
        turn.set()
        await asyncio.gather(*tasks)

    asyncio.run(both())
    assert all(
        f"[{name}] baton.x: from {name}" in line
        for name, line in zip("ab", stream.getvalue().splitlines(), strict=True)
    )


def test_level_and_foreign_loggers(stream):
    setup_logging("proxy", level="error", stream=stream)
    get_logger("x").warning("hidden")
    logging.getLogger("httpx").info("hidden")
    get_logger("x").error("shown")
    assert stream.getvalue().count("\n") == 1 and "shown" in stream.getvalue()


def test_a_traceback_follows_its_line(stream):
    setup_logging("proxy", stream=stream)
    try:
        raise KeyError("block 7")
    except KeyError:
        get_logger("x").exception("step failed")
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("step failed") and lines[-1] == "KeyError: 'block 7'"

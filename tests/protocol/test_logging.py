"""Log lines: one per event, with the sender and the request id."""

import asyncio
import io
import logging
import re
from collections.abc import Iterator

import pytest

from protocol.process.log_lines import escape
from protocol.process.logging import get_logger, request_context, setup_logging

CHANGED_LOGGERS = ("", "baton")  # changed by setup_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    loggers = [logging.getLogger(name) for name in CHANGED_LOGGERS]
    old_states = [(logger.handlers[:], logger.level) for logger in loggers]
    text = io.StringIO()
    yield text
    logging.captureWarnings(False)
    for logger, (handlers, level) in zip(loggers, old_states, strict=True):
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


def test_request_id_and_text_cannot_forge_a_line(stream):
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
    both_wait = asyncio.Event()

    async def serve(name: str) -> None:
        with request_context(name):
            await both_wait.wait()
            get_logger("x").info("from %s", name)

    async def serve_both() -> None:
        tasks = [asyncio.create_task(serve(name)) for name in ("a", "b")]
        await asyncio.sleep(0)
        both_wait.set()
        await asyncio.gather(*tasks)

    asyncio.run(serve_both())
    assert all(
        f"[{name}] baton.x: from {name}" in line
        for name, line in zip("ab", stream.getvalue().splitlines(), strict=True)
    )


def test_lines_below_the_level_and_infos_of_other_packages_are_hidden(stream):
    setup_logging("proxy", level="error", stream=stream)
    get_logger("x").warning("hidden")
    logging.getLogger("httpx").info("hidden")
    get_logger("x").error("shown")
    assert stream.getvalue().count("\n") == 1 and "shown" in stream.getvalue()


def test_traceback_follows_its_line(stream):
    setup_logging("proxy", stream=stream)
    try:
        raise KeyError("block 7")
    except KeyError:
        get_logger("x").exception("step failed")
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("step failed") and lines[-1] == "KeyError: 'block 7'"

"""Log lines as JSON objects, including the lines of child processes and output that no
logger has written.
"""

import json
import subprocess
import sys

import pytest

from protocol.process import log_lines
from protocol.process.log_lines import (
    as_text,
    format_child_line,
    is_rank,
    json_line,
    sender_of,
)
from tests.rigs.programs import BATON, environment

TIMEOUT_S = 60
RANK_LINE = json_line(0.25, "INFO", "decode/1", {"logger": "baton.x", "message": "a"})


@pytest.fixture
def json_lines(monkeypatch):
    monkeypatch.setattr(log_lines, "_json_part", "up")


def run(program: str) -> tuple[int, list[dict[str, str]]]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_everything_that_a_program_writes_is_a_json_object_per_line():
    status, lines = run("""
import sys, warnings
from protocol.process.lifecycle import report_failure
from protocol.process.logging import get_logger, request_context, setup_logging
setup_logging("decode", rank=1, log_format="json")
with request_context('r"1\\n'):
    get_logger("x").info("two\\nlines")
try:
    1 / 0
except ZeroDivisionError:
    get_logger("x").exception("failed")
warnings.warn("old", stacklevel=1)
print("printed", 1)
print("in parts", end="", flush=True)
report_failure("the reason")
raise KeyError("the end")
""")
    assert status == 1
    for line in lines:
        assert line["part"] == "decode/1" and line["time"].endswith("Z")
    logged, failed, warned, printed, in_parts, reason, *traceback = lines
    assert (logged["request_id"], logged["message"]) == ('r"1\n', "two\nlines")
    assert (logged["level"], logged["logger"]) == ("INFO", "baton.x")
    assert failed["exception"].endswith("ZeroDivisionError: division by zero")
    assert (warned["level"], warned["logger"]) == ("WARNING", "py.warnings")
    assert (printed["message"], in_parts["message"]) == ("printed 1", "in parts")
    assert (reason["level"], reason["message"]) == ("ERROR", "error: the reason")
    assert traceback[-1]["message"] == "KeyError: 'the end'"


def test_failure_of_baton_up_is_a_json_object():
    done = subprocess.run(
        [*BATON, "up", "--log-format", "json", "--model", "/no/such/model"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    last = lines[-1]
    assert (last["level"], last["part"]) == ("ERROR", "up")
    assert last["message"].startswith("baton up: error: ")
    # The reason is a text, although the child wrote it as a JSON object.
    assert "/no/such/model" in last["message"] and '"time"' not in last["message"]


def test_lines_of_children_have_their_name(json_lines):
    line = json.loads(format_child_line("decode-0", RANK_LINE))
    assert line == {**json.loads(RANK_LINE), "process": "decode-0"}
    for text in ("UCX WARN  no device", '{"time":"cut off', ""):
        wrapped = json.loads(format_child_line("decode-0", text))
        assert (wrapped["part"], wrapped["message"]) == ("decode-0", text)


def test_lines_of_children_have_a_prefix_in_text():
    assert format_child_line("decode-0", "a") == "decode-0 | a"


def test_sender_and_text_of_a_json_line_equal_those_of_text():
    assert sender_of(RANK_LINE) == "decode/1" and is_rank("decode/1")
    text = "1970-01-01T00:00:00.250Z INFO decode/1 baton.x: a"
    assert as_text(RANK_LINE) == text and sender_of(f"{text[:25]}INFO  {text[30:]}")
    with_traceback = json_line(
        0, "ERROR", "proxy", {"logger": "baton.x", "message": "a", "exception": "b\nc"}
    )
    assert as_text(with_traceback) == "c"
    assert as_text("no object") == "no object" and sender_of("no object") is None

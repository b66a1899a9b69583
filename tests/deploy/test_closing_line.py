"""The closing line of `make test-all`."""

from tests.closing_line import closing_line

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="1.26"
 timestamp="2026-01-31T12:00:00"><testcase name="a"/></testsuite></testsuites>"""


def test_counts_add_up() -> None:
    line = closing_line(REPORT, "abc")
    counts = [line[key] for key in ("passed", "failed", "errors", "skipped")]
    assert counts == [4, 2, 1, 3]
    assert (line["seconds"], line["started"]) == (1.3, "2026-01-31T12:00:00")
    assert line["commit"] == "abc"

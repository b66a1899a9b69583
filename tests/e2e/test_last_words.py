"""The last line of `baton up` names the process that died first and quotes its last
output.

Lines that other processes write later must not replace the quoted output.
"""

import os
import signal

import pytest

from protocol.process.log_lines import sender_of
from tests.rigs.programs import BATON, child_pid, launched


@pytest.mark.parametrize(
    ("path", "reason", "sender"),
    [
        (
            ["prefill_server"],
            "prefill-0 ended: killed by SIGKILL, its last line: ",
            "prefill",
        ),
        pytest.param(
            ["proxy"],
            "proxy ended: killed by SIGKILL, its last line: ",
            "proxy",
            marks=pytest.mark.slow,
        ),
        (
            ["prefill_server", "--rank 1"],
            "engine process prefill.1: killed by SIGKILL",
            None,
        ),
    ],
    ids=["server", "proxy", "rank"],
)
def test_last_line_is_about_the_process_that_was_killed(
    path, reason, sender, tiny_model
):
    options = ["--model", str(tiny_model), "--port", "0", "--device", "cpu"]
    options += ["--max-restarts", "0"]
    if sender is None:
        options += ["--prefill.tp", "2"]
    with launched([*BATON, "up", *options]) as program:
        program.read_until("curl ")
        pid = program.process.pid
        for words in path:
            pid = child_pid(pid, *words.split())
        os.kill(pid, signal.SIGKILL)
        assert program.end() == 1
        last = program.lines[-1]
        assert last.startswith("baton up: error: ")
        assert reason in last
        assert "told to end" not in last
        if sender is not None:
            assert sender_of(last.partition("its last line: ")[2]) == sender

"""Streams continue while the servers of `baton up` are killed and restarted.

tests/deploy/test_supervision.py tests the rules of restarts.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.client import MODEL, Stream, complete_all, fresh_prompt
from tests.rigs.cluster import wait_until
from tests.rigs.plain_http import http
from tests.rigs.programs import BATON, Program, child_pid, launched

pytestmark = pytest.mark.slow

NUM_STREAMS = 4
NUM_TOKENS = 700
# The time limit of an answer includes the restart of a server.
ANSWER_TIMEOUT_S = 180.0


@pytest.fixture
def cluster(tiny_model: Path) -> Iterator[tuple[Program, str]]:
    """Yield a running `baton up` with default restarts, and its URL."""
    options = ["--model", str(tiny_model), "--served-model-name", MODEL, "--port", "0"]
    options += ["--device", "cpu", "--dtype", "float32"]
    options += ["--prefill.threads", "1", "--decode.threads", "1"]
    with launched([*BATON, "up", *options]) as program:
        url = program.read_until("ready http").split()[1].rstrip("/")
        yield program, url
        program.process.send_signal(signal.SIGINT)
        assert program.end() == 0


def kill_decode_server(launcher_pid: int) -> None:
    os.kill(child_pid(launcher_pid, "decode_server"), signal.SIGKILL)


def kill_prefill_server(launcher_pid: int) -> None:
    os.kill(child_pid(launcher_pid, "prefill_server"), signal.SIGKILL)


def kill_engine_of_decode_server(launcher_pid: int) -> None:
    server_pid = child_pid(launcher_pid, "decode_server")
    os.kill(child_pid(server_pid, "--rank"), signal.SIGKILL)


def wait_for_end(streams: list[Stream]) -> None:
    wait_until(
        lambda: not any(stream.is_alive() for stream in streams), ANSWER_TIMEOUT_S
    )


@pytest.mark.parametrize(
    ("kill", "name"),
    [
        (kill_decode_server, "decode-0"),
        (kill_engine_of_decode_server, "decode-0"),
        (kill_prefill_server, "prefill-0"),
    ],
    ids=["decode server", "engine of the decode server", "prefill server"],
)
def test_streams_have_the_same_tokens_when_a_server_is_killed(
    kill: Callable[[int], None], name: str, cluster: tuple[Program, str]
) -> None:
    program, url = cluster
    prompts = [fresh_prompt(40 + 100 * index) for index in range(NUM_STREAMS)]
    expected = [answer.token_ids for answer in complete_all(url, prompts, NUM_TOKENS)]
    streams = [Stream(url, prompt, NUM_TOKENS) for prompt in prompts]
    for stream in streams:
        stream.wait_for_events(5)
    # These requests have no token yet when the server dies.
    late_prompts = [fresh_prompt(1500) for _ in range(2)]
    late_streams = [Stream(url, prompt, 50) for prompt in late_prompts]
    kill(program.process.pid)
    program.read_until(f"baton | {name} ended: ")
    assert all(stream.is_alive() for stream in streams)
    wait_for_end(streams + late_streams)
    for stream, tokens in zip(streams, expected, strict=True):
        stream.assert_tokens(tokens)
    program.read_until(f"baton | {name} is ready again at ")
    late_expected = [answer.token_ids for answer in complete_all(url, late_prompts, 50)]
    for stream, tokens in zip(late_streams, late_expected, strict=True):
        stream.assert_tokens(tokens)
    # Requests are disaggregated again.
    wait_until(lambda: http.get(f"{url}/ready", timeout=10).json()["missing"] == [])
    (answer,) = complete_all(url, [fresh_prompt(200)], 4)
    assert answer.kv["transferred"] > 0

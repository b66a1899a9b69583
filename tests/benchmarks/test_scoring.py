"""The scoring benchmark against a real server: every prompt is scored, whatever the cache holds."""

import json
from pathlib import Path

import pytest

from benchmarks import scoring
from tests.e2e.cluster import running, start_prefill
from tests.make_models import ensure_model


def test_scored_and_plain_prompts_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    model: Path = ensure_model("gqa")
    server = start_prefill(model)
    argv = ["--url", server.url, "--input-len", "40", "--num-requests", "2"]
    with running(server):
        assert scoring.main(argv) == 0
        before = server.metrics()["baton_prompt_tokens_total"]
    assert before == 40 * 6  # two warm up
    lines = capsys.readouterr().out.splitlines()  # the server's own among them
    (figures,) = [json.loads(line) for line in lines if line.startswith("{")]
    assert figures["ratio"] == pytest.approx(figures["scored_ms"] / figures["plain_ms"], abs=0.2)


def test_a_server_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert scoring.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "benchmarks.scoring: error" in capsys.readouterr().err

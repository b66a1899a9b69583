"""The benchmark of streams runs: it starts what it needs and ends in one line of JSON."""

import json

import pytest

from benchmarks import http_streams
from tests.make_models import ensure_model


def test_it_measures_a_server_and_a_proxy_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--streams", "3", "--rate", "50", "--seconds", "0.5", "--chat", "--stop"]
    assert http_streams.main([*argv, "--model-dir", str(ensure_model("gqa"))]) == 0
    result = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert result["streams"] == 3
    assert result["events_per_s"] > 3
    assert result["cores"] == pytest.approx(result["http_cores"] + result["proxy_cores"])

"""The benchmark of the proxy runs: it starts what it needs and ends in one line of JSON."""

import json

import pytest

from benchmarks import proxy_overhead


def test_it_measures_a_proxy_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert proxy_overhead.main(["--num-requests", "40", "--concurrency", "4"]) == 0
    result = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert result["requests"] >= 40
    assert 0 < result["direct_p50_ms"] < result["proxied_p99_ms"]
    assert result["proxy_cpu_ms_per_request"] >= 0

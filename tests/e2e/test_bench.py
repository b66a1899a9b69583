"""`baton bench` against clusters of real servers."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cluster import Cluster
from tests.rigs.programs import BATON, launched

pytestmark = pytest.mark.slow


def run_bench(folder: Path, *argv: str) -> tuple[list[str], dict[str, Any]]:
    """Run `baton bench`. Return its lines of output, and the JSON of the last line."""
    with launched([*BATON, "bench", *argv], cwd=folder) as program:
        assert program.end() == 0, "\n".join(program.lines[-20:])
    return program.lines, json.loads(program.lines[-1])


def write_conversations(path: Path, num_sessions: int, num_turns: int) -> Path:
    rows = []
    for session in range(num_sessions):
        turn = {"session_id": session, "input_length": 40, "output_length": 8}
        rows.append({**turn, "timestamp": 100 * session})
        rows += [{**turn, "delay": 50}] * (num_turns - 1)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.usefixtures("all_blocks_return")
def test_kv_moves_and_later_turns_are_cached(tiny_cluster: Cluster, tmp_path: Path):
    trace = write_conversations(tmp_path / "trace.jsonl", num_sessions=4, num_turns=3)
    argv = ["--url", tiny_cluster.url, "--trace", str(trace), "--save", "out"]
    for server in tiny_cluster.servers()[1:]:
        argv += ["--metrics", server.url]
    _, document = run_bench(tmp_path, *argv)
    (side,) = document["sides"]
    assert (side["succeeded"], side["wrong_lengths"]) == (12, 0)
    # Prompts of the second and third turns contain the earlier turns and answers.
    assert side["prompt_tokens"] == 4 * (40 + 88 + 136)
    assert side["baton_kv"]["transferred"] > 4 * 40
    assert side["kv_bytes_moved"] > 0
    assert side["cache_hit_rate"] > 0.2
    assert side["counters"][tiny_cluster.url]["baton_proxy_requests_total"] >= 12
    assert "Time between tokens" in (tmp_path / "out.html").read_text()


@pytest.mark.usefixtures("all_blocks_return")
def test_proxy_and_decode_server_are_compared(tiny_cluster: Cluster, tmp_path: Path):
    argv = ["compare", "--a", tiny_cluster.url, "--b", tiny_cluster.decode[0].url]
    argv += ["--rate", "5", "--max-requests", "12", "--input-len", "40"]
    argv += ["--output-len", "8", "--slo", "ttft=60", "--metric", "goodput"]
    lines, document = run_bench(tmp_path, *argv)
    assert [side["succeeded"] for side in document["sides"]] == [12, 12]
    assert [side["prompt_tokens"] for side in document["sides"]] == [480, 480]
    assert document["verdict"]["winner"] is None
    assert lines[-2].startswith("No difference seen: A served 100.0%")


def test_advice_is_verified_with_real_servers(tiny_model: Path, tmp_path: Path):
    rows = [
        {"timestamp": 100 * index, "input_length": 60, "output_length": 8}
        for index in range(20)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["advise", "--trace", str(trace), "--model", str(tiny_model)]
    argv += ["--servers", "2", "--device", "cpu", "--slo", "ttft=20,itl=5", "--verify"]
    argv += ["--save-constants", "host.json", "--server-options=--dtype=float32"]
    lines, document = run_bench(tmp_path, *argv)
    assert any(line.startswith("constants of ") for line in lines)
    names = [each["deployment"] for each in document["predictions"]]
    assert names[0] == "2 replicas, round robin" and "1P1D auto" in names
    splits = [each["deployment"] for each in document["verification"]]
    assert len(splits) == 2 and sum("replicas" in name for name in splits) == 1
    for each in document["verification"]:
        # With limits that every request meets, the share is predicted exactly.
        assert each["predicted"]["slo_share"] == 1.0
        assert each["error"] is not None
        for run in each["runs"]:
            assert (run["slo_share"], run["failed"]) == (1.0, 0)
            assert run["host_slowdown"] > 0
            assert run["predicted"]["slo_share"] == 1.0
    # The saved constants give the same advice without servers.
    argv = ["--constants", "host.json", "--trace", str(trace), "--servers", "2"]
    argv += ["--model", str(tiny_model), "--slo", "ttft=20,itl=5", "--device", "cpu"]
    _, again = run_bench(tmp_path, "advise", *argv)
    assert again["predictions"] == document["predictions"]

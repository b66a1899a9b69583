"""Traces of coding agents have the published statistics. The smallest possible number
of computed tokens is that of a server with an infinite cache.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import agents
from benchmarks.agent_trace import (
    agent_workload,
    min_computed_tokens,
    statistics_of,
    trace_lines,
)
from benchmarks.bench.prompts import Answer, BodyOptions, PromptMaker
from benchmarks.bench.traces import read_trace
from benchmarks.bench.workload import Session, Turn, Workload
from tests.make_models import ensure_model
from tests.rigs.cluster import ENGINE_ARGV, assert_idle, cluster, running, start
from tests.rigs.examples import examples


def test_trace_has_the_published_statistics():
    statistics = statistics_of(agent_workload(610, rate=1.0, seed=0))
    assert statistics.turns == pytest.approx(33, rel=0.03)
    assert statistics.first_prompt_tokens == pytest.approx(12_000, rel=0.03)
    assert statistics.last_prompt_tokens == pytest.approx(80_000, rel=0.03)
    assert statistics.prompt_tokens_per_output_token == pytest.approx(131, rel=0.03)
    assert statistics.seen_share == pytest.approx(0.94, abs=0.01)
    assert statistics.pause_s == pytest.approx(5, rel=0.03)


def test_written_trace_is_read_by_the_bench(tmp_path: Path, capsys):
    path = tmp_path / "agents.jsonl"
    assert agents.main(["--write", str(path), "--sessions", "20", "--seed", "3"]) == 0
    made = agent_workload(20, rate=1.0, seed=3)
    assert "".join(trace_lines(made)) == path.read_text()
    read = read_trace(path)
    assert [session.turns for session in read.sessions] == [
        session.turns for session in made.sessions
    ]
    assert read.block_tokens == made.block_tokens
    statistics = json.loads(capsys.readouterr().out)
    assert statistics["requests"] == read.num_requests


turns = st.builds(
    Turn,
    input_tokens=st.integers(1, 20),
    output_tokens=st.integers(1, 9),
    blocks=st.lists(st.integers(0, 1), max_size=3).map(tuple),
)
sessions = st.builds(
    Session, arrival_s=st.just(0.0), turns=st.lists(turns, min_size=1).map(tuple)
)


@given(st.lists(sessions, min_size=1, max_size=4), st.integers(1, 7), st.integers(1, 6))
@examples(60)
def test_least_number_of_computed_tokens_is_that_of_an_infinite_cache(
    sessions, shared_tokens, block_tokens
):
    """The expected number is computed by comparing all prompts and answers."""
    workload = Workload(tuple(sessions), shared_tokens, "random")
    maker = PromptMaker(workload, BodyOptions(vocab_size=50_000))
    cached: set[tuple[int, ...]] = set()
    requests = []
    expected = 0
    for index, session in enumerate(sessions):
        answers: list[Answer] = []
        for number, turn in enumerate(session.turns):
            prompt = tuple(maker.tokens(index, number, answers))
            stops = range(block_tokens, len(prompt), block_tokens)
            hits = [stop for stop in stops if prompt[:stop] in cached]
            expected += len(prompt) - max(hits, default=0)
            first_id = 100_000 * (index + 1) + 100 * number
            answers.append(
                Answer("", tuple(range(first_id, first_id + turn.output_tokens)))
            )
            text = (*prompt, *answers[-1].token_ids)
            stops = range(block_tokens, len(text), block_tokens)
            cached |= {text[:stop] for stop in stops}
            requests.append((index, number))
    assert min_computed_tokens(workload, requests, block_tokens) == expected


def test_working_set_has_the_tokens_that_sessions_share_once():
    turns = (
        (Turn(10, 3, blocks=(0, 1)), Turn(5, 2)),  # 8 + 2 + 3 + 5 + 2 new tokens
        (Turn(6, 1, blocks=(0, 1)),),  # 1 new token, after a part of block 1
        (Turn(3, 2, blocks=(0,)),),  # 2 new tokens, after a part of block 0
        (Turn(9, 2, blocks=(0, 2)),),  # 4 + 1 + 2 new tokens, after block 0
    )
    sessions = tuple(Session(0.0, each) for each in turns)
    statistics = statistics_of(Workload(sessions, 4, "shared"))
    assert statistics.working_set_tokens == 20 + 1 + 2 + 7


def test_trace_with_shortened_blocks_is_not_written(tmp_path: Path, capsys):
    path = tmp_path / "agents.jsonl"
    assert agents.main(["--write", str(path), "--length-scale", "0.5"]) == 2
    assert "--length-scale" in capsys.readouterr().err and not path.exists()


def test_endpoint_without_the_counters_of_a_server_is_refused(capsys):
    with running(proxy := start("proxy", "--port", "0", "--decode", "http://[::1]:9")):
        assert agents.main(["--url", proxy.url, "--sessions", "1"]) == 2
    assert "--metrics URL" in capsys.readouterr().err


SCALED = ("--sessions", "3", "--length-scale", "0.005", "--load", "20", "--rate", "20")


@pytest.mark.slow
@pytest.mark.parametrize("has_pair", [False, True])
def test_servers_with_enough_memory_compute_hardly_more_than_the_least(
    has_pair: bool, capsys
):
    """The smallest possible number is defined as that of a single server with an
    infinite cache. So a single server with enough memory computes exactly this number.
    """
    tiny_model = ensure_model("gqa")
    if has_pair:
        with cluster(tiny_model) as pair:
            servers = pair.servers()[1:]
            argv = ["--url", pair.url]
            for server in servers:
                argv += ["--metrics", server.url]
            assert agents.main([*argv, *SCALED]) == 0
            assert_idle(*servers)
    else:
        argv = ["--model", str(tiny_model), *ENGINE_ARGV, "--role", "both"]
        with running(server := start("decode_server", *argv)):
            assert agents.main(["--url", server.url, *SCALED]) == 0
    lines = capsys.readouterr().out.splitlines()  # includes the servers' lines
    document = json.loads(next(line for line in lines if line.startswith("{")))
    assert document["succeeded"] == document["requests"] > 60
    assert document["computed_over_least"] <= (1.3 if has_pair else 1.0)

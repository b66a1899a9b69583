"""Traces, arrival times and prompts of `baton bench`."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.errors import BenchError
from benchmarks.bench.prompts import Answer, BodyOptions, PromptMaker
from benchmarks.bench.traces import read_trace
from benchmarks.bench.workload import (
    Session,
    Turn,
    Workload,
    arrivals_s,
    block_hashes,
    limited,
    scaled,
    segments,
    synthetic,
    with_poisson_arrivals,
)
from benchmarks.loads import from_sessions

ROW = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_arrivals_are_a_seeded_poisson_process():
    times = arrivals_s(20.0, 5000, seed=1)
    assert times == arrivals_s(20.0, 5000, seed=1) != arrivals_s(20.0, 5000, seed=2)
    assert times[0] == 0.0 and times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    # The standard deviation of an exponential distribution equals its mean.
    assert statistics.pstdev(gaps) == pytest.approx(1 / 20, rel=0.1)


def test_mooncake_trace_is_read(tmp_path):
    rows = [{**ROW, "timestamp": 3000}, {**ROW, "timestamp": 1000, "hash_ids": [9]}]
    workload = read_trace(write(tmp_path / "trace.jsonl", rows))
    assert workload.sessions == (
        Session(0.0, (Turn(600, 5, (9,)),)),
        Session(2.0, (Turn(600, 5, (7, 8)),)),
    )
    assert (workload.block_tokens, workload.name) == (512, "trace.jsonl")


def test_azure_trace_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,0\n"
    )
    first, second = read_trace(path).sessions
    assert first == Session(0.0, (Turn(374, 44),))
    assert second.arrival_s == pytest.approx(4.314579)
    assert second.turns == (Turn(396, 1),)  # an answer has at least one token


def test_conversations_are_read(tmp_path):
    turn = {"input_length": 10, "output_length": 2}
    rows = [
        {**turn, "session_id": "a", "timestamp": 100},
        {**turn, "session_id": "b", "timestamp": 200},
        {**turn, "session_id": "a", "delay": 1500},
        {**turn, "timestamp": 300},
    ]
    workload = read_trace(write(tmp_path / "trace.jsonl", rows))
    assert [len(session.turns) for session in workload.sessions] == [2, 1, 1]
    assert workload.sessions[0].turns[1].think_s == 1.5
    assert workload.num_requests == 4
    assert workload.longest_prompt == 24


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"timestamp": 0', "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"timestamp": 0, "output_length": 5}', "field input_length: is missing"),
        ({**ROW, "timestamp": "now"}, "field timestamp: 'now' is not a number"),
        ({**ROW, "timestamp": -1}, "field timestamp: -1 is not a number"),
        ({**ROW, "input_length": 1.5}, "field input_length: 1.5 is not a whole number"),
        ({**ROW, "input_length": True}, "field input_length: True is not a whole"),
        ({**ROW, "output_length": -3}, "field output_length: -3 must be from 0"),
        ({**ROW, "hash_ids": ["x"]}, "field hash_ids: must be a list of whole numbers"),
        ({**ROW, "session_id": []}, "field session_id: [] is not a string"),
        ({**ROW, "session_id": 1, "timestamp": None}, "field timestamp: is missing"),
    ],
)
def test_broken_line_is_named_with_file_line_and_field(tmp_path, line, problem):
    text = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{text}\n")
    with pytest.raises(BenchError) as error_info:
        read_trace(path)
    message = str(error_info.value)
    assert message.startswith(f"{path}, line 2")
    assert problem in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("TIMESTAMP,GeneratedTokens\n", "line 1, field ContextTokens: is missing"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n",
            "line 2, field TIMESTAMP: 'yesterday' is not a date",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,x,1\n",
            "line 2, field ContextTokens: 'x' is not a whole number",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
    ],
)
def test_broken_csv_is_named_with_file_line_and_field(tmp_path, text, problem):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(BenchError) as error_info:
        read_trace(path)
    assert problem in str(error_info.value)


def conversation(arrival_s: float, *input_tokens: int) -> Session:
    turns = tuple(Turn(tokens, 3, think_s=1.0) for tokens in input_tokens)
    return Session(arrival_s, turns)


WORKLOAD = Workload(
    sessions=(
        Session(0.0, (Turn(20, 3, (7, 8)),)),
        Session(1.0, (Turn(20, 3, (7, 9)),)),
        conversation(2.0, 20, 5, 5),
    ),
    block_tokens=8,
    name="test",
)


def test_limits_bound_requests_and_arrivals():
    assert limited(WORKLOAD, None, None) == WORKLOAD
    assert limited(WORKLOAD, 1, None).num_requests == 1
    assert limited(WORKLOAD, 4, None).num_requests == 4  # two of three turns
    assert limited(WORKLOAD, None, 1.5).num_requests == 2


def test_scaling_changes_times_and_lengths():
    workload = scaled(WORKLOAD, load=2.0, length=0.5)
    assert [session.arrival_s for session in workload.sessions] == [0.0, 0.5, 1.0]
    assert workload.block_tokens == 4
    assert workload.sessions[0].turns == (Turn(10, 2, (7, 8)),)
    assert workload.sessions[2].turns[1].think_s == 0.5


def test_poisson_arrivals_replace_those_of_a_trace():
    workload = with_poisson_arrivals(WORKLOAD, 2.0, seed=1)
    assert [s.arrival_s for s in workload.sessions] == arrivals_s(2.0, 3, 1)
    assert [s.turns for s in workload.sessions] == [s.turns for s in WORKLOAD.sessions]


def test_prompts_have_their_lengths_and_share_blocks():
    prompts = PromptMaker(WORKLOAD, BodyOptions(vocab_size=1000))
    first, second, third = (prompts.tokens(index, 0, []) for index in range(3))
    assert [len(first), len(second), len(third)] == [20, 20, 20]
    assert first[:8] == second[:8]
    assert first[8:16] != second[8:16]
    assert first[16:] != second[16:]  # tokens after the blocks are unique
    assert all(32 <= token < 1000 for token in first)
    assert first == PromptMaker(WORKLOAD, BodyOptions(vocab_size=1000)).tokens(0, 0, [])
    other_seed = BodyOptions(vocab_size=1000, seed=1)
    assert first != PromptMaker(WORKLOAD, other_seed).tokens(0, 0, [])


def test_shared_length_is_the_same_in_all_prompts():
    workload = synthetic(
        num_requests=2,
        rate=None,
        input_tokens=10,
        shared_tokens=4,
        output_tokens=1,
        seed=0,
    )
    prompts = PromptMaker(workload, BodyOptions())
    first, second = (prompts.tokens(index, 0, []) for index in range(2))
    assert first[:4] == second[:4] and first[4:] != second[4:]
    assert workload.is_closed


def test_later_turn_contains_earlier_turns_and_answers():
    prompts = PromptMaker(WORKLOAD, BodyOptions())
    first = prompts.tokens(2, 0, [])
    answers = [Answer("abc", (1, 2, 3)), Answer("d")]
    third = prompts.tokens(2, 2, answers)
    assert third[:23] == [*first, 1, 2, 3]
    assert len(third) == 20 + 3 + 5 + 3 + 5  # answers without ids count fully, too
    body = PromptMaker(WORKLOAD, BodyOptions(uses_words=True)).body(
        2, 1, answers[:1], model="m", returns_token_ids=False
    )
    words = body["prompt"].split()
    assert len(words) == 20 + 1 + 5 and words[20] == "abc"


def test_equal_prefixes_have_equal_block_hashes():
    first, second, third = (block_hashes(segments(WORKLOAD, i, 0), 4) for i in range(3))
    assert [len(hashes) for hashes in (first, second, third)] == [5, 5, 5]
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert not set(first) & set(third)
    later_turn = block_hashes(segments(WORKLOAD, 2, 1), 4)
    assert later_turn[:5] == third
    assert len(later_turn) == 7


def test_simulated_turns_follow_their_answers():
    requests, follow_up = from_sessions(WORKLOAD, 4)
    assert [request.prompt_tokens for request in requests] == [20, 20, 20]
    assert follow_up(requests[0], 5.0) is None
    second = follow_up(requests[2], 5.0)
    assert second is not None
    assert (second.arrival_s, second.prompt_tokens, second.turn) == (6.0, 28, 1)
    assert second.hashes[:5] == requests[2].hashes
    third = follow_up(second, 9.0)
    assert third is not None and third.prompt_tokens == 36
    assert follow_up(third, 12.0) is None

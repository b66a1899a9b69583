"""Makes traces of coding agents, and computes how few prompt tokens a server must
compute for them.

The means are those of 610 published traces of coding agents. A session has 33 turns,
and its prompts grow from 12,000 to 80,000 tokens. There are 131 prompt tokens per
output token; about 94 % of the prompt tokens were in earlier requests of the session.
Between two turns, a tool runs for five seconds. The spread of the values around these
means is an assumption.
"""

import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.bench.traces import BLOCK_TOKENS
from benchmarks.bench.workload import (
    Session,
    Turn,
    Workload,
    arrivals_s,
    block_hashes,
    segments,
)

MEAN_TURNS = 33
FIRST_PROMPT_TOKENS = 12_000
LAST_PROMPT_TOKENS = 80_000
MEAN_OUTPUT_TOKENS = 365  # so that there are 131 prompt tokens per output token
MEAN_PAUSE_S = 5.0
# Blocks of the system prompt and the tool definitions, which all sessions share.
SYSTEM_BLOCKS = 16
_MEAN_TOOL_RESULT_TOKENS = (LAST_PROMPT_TOKENS - FIRST_PROMPT_TOKENS) / (
    MEAN_TURNS - 1
) - MEAN_OUTPUT_TOKENS
_MAX_TURNS = 200
# Standard deviations of the logarithms of lognormally distributed values.
_TURNS_SIGMA = 0.2
_TASK_SIGMA = 0.5
_TOOL_RESULT_SIGMA = 1.0
_OUTPUT_SIGMA = 0.8


def agent_workload(num_sessions: int, rate: float, seed: int) -> Workload:
    """Return sessions of coding agents.

    Args:
        rate: new sessions per second of a Poisson process.
    """
    rng = random.Random(f"agents {seed}")
    sessions = tuple(
        Session(arrival_s, _turns(rng))
        for arrival_s in arrivals_s(rate, num_sessions, seed)
    )
    return Workload(sessions, BLOCK_TOKENS, f"agents {seed}")


def _turns(rng: random.Random) -> tuple[Turn, ...]:
    num_turns = min(_draw(rng, MEAN_TURNS, _TURNS_SIGMA), _MAX_TURNS)
    system_tokens = SYSTEM_BLOCKS * BLOCK_TOKENS
    task_tokens = _draw(rng, FIRST_PROMPT_TOKENS - system_tokens, _TASK_SIGMA)
    turns = [
        Turn(
            input_tokens=system_tokens + task_tokens,
            output_tokens=_draw(rng, MEAN_OUTPUT_TOKENS, _OUTPUT_SIGMA),
            blocks=tuple(range(SYSTEM_BLOCKS)),
        )
    ]
    for _ in range(num_turns - 1):
        turn = Turn(
            input_tokens=_draw(rng, _MEAN_TOOL_RESULT_TOKENS, _TOOL_RESULT_SIGMA),
            output_tokens=_draw(rng, MEAN_OUTPUT_TOKENS, _OUTPUT_SIGMA),
            # Rounded to milliseconds, the unit of a trace file.
            think_s=round(rng.expovariate(1 / MEAN_PAUSE_S), 3),
        )
        turns.append(turn)
    return tuple(turns)


def _draw(rng: random.Random, mean: float, sigma: float) -> int:
    """Draw a whole number, at least 1, from a lognormal distribution."""
    value = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return max(1, round(value))


def trace_lines(workload: Workload) -> Iterator[str]:
    """Yield the lines of a trace of conversations, as in benchmarks/bench/traces.py."""
    for number, session in enumerate(workload.sessions):
        for index, turn in enumerate(session.turns):
            row: dict[str, Any] = {"session_id": number}
            if index:
                row["delay"] = round(turn.think_s * 1e3, 3)
            else:
                row["timestamp"] = round(session.arrival_s * 1e3, 3)
            row["input_length"] = turn.input_tokens
            row["output_length"] = turn.output_tokens
            row["hash_ids"] = list(turn.blocks)
            yield json.dumps(row) + "\n"


@dataclass(frozen=True)
class TraceStatistics:
    """The statistics of a trace, in the order of the published statistics.

    Attributes:
        seen_share: share of the prompt tokens that were in earlier prompts of the
            session.
        working_set_tokens: tokens of KV of all complete sessions. A prefix that several
            sessions share counts once.
    """

    sessions: int
    requests: int
    turns: float
    first_prompt_tokens: float
    last_prompt_tokens: float
    prompt_tokens_per_output_token: float
    seen_share: float
    pause_s: float
    prompt_tokens: int
    working_set_tokens: int


def statistics_of(workload: Workload) -> TraceStatistics:
    sessions = workload.sessions
    prompts = [_prompt_lengths(session) for session in sessions]
    num_prompt_tokens = sum(map(sum, prompts))
    turns = [turn for session in sessions for turn in session.turns]
    num_output_tokens = sum(turn.output_tokens for turn in turns)
    num_new = sum(turn.input_tokens for turn in turns)
    # Answer tokens that are in later prompts. Each session's last answer is in none.
    num_answered = sum(prompts[i][-1] for i in range(len(sessions))) - num_new
    num_pauses = max(len(turns) - len(sessions), 1)
    return TraceStatistics(
        sessions=len(sessions),
        requests=len(turns),
        turns=len(turns) / len(sessions),
        first_prompt_tokens=sum(lengths[0] for lengths in prompts) / len(sessions),
        last_prompt_tokens=sum(lengths[-1] for lengths in prompts) / len(sessions),
        prompt_tokens_per_output_token=num_prompt_tokens / num_output_tokens,
        seen_share=1 - (num_new + num_answered) / num_prompt_tokens,
        pause_s=sum(turn.think_s for turn in turns) / num_pauses,
        prompt_tokens=num_prompt_tokens,
        working_set_tokens=_working_set_tokens(workload),
    )


def _prompt_lengths(session: Session) -> list[int]:
    """Return the length of the prompt of each turn."""
    inputs = [turn.input_tokens for turn in session.turns]
    answers = [turn.output_tokens for turn in session.turns[:-1]]
    growth = [inputs[0], *map(sum, zip(answers, inputs[1:], strict=True))]
    return list(itertools.accumulate(growth))


def _working_set_tokens(workload: Workload) -> int:
    """Return the tokens of KV that an infinite cache holds after all sessions."""
    # The length of each segment, by a hash of the keys of all segments up to this one.
    # A prompt may end within a shared block, so the longest length counts.
    lengths: dict[int, int] = {}
    for index, session in enumerate(workload.sessions):
        last = len(session.turns) - 1
        answer = (("answer", index, last), session.turns[last].output_tokens)
        prefix = 0
        for key, length in [*segments(workload, index, last), answer]:
            prefix = hash((prefix, key))
            lengths[prefix] = max(lengths.get(prefix, 0), length)
    return sum(lengths.values())


def min_computed_tokens(
    workload: Workload, requests: Iterable[tuple[int, int]], block_tokens: int
) -> int:
    """Return the number of prompt tokens that a server with an infinite cache computes.

    The server reuses complete blocks of earlier prompts and answers. It computes at
    least the last token of each prompt.

    Args:
        requests: the session and the turn of each request, in the order of sending.
        block_tokens: number of tokens in a KV block of the server.
    """
    cached: set[int] = set()
    num_computed = 0
    for session_index, turn_index in requests:
        parts = segments(workload, session_index, turn_index)
        num_tokens = sum(length for _, length in parts)
        hashes = block_hashes(parts, block_tokens)
        num_hits = 0
        for block in hashes[: (num_tokens - 1) // block_tokens]:
            if block not in cached:
                break
            num_hits += 1
        num_computed += num_tokens - num_hits * block_tokens
        # The last token of an answer is sampled, but its KV is not computed.
        turn = workload.sessions[session_index].turns[turn_index]
        answer = (("answer", session_index, turn_index), turn.output_tokens)
        num_full = (num_tokens + turn.output_tokens - 1) // block_tokens
        cached.update(block_hashes([*parts, answer], block_tokens)[:num_full])
    return num_computed

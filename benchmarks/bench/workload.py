"""The load of a benchmark: sessions of turns, and the times at which they are due.

A session is a conversation. Its first turn is due at `arrival_s`, whether or not other
sessions have finished. Each later turn is due `think_s` after the end of the preceding
turn's answer. A request without a conversation is a session with one turn.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        input_tokens: tokens that this turn adds to the conversation. The prompt of the
            first turn has exactly these tokens.
        output_tokens: tokens of the answer.
        blocks: ids of the blocks with which the added tokens begin. Blocks with the
            same id have the same tokens. All tokens after these blocks are unique.
        think_s: seconds from the end of the preceding turn; 0 for the first turn.
    """

    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation.

    Attributes:
        arrival_s: time at which the first turn is due, in seconds from the start.
    """

    arrival_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Workload:
    """All sessions, in the order of their arrivals.

    Attributes:
        block_tokens: tokens of each block of `Turn.blocks`.
        name: name of the load in the report.
        is_closed: True if a session begins when an earlier session has ended (a closed
            loop); False if it begins at its `arrival_s`.
    """

    sessions: tuple[Session, ...]
    block_tokens: int
    name: str
    is_closed: bool = False

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt together with its answer."""
        return max(
            (
                sum(turn.input_tokens + turn.output_tokens for turn in session.turns)
                for session in self.sessions
            ),
            default=0,
        )


def arrivals_s(rate: float, count: int, seed: int) -> list[float]:
    """Return the arrival times of a Poisson process, in seconds from the first arrival.

    Args:
        rate: arrivals per second.
    """
    rng = random.Random(f"arrivals {seed}")
    gaps = (rng.expovariate(rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


def synthetic(
    *,
    num_requests: int,
    rate: float | None,
    input_tokens: int,
    shared_tokens: int,
    output_tokens: int,
    seed: int,
) -> Workload:
    """Return requests of equal lengths with prompts that share a prefix.

    Args:
        rate: arrivals per second of a Poisson process; None: a closed loop.
        shared_tokens: length of the prefix that all prompts share.
    """
    times = [0.0] * num_requests
    if rate is not None:
        times = arrivals_s(rate, num_requests, seed)
    blocks = (0,) if shared_tokens else ()
    turn = Turn(input_tokens, output_tokens, blocks)
    return Workload(
        sessions=tuple(Session(time_s, (turn,)) for time_s in times),
        block_tokens=max(shared_tokens, 1),
        name=f"{input_tokens} + {output_tokens} tokens",
        is_closed=rate is None,
    )


def with_poisson_arrivals(workload: Workload, rate: float, seed: int) -> Workload:
    """Return the same sessions with the arrival times of a Poisson process."""
    times = arrivals_s(rate, len(workload.sessions), seed)
    sessions = tuple(
        replace(session, arrival_s=time_s)
        for session, time_s in zip(workload.sessions, times, strict=True)
    )
    return replace(workload, sessions=sessions, is_closed=False)


def limited(
    workload: Workload, max_requests: int | None, duration_s: float | None
) -> Workload:
    """Return only the first sessions of the workload: up to `max_requests` requests.

    In an open loop, sessions that arrive more than `duration_s` seconds after the first
    session are left out, too.
    """
    sessions = []
    num_left = workload.num_requests if max_requests is None else max_requests
    for session in workload.sessions:
        is_late = duration_s is not None and session.arrival_s > duration_s
        if num_left <= 0 or (is_late and not workload.is_closed):
            break
        turns = session.turns[:num_left]
        num_left -= len(turns)
        sessions.append(replace(session, turns=turns))
    return replace(workload, sessions=tuple(sessions))


def scaled(workload: Workload, load: float, length: float) -> Workload:
    """Return the workload at `load` times the speed, with lengths times `length`."""
    if load == 1.0 and length == 1.0:
        return workload
    return replace(
        workload,
        sessions=tuple(
            Session(
                session.arrival_s / load,
                tuple(
                    replace(
                        turn,
                        input_tokens=max(1, round(turn.input_tokens * length)),
                        output_tokens=max(1, round(turn.output_tokens * length)),
                        think_s=turn.think_s / load,
                    )
                    for turn in session.turns
                ),
            )
            for session in workload.sessions
        ),
        block_tokens=max(1, round(workload.block_tokens * length)),
    )


# A part of a prompt: a key that identifies its tokens, and its length.
Segment = tuple[tuple[object, ...], int]


def segments(workload: Workload, session_index: int, turn_index: int) -> list[Segment]:
    """Return the parts of a prompt, in order: first the parts of the earlier turns,
    each with its answer, then the parts of this turn.

    Segments with equal keys begin with the same tokens, in all prompts.
    """
    parts: list[Segment] = []
    turns = workload.sessions[session_index].turns
    for index, turn in enumerate(turns[: turn_index + 1]):
        parts += _input_segments(workload, session_index, index, turn)
        if index < turn_index:
            parts.append((("answer", session_index, index), turn.output_tokens))
    return parts


def _input_segments(
    workload: Workload, session_index: int, turn_index: int, turn: Turn
) -> Iterator[Segment]:
    num_left = turn.input_tokens
    for block in turn.blocks:
        if num_left <= 0:
            return
        yield ("block", block), min(workload.block_tokens, num_left)
        num_left -= workload.block_tokens
    if num_left > 0:
        yield ("unique", session_index, turn_index), num_left


def block_hashes(parts: Sequence[Segment], block_tokens: int) -> tuple[int, ...]:
    """Return chained hashes of the complete blocks of a prompt.

    Two prompts have the same hash at an index if they have the same segments up to the
    end of that block.
    """
    hashes: list[int] = []
    content: list[tuple[object, ...]] = []
    chained_hash = 0
    missing = block_tokens
    for key, length in parts:
        offset = 0
        while offset < length:
            count = min(missing, length - offset)
            content.append((*key, offset, count))
            offset += count
            missing -= count
            if missing == 0:
                chained_hash = hash((chained_hash, *content))
                hashes.append(chained_hash)
                content = []
                missing = block_tokens
    return tuple(hashes)

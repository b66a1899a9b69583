"""The requests to simulated servers: sessions of a trace, and synthetic mixes.

Each prompt is represented by the hashes of its blocks. Prompts with a common prefix
begin with the same hashes.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.bench.traces import BLOCK_TOKENS
from benchmarks.bench.workload import Workload as SessionWorkload
from benchmarks.bench.workload import block_hashes, segments


@dataclass(slots=True)
class Request:
    """One request, and the state of its simulation. Times are in seconds.

    Attributes:
        hashes: hashes of the prompt's blocks.
        turn: number of preceding requests in the same session.
        session: number of the session in a trace.
        uncomputed_tokens: tokens of the prompt that a server still has to compute.
        generated_tokens: output tokens so far.
        on_decode_server: whether a decode server computes the prompt.
        computed_tokens: tokens of the prompt that a server has computed. Tokens with
            cached KV do not count.
        overtaken_tokens: tokens of shorter prompts that arrived later, but were placed
            ahead of this prompt in the queue.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]
    turn: int = 0
    session: int = 0
    uncomputed_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    on_decode_server: bool = False
    computed_tokens: int = 0
    overtaken_tokens: int = 0


# A function that gets a finished request and the current time in seconds. It returns
# the request that follows, or None.
FollowUp = Callable[[Request, float], Request | None]
Workload = tuple[list[Request], FollowUp]


def _no_follow_up(_request: Request, _now: float) -> None:
    pass


# -- sessions of a trace


def from_sessions(workload: SessionWorkload, block_tokens: int) -> Workload:
    """Return the requests of sessions.

    Args:
        block_tokens: number of tokens in each block of `Request.hashes`.
    """

    def request(session_index: int, turn_index: int, arrival_s: float) -> Request:
        parts = segments(workload, session_index, turn_index)
        turn = workload.sessions[session_index].turns[turn_index]
        return Request(
            arrival_s=arrival_s,
            prompt_tokens=sum(length for _, length in parts),
            output_tokens=turn.output_tokens,
            hashes=block_hashes(parts, block_tokens),
            turn=turn_index,
            session=session_index,
        )

    def next_turn(previous: Request, now: float) -> Request | None:
        turns = workload.sessions[previous.session].turns
        turn_index = previous.turn + 1
        if turn_index == len(turns):
            return None
        return request(previous.session, turn_index, now + turns[turn_index].think_s)

    first_turns = [
        request(index, 0, session.arrival_s)
        for index, session in enumerate(workload.sessions)
    ]
    return first_turns, next_turn


# -- mixes: each docstring gives the arrival rate or the number of requests per `load`


class _RequestMaker:
    """Makes requests.

    A prompt may begin with given block hashes. All further blocks of the prompt get new
    hashes.
    """

    def __init__(self) -> None:
        self._next_hash = itertools.count(1 << 32)

    def new_hashes(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._next_hash, count))

    def request(
        self,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        prefix: tuple[int, ...] = (),
        turn: int = 0,
    ) -> Request:
        """Return a request with a prompt that consists of `prefix` and new blocks.

        Args:
            prefix: block hashes with which the prompt begins.
        """
        num_new_blocks = prompt_tokens // BLOCK_TOKENS - len(prefix)
        hashes = prefix + self.new_hashes(num_new_blocks)
        return Request(arrival_s, prompt_tokens, output_tokens, hashes, turn=turn)


def _arrivals_s(rng: random.Random, rate: float, count: int) -> Iterator[float]:
    """Yield the arrival times of a Poisson process of `rate` arrivals per second."""
    return itertools.accumulate(rng.expovariate(rate) for _ in range(count))


def _sessions(
    rate: float,
    max_requests: int,
    *,
    num_system_prompts: int,
    system_blocks: int,
    turns: int,
    question_tokens: int,
    output_tokens: int,
    pause_s: int,
) -> Workload:
    """Return sessions that share system prompts.

    Args:
        rate: new sessions per second.
        num_system_prompts: number of system prompts; each session uses one at random.
        system_blocks: length of a system prompt in blocks.
        turns: number of requests of a session.
        question_tokens: prompt tokens that each turn adds to the conversation.
        output_tokens: tokens of each answer.
        pause_s: mean time from an answer to the next turn.
    """
    rng = random.Random(1)
    maker = _RequestMaker()
    system_prompts = [
        maker.new_hashes(system_blocks) for _ in range(num_system_prompts)
    ]

    def next_turn(previous: Request, now: float) -> Request | None:
        if previous.turn + 1 == turns:
            return None
        return maker.request(
            now + rng.expovariate(1 / pause_s),
            previous.prompt_tokens + previous.output_tokens + question_tokens,
            output_tokens,
            previous.hashes,
            previous.turn + 1,
        )

    prompt_tokens = system_blocks * BLOCK_TOKENS + question_tokens
    first_turns = [
        maker.request(
            arrival_s, prompt_tokens, output_tokens, rng.choice(system_prompts)
        )
        for arrival_s in _arrivals_s(rng, rate, max_requests // turns)
    ]
    return first_turns, next_turn


def agents(load: float, max_requests: int) -> Workload:
    """Sessions of tool calls: long prompts, short answers, short pauses.

    `load` sessions begin per second.
    """
    return _sessions(
        1.0 * load,
        max_requests,
        num_system_prompts=4,
        system_blocks=24,
        turns=12,
        question_tokens=700,
        output_tokens=120,
        pause_s=1,
    )


def chats(load: float, max_requests: int) -> Workload:
    """Sessions of chats: shorter prompts than `agents`, longer answers and pauses.

    4 x `load` sessions begin per second.
    """
    return _sessions(
        4.0 * load,
        max_requests,
        num_system_prompts=8,
        system_blocks=2,
        turns=6,
        question_tokens=250,
        output_tokens=300,
        pause_s=10,
    )


def documents(load: float, _max_requests: int) -> Workload:
    """For 25 s, 32 short requests decode while long prompts arrive.

    2 x `load` prompts of 8,192 tokens arrive per second. If a short request finishes
    within the 25 s, a new short request follows. The number of requests is not limited.
    """
    rng = random.Random(1)
    maker = _RequestMaker()

    def next_stream(previous: Request, now: float) -> Request | None:
        if previous.prompt_tokens == 128 and now < 25.0:
            return maker.request(now, 128, 256)
        return None

    streams = [maker.request(0.02 * index, 128, 256) for index in range(32)]
    long_prompts = [
        maker.request(arrival_s, 8192, 8)
        for arrival_s in _arrivals_s(rng, 2.0 * load, int(50 * load))
    ]
    early_prompts = [request for request in long_prompts if request.arrival_s < 25.0]
    return [*streams, *early_prompts], next_stream


def open_loop(load: float, max_requests: int) -> Workload:
    """Independent requests: prompts of 2,048 tokens on average, 192 output tokens.

    `load` requests arrive per second, for one minute or up to `max_requests`.
    """
    rng = random.Random(1)
    maker = _RequestMaker()
    log_mean = math.log(2048) - 0.6**2 / 2  # so that the mean length is 2,048
    requests = []
    for arrival_s in _arrivals_s(rng, load, min(max_requests, int(60 * load))):
        length = round(rng.lognormvariate(log_mean, 0.6))
        prompt_tokens = min(max(length, 16), 12_000)
        requests.append(maker.request(arrival_s, prompt_tokens, 192))
    return requests, _no_follow_up


def burst(load: float, max_requests: int) -> Workload:
    """256 x `load` requests at once: prompts of 1,024 tokens, 256 output tokens."""
    maker = _RequestMaker()
    count = min(max_requests, int(256 * load))
    requests = [maker.request(0.0, 1024, 256) for _ in range(count)]
    return requests, _no_follow_up


MIXES: dict[str, Callable[[float, int], Workload]] = {
    "agents": agents,
    "chats": chats,
    "documents": documents,
    "open": open_loop,
    "burst": burst,
}

"""What is asked of simulated servers: traces, and mixes of our own. Every prompt is named by the
hashes of its blocks; two that begin alike have the first of them in common."""

import csv
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

BLOCK = 512  # tokens, as in Mooncake's traces


@dataclass(slots=True)
class Request:
    arrival: float
    tokens: int
    answer: int
    hashes: tuple[int, ...]
    turn: int = 0  # of a session
    left: int = 0  # tokens of the prompt to compute
    done: int = 0  # generated
    first: float = 0.0
    last: float = 0.0
    alone: bool = False  # a decode server computes the prompt
    computed: int = 0
    overtaken: int = 0  # by so many tokens of shorter prompts


Then = Callable[[Request, float], Request | None]  # what follows one that has ended
Loaded = tuple[list[Request], Then]


def _nothing(_request: Request, _now: float) -> None:
    pass


# -- traces, `load` times as fast as they were


def mooncake(path: Path, load: float, most: int) -> Loaded:
    rows = (json.loads(line) for line in path.read_text().splitlines()[:most])
    return [
        Request(
            row["timestamp"] / 1e3 / load, row["input_length"], row["output_length"],
            tuple(row["hash_ids"]),
        )
        for row in rows
    ], _nothing  # fmt: skip


def azure(path: Path, load: float, most: int) -> Loaded:
    """No prompt has anything in common with another's: the trace does not say."""
    with path.open() as file:
        rows = list(itertools.islice(csv.DictReader(file), most))
    begun = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    new = _Blocks()
    return [
        new.request(
            (at - begun[0]).total_seconds() / load,
            max(int(row["ContextTokens"]), 1),
            max(int(row["GeneratedTokens"]), 1),
        )
        for at, row in zip(begun, rows, strict=True)
    ], _nothing


# -- mixes: (load, most requests)


class _Blocks:
    """Blocks that no prompt had before."""

    def __init__(self) -> None:
        self._next = itertools.count(1 << 32)

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._next, count))

    def request(
        self,
        at: float,
        tokens: int,
        answer: int,
        known: tuple[int, ...] = (),
        turn: int = 0,
    ) -> Request:
        """Its prompt begins with what is known."""
        return Request(
            at,
            tokens,
            answer,
            known + self.take(tokens // BLOCK - len(known)),
            turn=turn,
        )


def _arrivals(rng: random.Random, rate: float, most: int) -> Iterator[float]:
    return itertools.accumulate(rng.expovariate(rate) for _ in range(most))


def _sessions(
    rate: float,
    most: int,
    systems: tuple[int, int],
    turns: int,
    asked: int,
    answer: int,
    pause: int,
) -> Loaded:
    """Sessions of so many turns, with `asked` tokens more each. They share system prompts: how
    many, of how many blocks. The next turn comes a `pause` after the answer, on average."""
    rng, new = random.Random(1), _Blocks()
    shared = [new.take(systems[1]) for _ in range(systems[0])]

    def then(before: Request, now: float) -> Request | None:
        if before.turn + 1 == turns:
            return None
        tokens = before.tokens + before.answer + asked
        later = now + rng.expovariate(1 / pause)
        return new.request(later, tokens, answer, before.hashes, before.turn + 1)

    return [
        new.request(at, systems[1] * BLOCK + asked, answer, rng.choice(shared))
        for at in _arrivals(rng, rate, most // turns)
    ], then


def agents(load: float, most: int) -> Loaded:
    """Tool calls: long prompts that a few kinds of agents share, short answers, hardly a pause."""
    return _sessions(1.0 * load, most, (4, 24), 12, 700, 120, 1)


def chats(load: float, most: int) -> Loaded:
    return _sessions(4.0 * load, most, (8, 2), 6, 250, 300, 10)


def documents(load: float, _most: int) -> Loaded:
    """32 streams, each followed by another, beside 8,192 tokens to read twice a second."""
    rng, new = random.Random(1), _Blocks()

    def then(before: Request, now: float) -> Request | None:
        return (
            new.request(now, 128, 256) if before.tokens == 128 and now < 25.0 else None
        )

    streams = [new.request(0.02 * each, 128, 256) for each in range(32)]
    long = [
        new.request(at, 8192, 8) for at in _arrivals(rng, 2.0 * load, int(50 * load))
    ]
    return [*streams, *(each for each in long if each.arrival < 25.0)], then


def open_loop(load: float, most: int) -> Loaded:
    """2,048 tokens on average, 192 to generate, `load` a second for a minute."""
    rng, new = random.Random(1), _Blocks()
    mean = math.log(2048) - 0.6**2 / 2
    return [
        new.request(at, min(max(round(rng.lognormvariate(mean, 0.6)), 16), 12_000), 192)
        for at in _arrivals(rng, load, min(most, int(60 * load)))
    ], _nothing


def burst(load: float, most: int) -> Loaded:
    """All at once: 256 prompts of 1,024 tokens, 256 to generate."""
    new = _Blocks()
    return [
        new.request(0.0, 1024, 256) for _ in range(min(most, int(256 * load)))
    ], _nothing


MIXES: dict[str, Callable[[float, int], Loaded]] = {
    "agents": agents,
    "chats": chats,
    "documents": documents,
    "open": open_loop,
    "burst": burst,
}

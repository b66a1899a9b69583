"""Policies of the proxy on simulated servers: the real placement code, a trace, a table.

    python -m benchmarks.routing --trace FILE [--engines 4] [--prefill 2] [--load 1.0,1.5]

A server runs steps: its streams, and prompts in the order of arrival, cut so that a step stays
within the limit while streams run. Its times are those of a Llama-3.1-8B shape on one H200
(docs/performance.md), its prefix cache drops what was used longest ago. `known` is a router that
sees the servers themselves instead of what the proxy knows. The last line is one JSON document.
"""

import argparse
import csv
import heapq
import itertools
import json
import statistics
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from proxy.knowledge import Disaggregate, Knowledge, Routing, Totals, Work
from proxy.placement import Ask, Limits, Load, place

BLOCK = 512  # tokens, as in the traces
POLL_S = 1.0  # between two health checks
HEAD = "policy        TTFT p50     p99 s  TPOT ms  gap p99  good  computed  alone"
ROW = "{:13} {:8.3f} {:9.3f} {:8.1f} {:8.0f} {:5.3f} {:9.3f} {:6.2f}"


@dataclass(frozen=True)
class Times:
    """Of one engine, in seconds."""

    step: float = 4.0e-3
    sequence: float = 11e-6
    held_token: float = 31e-9  # of KV, read in each step
    token: float = 23.2e-6  # of a prompt
    pair: float = 0.3e-9  # of a prompt's token and one before it
    handoff: float = 4e-3  # of a disaggregated request
    sent_token: float = 131072 / 200e9  # of KV, over the link
    capacity: int = 880_000  # tokens of KV
    batch: int = 8192  # tokens of prompts in one step
    least: int = 256  # of them beside streams that are past their limit


@dataclass(slots=True)
class Request:
    arrival: float
    tokens: int
    answer: int
    hashes: tuple[int, ...]
    left: int = 0  # tokens of the prompt to compute
    done: int = 0  # generated
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0  # the longest between two tokens
    decode: int = 0  # the server that generates
    alone: bool = False  # and computes the prompt
    computed: int = 0


class Cache:
    """A prefix cache of blocks, the one used longest ago dropped first."""

    def __init__(self, capacity: int) -> None:
        self._most = capacity // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def depth(self, hashes: Sequence[int]) -> int:
        return next((i for i, h in enumerate(hashes) if h not in self._blocks), len(hashes))

    def add(self, hashes: Sequence[int]) -> None:
        for each in reversed(hashes):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


class Engine:
    """One server. `step` computes one step that begins at `now` and says when it ends."""

    def __init__(self, index: int, prefills: bool, times: Times, limit: float) -> None:
        self.index, self.prefills, self.times, self.limit = index, prefills, times, limit
        self.cache = Cache(times.capacity // 2)
        self.waiting: deque[Request] = deque()
        self.parked: deque[Request] = deque()  # computed elsewhere; there is no room for their KV
        self.streams: list[Request] = []
        self.held = 0
        self.busy = False
        self.totals = Totals()

    def queued_s(self) -> float:
        """What the prompts that wait will take."""
        seconds = sum(each.left for each in self.waiting) * Load(0).token_s
        if not self.streams:
            return seconds
        return seconds / min(max(1 - self.base_s() / self.limit, 0.05), 1.0)

    def base_s(self) -> float:
        t = self.times
        return t.step + len(self.streams) * t.sequence + self.held * t.held_token

    def admit(self, request: Request) -> None:
        """A prompt to compute here; what is cached is found when its turn comes."""
        request.left = self._uncached(request)
        self.waiting.append(request)

    def _uncached(self, request: Request) -> int:
        return max(request.tokens - self.cache.depth(request.hashes) * BLOCK, 1)

    def step(self, now: float) -> tuple[float, list[Request]]:
        """When the step ends, and the requests whose prompt is computed then."""
        t = self.times
        base = self.base_s() if self.streams else t.step
        room = t.batch
        if self.streams:
            room = min(max(int((self.limit - base) / t.token), t.least), t.batch)
        seconds, before, ended = base, room, []
        while self.waiting and room > 0:
            first = self.waiting[0]
            if not first.computed:  # its turn: prefixes may have come since
                first.left = min(first.left, self._uncached(first))
                if not self.prefills and not self._has_room(first):
                    break
            count = min(room, first.left)
            seconds += count * t.token + count * (first.tokens - first.left + count / 2) * t.pair
            first.computed += count
            first.left -= count
            room -= count
            if first.left == 0:
                ended.append(self.waiting.popleft())
                self.cache.add(first.hashes)
        steps, tokens, took = self.totals
        tokens += len(self.streams) + before - room
        self.totals = Totals(steps + 1, tokens, took + seconds)
        return now + seconds, ended

    def generate(self, now: float) -> list[Request]:
        """A token for each stream; those that have ended."""
        over = []
        for each in self.streams:
            each.gap = max(each.gap, now - each.last)
            each.last = now
            each.done += 1
            if each.done >= each.answer:
                over.append(each)
        self.held += len(self.streams)
        if over:
            self.streams = [each for each in self.streams if each.done < each.answer]
            self.held -= sum(each.tokens + each.done for each in over)
            while self.parked and self._has_room(self.parked[0]):
                self.stream(self.parked.popleft(), now)
        return over

    def _has_room(self, request: Request) -> bool:
        return not self.streams or self.held + request.tokens <= self.times.capacity

    def deliver(self, request: Request, now: float) -> None:
        """A prompt that was computed elsewhere."""
        if self.parked or not self._has_room(request):
            self.parked.append(request)
        else:
            self.stream(request, now)

    def stream(self, request: Request, now: float) -> None:
        request.gap = max(request.gap, now - request.last) if request.last else 0.0
        request.first = request.first or now
        request.last = now
        request.done = max(request.done, 1)
        self.streams.append(request)
        self.held += request.tokens + request.done
        self.cache.add(request.hashes)


Router = Callable[[Request], tuple[int | None, int]]  # a prefill server or none, a decode server


class Fleet:
    """Engines, and what happens to them in which order.

    Attributes:
        router: decides where a request goes that has come.
        told: hears of a request that its prompt was "computed", and that it has "ended".
    """

    router: Router

    def __init__(self, engines: list[Engine], times: Times) -> None:
        self.engines, self.times, self.now = engines, times, 0.0
        self.prefills = [each for each in engines if each.prefills]
        self.decodes = [each for each in engines if not each.prefills]
        self.told: Callable[[Request, str], None] = lambda request, what: None
        self._count = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self, requests: Sequence[Request]) -> None:
        for each in requests:
            self._at(each.arrival, partial(self._arrive, each))
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), event))

    def _arrive(self, request: Request) -> None:
        prefill, request.decode = self.router(request)
        request.alone = prefill is None
        engine = self.engines[request.decode if prefill is None else prefill]
        engine.admit(request)
        self._begin(engine)

    def _begin(self, engine: Engine) -> None:
        if not engine.busy and (engine.waiting or engine.streams):
            engine.busy = True
            end, computed = engine.step(self.now)
            self._at(end, partial(self._end, engine, computed))

    def _end(self, engine: Engine, computed: list[Request]) -> None:
        """Of a step."""
        engine.busy = False
        for each in engine.generate(self.now):
            self.told(each, "ended")
        for each in computed:
            self.told(each, "computed")
            if engine.prefills:
                each.first = each.last = self.now + self.times.handoff
                later = each.first + each.tokens * self.times.sent_token
                self._at(later, partial(self._deliver, each))
            else:
                engine.stream(each, self.now)
        self._begin(engine)

    def _deliver(self, request: Request) -> None:
        engine = self.engines[request.decode]
        engine.deliver(request, self.now)
        self._begin(engine)


# -- routers


class Knowing:
    """The proxy's own choices, by what it sent where and when that was answered."""

    def __init__(self, fleet: Fleet, routing: Routing, disaggregate: Disaggregate, limits: Limits):
        self._knowledge = Knowledge(
            routing, disaggregate, step_s=limits.step_s, clock=lambda: fleet.now
        )
        self._fleet, self._in_turn = fleet, routing == "round_robin"
        self._work: dict[int, list[Work]] = {}
        self._polled = 0.0
        fleet.told = self._told

    def __call__(self, request: Request) -> tuple[int | None, int]:
        fleet, knowledge = self._fleet, self._knowledge
        ask = Ask(request.tokens, request.hashes, BLOCK)
        if fleet.now >= self._polled + POLL_S:
            self._polled = fleet.now
            for each in fleet.engines:
                knowledge.told(each, each.times.capacity, each.totals)
        prefills, decodes = fleet.prefills, fleet.decodes
        if self._in_turn:  # the first is taken, which becomes the last
            fleet.prefills, fleet.decodes = ([*e[1:], *e[:1]] for e in (prefills, decodes))
        alone = not prefills or knowledge.goes_alone(ask, prefills, decodes)
        d = knowledge.first(decodes, ask, computes=alone, generates=True)
        if alone:
            self._work[id(request)] = [knowledge.begin(d, ask, computes=True, generates=True)]
            return None, d.index
        p = knowledge.first(prefills, ask, computes=True, generates=False)
        self._work[id(request)] = [
            knowledge.begin(p, ask, computes=True, generates=False),
            knowledge.begin(d, ask, computes=False, generates=True),
        ]
        return p.index, d.index

    def _told(self, request: Request, what: str) -> None:
        computing, *_ = work = self._work[id(request)]
        if what == "computed":
            self._knowledge.answered(computing)
            if work[1:]:
                self._knowledge.ended(computing)
                self._knowledge.answered(work[1])
        else:
            self._knowledge.ended(work[-1])


class Known:
    """Placement by the servers' own state."""

    def __init__(self, fleet: Fleet, limits: Limits) -> None:
        self._fleet, self._limits = fleet, limits

    def __call__(self, request: Request) -> tuple[int | None, int]:
        fleet = self._fleet
        depths = {e.index: e.cache.depth(request.hashes) for e in fleet.engines}
        ask = Ask(request.tokens, request.hashes, BLOCK, now=fleet.now)
        prefills, decodes = (list(map(self._load, e)) for e in (fleet.prefills, fleet.decodes))
        found = place(ask, prefills, decodes, depths, limits=self._limits)
        assert found is not None
        return found.prefill, found.decode

    def _load(self, e: Engine) -> Load:
        free_at, streams = self._fleet.now + e.queued_s(), len(e.streams)
        sizes = streams, e.held, e.times.capacity
        return Load(e.index, len(e.waiting), free_at, 0.0, *sizes, step_s=e.base_s())


POLICIES: dict[str, tuple[Routing, Disaggregate] | None] = {
    "round_robin": ("round_robin", "always"),
    "least_loaded": ("least_loaded", "always"),
    "always": ("auto", "always"),
    "never": ("auto", "never"),
    "auto": ("auto", "auto"),
    "known": None,
}


# -- loads


def mooncake(path: Path, load: float, most: int) -> list[Request]:
    """Arrivals `load` times as fast as in the trace."""
    rows = (json.loads(line) for line in path.read_text().splitlines()[:most])
    return [
        Request(
            row["timestamp"] / 1e3 / load, row["input_length"], row["output_length"],
            tuple(row["hash_ids"]),
        )
        for row in rows
    ]  # fmt: skip


def azure(path: Path, load: float, most: int) -> list[Request]:
    """No prompt has anything in common with another's: the trace does not say."""
    with path.open() as file:
        rows = list(itertools.islice(csv.DictReader(file), most))
    begun = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    fresh = itertools.count(1 << 32)
    return [
        Request(
            (at - begun[0]).total_seconds() / load,
            max(int(row["ContextTokens"]), 1),
            max(int(row["GeneratedTokens"]), 1),
            tuple(itertools.islice(fresh, int(row["ContextTokens"]) // BLOCK)),
        )
        for at, row in zip(begun, rows, strict=True)
    ]


def figures(name: str, requests: Sequence[Request], args: argparse.Namespace) -> dict[str, Any]:
    first = sorted(each.first - each.arrival for each in requests)
    gaps = sorted(each.gap for each in requests)
    means = [(each.last - each.first) / max(each.done - 1, 1) for each in requests]
    pairs = zip(requests, means, strict=True)
    good = sum(r.first - r.arrival <= args.ttft_s and mean <= args.tpot_s for r, mean in pairs)
    p50, p99 = (min(int(share * len(requests)), len(requests) - 1) for share in (0.5, 0.99))
    return {
        "policy": name,
        "ttft_p50_s": first[p50],
        "ttft_p99_s": first[p99],
        "tpot_mean_ms": statistics.mean(means) * 1e3,
        "gap_p99_ms": gaps[p99] * 1e3,
        "good": good / len(requests),
        "computed": sum(each.computed for each in requests) / sum(r.tokens for r in requests),
        "alone": sum(each.alone for each in requests) / len(requests),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.routing", description=__doc__)
    add = parser.add_argument
    add("--trace", type=Path, required=True)
    add("--engines", type=int, default=4)
    add("--prefill", type=int, default=2)
    add("--load", default="1.0")
    add("--requests", type=int, default=4000)
    add("--policies", default=",".join(POLICIES))
    add("--ttft-s", type=float, default=2.0)
    add("--tpot-s", type=float, default=0.025)
    add("--step-s", type=float, default=0.025)
    add("--harm", type=float, default=Limits().harm)
    args = parser.parse_args(argv)
    read = azure if args.trace.suffix == ".csv" else mooncake
    limits, times, rows = Limits(args.step_s, args.harm), Times(), []
    for load in map(float, args.load.split(",")):
        print(f"load {load}", HEAD, sep="\n")
        for name in args.policies.split(","):
            engines = [Engine(i, i < args.prefill, times, args.step_s) for i in range(args.engines)]
            fleet = Fleet(engines, times)
            policy = POLICIES[name]
            fleet.router = Knowing(fleet, *policy, limits) if policy else Known(fleet, limits)
            requests = read(args.trace, load, args.requests)
            fleet.run(requests)
            row = figures(name, requests, args)
            print(ROW.format(*row.values()), flush=True)
            rows.append({"load": load, **row})
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

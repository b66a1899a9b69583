"""Policies of the proxy on simulated servers: the real placement code, a trace, a table.

    python -m benchmarks.routing [--trace FILE] [--engines 4] [--prefill 2] [--load 1.0,1.5]

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
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from proxy.knowledge import Disaggregate, Knowledge, Routing, Totals, Work
from proxy.placement import Ask, Limits, Load, Placement, place

BLOCK = 512  # tokens, as in the traces
POLL_S = 1.0  # between two health checks


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
    cached: int = 0
    left: int = 0  # tokens of the prompt to compute
    done: int = 0  # generated
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0  # the longest between two tokens
    placement: Placement | None = None
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
        request.left = request.tokens - min(
            self.cache.depth(request.hashes) * BLOCK, request.tokens - 1
        )
        self.waiting.append(request)

    def has_work(self) -> bool:
        return bool(self.waiting or self.streams)

    def step(self, now: float) -> tuple[float, list[Request]]:
        """When the step ends, and the requests whose prompt is computed then."""
        t = self.times
        base = self.base_s() if self.streams else t.step
        room = t.batch
        if self.streams:
            room = min(max(int((self.limit - base) / t.token), t.least), t.batch)
        seconds, computed, ended = base, 0, []
        while self.waiting and room > 0:
            first = self.waiting[0]
            if not first.computed:  # its turn: prefixes may have come since
                hit = min(self.cache.depth(first.hashes) * BLOCK, first.tokens - 1)
                first.left = min(first.left, first.tokens - hit)
                if not self.prefills and not self._has_room(first):
                    break
            count = min(room, first.left)
            seconds += count * t.token + count * (first.tokens - first.left + count / 2) * t.pair
            first.computed += count
            first.left -= count
            room -= count
            computed += count
            if first.left == 0:
                ended.append(self.waiting.popleft())
                self.cache.add(first.hashes)
        num_tokens = len(self.streams) + computed
        self.totals = Totals(
            self.totals.steps + 1, self.totals.tokens + num_tokens, self.totals.seconds + seconds
        )
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


Router = Callable[["Fleet", Request], tuple[int | None, int]]


@dataclass
class Fleet:
    engines: list[Engine]
    router: Router
    times: Times
    now: float = 0.0
    ended: list[Request] = field(default_factory=list)
    told: Callable[[Request, str], None] = lambda request, what: None

    @property
    def prefills(self) -> list[Engine]:
        return [each for each in self.engines if each.prefills]

    @property
    def decodes(self) -> list[Engine]:
        return [each for each in self.engines if not each.prefills]

    def run(self, requests: Sequence[Request]) -> None:
        counter = itertools.count()
        events: list[tuple[float, int, str, Any]] = []
        for each in requests:
            heapq.heappush(events, (each.arrival, next(counter), "arrive", each))

        def begin(engine: Engine, now: float) -> None:
            if not engine.busy and engine.has_work():
                engine.busy = True
                end, computed = engine.step(now)
                heapq.heappush(events, (end, next(counter), "step", (engine, computed)))

        while events:
            now, _, what, item = heapq.heappop(events)
            self.now = now
            if what == "arrive":
                p, d = self.router(self, item)
                item.placement = Placement(p, d, 0)
                engine = self.engines[d if p is None else p]
                engine.admit(item)
                begin(engine, now)
            elif what == "deliver":
                engine = self.engines[item.placement.decode]
                engine.deliver(item, now)
                begin(engine, now)
            else:
                engine, computed = item
                engine.busy = False
                for each in engine.generate(now):
                    self.ended.append(each)
                    self.told(each, "ended")
                for each in computed:
                    self.told(each, "computed")
                    if engine.prefills:
                        each.first = each.last = now + self.times.handoff
                        later = each.first + each.tokens * self.times.sent_token
                        heapq.heappush(events, (later, next(counter), "deliver", each))
                    else:
                        engine.stream(each, now)
                begin(engine, now)


# -- routers


class RoundRobin:
    """Any prefill server, any decode server, in turn."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def __call__(self, fleet: Fleet, request: Request) -> tuple[int | None, int]:
        turn = next(self._turn)
        prefills, decodes = fleet.prefills, fleet.decodes
        p = prefills[turn % len(prefills)].index if prefills else None
        return p, decodes[turn % len(decodes)].index


class Knowing:
    """The proxy's own choices, by what it sent where and when that was answered."""

    def __init__(self, fleet: Fleet, routing: Routing, disaggregate: Disaggregate, limits: Limits):
        self._knowledge = Knowledge(
            routing, disaggregate, step_s=limits.step_s, clock=lambda: fleet.now
        )
        self._work: dict[int, list[Work]] = {}
        self._polled = 0.0
        fleet.told = self._told

    def __call__(self, fleet: Fleet, request: Request) -> tuple[int | None, int]:
        knowledge, ask = self._knowledge, Ask(request.tokens, request.hashes, BLOCK)
        if fleet.now >= self._polled + POLL_S:
            self._polled = fleet.now
            for each in fleet.engines:
                knowledge.told(each, each.times.capacity, each.totals)
        prefills, decodes = fleet.prefills, fleet.decodes
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

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def __call__(self, fleet: Fleet, request: Request) -> tuple[int | None, int]:
        depths = {e.index: e.cache.depth(request.hashes) for e in fleet.engines}
        loads = {
            e.index: Load(
                e.index,
                len(e.waiting),
                fleet.now + e.queued_s(),
                0.0,
                len(e.streams),
                e.held,
                e.times.capacity,
                step_s=e.base_s(),
            )
            for e in fleet.engines
        }
        found = place(
            Ask(request.tokens, request.hashes, BLOCK, now=fleet.now),
            [loads[e.index] for e in fleet.prefills],
            [loads[e.index] for e in fleet.decodes],
            depths,
            limits=self._limits,
        )
        assert found is not None
        return found.prefill, found.decode


ROUTERS: dict[str, Callable[[Fleet, Limits], Router]] = {
    "round_robin": lambda fleet, limits: RoundRobin(),
    "least_loaded": lambda fleet, limits: Knowing(fleet, "least_loaded", "always", limits),
    "always": lambda fleet, limits: Knowing(fleet, "auto", "always", limits),
    "never": lambda fleet, limits: Knowing(fleet, "auto", "never", limits),
    "auto": lambda fleet, limits: Knowing(fleet, "auto", "auto", limits),
    "known": lambda fleet, limits: Known(limits),
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
    good = sum(
        each.first - each.arrival <= args.ttft_s and mean <= args.tpot_s
        for each, mean in zip(requests, means, strict=True)
    )
    alone = sum(each.placement is not None and each.placement.prefill is None for each in requests)

    def at(values: Sequence[float], share: float) -> float:
        return values[min(int(share * len(values)), len(values) - 1)]

    return {
        "policy": name,
        "ttft_p50_s": at(first, 0.5),
        "ttft_p99_s": at(first, 0.99),
        "tpot_mean_ms": statistics.mean(means) * 1e3,
        "gap_p99_ms": at(gaps, 0.99) * 1e3,
        "good": good / len(requests),
        "computed": sum(each.computed for each in requests) / sum(r.tokens for r in requests),
        "alone": alone / len(requests),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.routing", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--load", default="1.0")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--policies", default=",".join(ROUTERS))
    parser.add_argument("--ttft-s", type=float, default=2.0)
    parser.add_argument("--tpot-s", type=float, default=0.025)
    parser.add_argument("--step-s", type=float, default=0.025)
    parser.add_argument("--harm", type=float, default=Limits().harm)
    args = parser.parse_args(argv)
    read = azure if args.trace.suffix == ".csv" else mooncake
    limits = Limits(args.step_s, args.harm)
    rows = []
    for load in map(float, args.load.split(",")):
        print(f"load {load}")
        print("policy        TTFT p50     p99 s  TPOT ms  gap p99  good  computed  alone")
        for name in args.policies.split(","):
            times = Times()
            engines = [Engine(i, i < args.prefill, times, args.step_s) for i in range(args.engines)]
            fleet = Fleet(engines, RoundRobin(), times)
            fleet.router = ROUTERS[name](fleet, limits)
            requests = read(args.trace, load, args.requests)
            fleet.run(requests)
            row = {"load": load, **figures(name, requests, args)}
            rows.append(row)
            print(
                f"{name:13} {row['ttft_p50_s']:8.3f} {row['ttft_p99_s']:9.3f} "
                f"{row['tpot_mean_ms']:8.1f} {row['gap_p99_ms']:8.0f} {row['good']:5.3f} "
                f"{row['computed']:9.3f} {row['alone']:6.2f}",
                flush=True,
            )
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

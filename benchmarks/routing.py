"""Policies of the proxy on simulated servers: the real placement code, a load, a table.

    python -m benchmarks.routing --trace FILE [--shapes 2P2D,4D] [--load 1.0,1.5]
    python -m benchmarks.routing --mix agents|chats|documents|open|burst [...]

benchmarks/simulation.py describes the servers, benchmarks/loads.py the requests. The
policy `known` is an ideal router that reads the state of the simulated servers; all
other policies are the proxy's own code. The last line is one JSON document.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.loads import BLOCK, MIXES, Request, Then, azure, mooncake
from engine.core import prefill_budget
from engine.core.waiting import LONG_PROMPT_TOKENS
from proxy.knowledge import Disaggregate, Knowledge, Routing, Totals, Work
from proxy.placement import (
    USUAL_STEP_S,
    Ask,
    Depths,
    Load,
    PrefixIndex,
    cheapest_decode,
    place,
)
ROW = "{:5} {:4} {:13} {:8.3f} {:9.3f} {:8.1f} {:8.1f} {:8.1f} {:5.3f} {:9.3f} {:6.2f}"


class Policy(NamedTuple):
    """Options of the proxy."""

    routing: Routing
    disaggregate: Disaggregate
    pulls: bool


class Engine:
    """One server. `step` computes one step that begins at `now` and says when it ends.

    Attributes:
        gaps: between tokens, in 0.1 ms: how many.
    """

    def __init__(self, index: int, prefills: bool, times: Times, limit: float) -> None:
        self.index, self.prefills, self.times, self.limit = (
            index,
            prefills,
            times,
            limit,
        )
        self._cache = PrefixIndex(times.capacity // 2 // BLOCK)  # of one server, 0
        self.waiting: deque[Request] = deque()
        self.parked: deque[Request] = (
            deque()
        )  # computed elsewhere; there is no room for their KV
        self.streams: list[Request] = []
        self.held = 0
        self.busy, self.until = False, 0.0
        self.totals = Totals()
        self.gaps = Counter[int]()
        self.pace = prefill_budget.PrefillBudget(limit, times.mixed)

    def depth(self, hashes: Sequence[int]) -> int:
        """Blocks of a prompt that are cached."""
        return int(self._cache.depths(hashes).get(0, 0))

    def keep(self, hashes: Sequence[int]) -> None:
        self._cache.add(0, hashes)

    def queued_s(self) -> float:
        """What the prompts that wait will take."""
        seconds = sum(each.left for each in self.waiting) * Load(0).token_s
        return (
            seconds * max(1.0, self.limit / self.room_s()) if self.streams else seconds
        )

    def base_s(self) -> float:
        t = self.times
        return t.step + len(self.streams) * t.sequence + self.held * t.held_token

    def room_s(self) -> float:
        """Of a step with streams, for prompts."""
        return max(self.limit - self.base_s(), self.times.least * self.base_s())

    def admit(self, request: Request) -> None:
        """A prompt to compute here, as engine.core.waiting has it: before long ones, also those
        that are under way. What is cached is found when its turn comes."""
        request.left = self._uncached(request)
        at = len(self.waiting)
        while (
            at
            and request.tokens * 4
            <= (before := self.waiting[at - 1]).tokens
            >= LONG_PROMPT_TOKENS
        ):
            if before.overtaken + request.tokens > before.tokens:
                break
            before.overtaken += request.tokens
            at -= 1
        self.waiting.insert(at, request)

    def _uncached(self, request: Request) -> int:
        return max(request.tokens - self.depth(request.hashes) * BLOCK, 1)

    def step(self, now: float) -> tuple[float, list[Request]]:
        """When the step ends, and the requests whose prompt is computed then."""
        t = self.times
        seconds = self.base_s()
        most = t.batch if self.prefills else t.mixed
        if self.streams and self.waiting:
            most = self.pace.prompt_tokens(len(self.streams), self.held)
        room, ended = most, list[Request]()
        while self.waiting and room > 0:
            first = self.waiting[0]
            if not first.computed:  # its turn: prefixes may have come since
                first.left = min(first.left, self._uncached(first))
                if not self.prefills and not self._has_room(first, len(ended)):
                    break
            count = min(room, first.left)
            seconds += (
                count * t.token
                + count * (first.tokens - first.left + count / 2) * t.pair
            )
            first.computed += count
            first.left -= count
            room -= count
            if first.left == 0:
                ended.append(self.waiting.popleft())
                self.keep(first.hashes)
        if room < most:
            seconds = max(seconds, t.prompts)
        if self.streams and not self.prefills:
            self.pace.record_step(
                prefill_budget.Load(len(self.streams), self.held, most - room), seconds
            )
        prompts = most - room
        step = 1, len(self.streams) + prompts, prompts, seconds
        mixed = (1, step[1], seconds) if prompts else (0, 0, 0)
        self.totals = Totals(
            *(a + b for a, b in zip(self.totals, (*step, *mixed), strict=True))
        )
        return now + seconds, ended

    def generate(self, now: float) -> list[Request]:
        """A token for each stream; those that have ended."""
        over = []
        for each in self.streams:
            self.gaps[round((now - each.last) * 1e4)] += 1
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

    def _has_room(self, request: Request, coming: int = 0) -> bool:
        if not self.streams:
            return True
        fits = self.held + request.tokens <= self.times.capacity
        return fits and len(self.streams) + coming < self.times.streams

    def deliver(self, request: Request, now: float) -> None:
        """A prompt that was computed elsewhere."""
        if self.parked or not self._has_room(request):
            self.parked.append(request)
        else:
            self.stream(request, now)

    def stream(self, request: Request, now: float) -> None:
        request.first = request.first or now
        request.last = request.last or now
        request.done = max(request.done, 1)
        self.streams.append(request)
        self.held += request.tokens + request.done
        self.keep(request.hashes)


class Fleet:
    """Engines, and what happens to them in which order.

    Attributes:
        router: says who computes a prompt, a decode server or a prefill server, and then who
            generates; it is told of a request that its prompt was "computed" and that it "ended".
    """

    router: "Knowing | Known"

    def __init__(self, engines: list[Engine], times: Times, then: Then) -> None:
        self.engines, self.times, self.now, self._then = engines, times, 0.0, then
        self.prefills = [each for each in engines if each.prefills]
        self.decodes = [each for each in engines if not each.prefills]
        self.requests: list[Request] = []
        self._count = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self, requests: Sequence[Request]) -> None:
        for each in requests:
            self._come(each)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _come(self, request: Request) -> None:
        self.requests.append(request)
        self._at(request.arrival, partial(self._arrive, request))

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), event))

    def _arrive(self, request: Request) -> None:
        engine = self.router.computes(request)
        request.alone = not engine.prefills
        if not (lender := self.router.lender):
            self._admit(engine, request)
            return
        found = lender.depth(request.hashes)
        lacks = found - engine.depth(request.hashes)
        if lacks > 0:  # as the server reckons itself; while it comes it is not used
            engine.keep(request.hashes[:found])
        sent_s = max(lacks, 0) * BLOCK * self.times.sent_token + self.times.looked_up
        told = max(lender.until, self.now)  # between two steps
        self._at(told + sent_s, partial(self._admit, engine, request))

    def _admit(self, engine: Engine, request: Request) -> None:
        engine.admit(request)
        self._begin(engine)

    def _begin(self, engine: Engine) -> None:
        if not engine.busy and (engine.waiting or engine.streams):
            engine.busy = True
            end, computed = engine.step(self.now)
            engine.until = end
            self._at(end, partial(self._end, engine, computed))

    def _end(self, engine: Engine, computed: list[Request]) -> None:
        """Of a step."""
        engine.busy = False
        for each in engine.generate(self.now):
            self.router.told(each, "ended")
            if (follower := self._then(each, self.now)) is not None:
                self._come(follower)
        for each in computed:
            if engine.prefills:
                self._at(self.now + self.times.handoff, partial(self._hand_over, each))
            else:
                engine.stream(each, self.now)
                self.router.told(each, "computed")
        self._begin(engine)

    def _hand_over(self, request: Request) -> None:
        self.router.told(request, "computed")
        engine = self.router.generates(request)
        request.first = request.last = self.now
        later = self.now + request.tokens * self.times.sent_token
        self._at(later, partial(self._deliver, engine, request))

    def _deliver(self, engine: Engine, request: Request) -> None:
        engine.deliver(request, self.now)
        self._begin(engine)


# -- routers


class Knowing:
    """The proxy's own choices, by what it sent where and when that was answered."""

    def __init__(
        self,
        fleet: Fleet,
        routing: Routing,
        disaggregate: Disaggregate,
        step_s: float = USUAL_STEP_S,
        pulls: bool = False,
    ):
        self.knowledge = Knowledge(
            routing, disaggregate, step_s=step_s, clock=lambda: fleet.now
        )
        self.knowledge.pulls = pulls
        self.lender: Engine | None = None
        for each in fleet.engines:
            self.knowledge.lends(each, True)
        self._fleet = fleet
        self._in_turn = [list(fleet.prefills), list(fleet.decodes)]
        self._works: dict[
            int, tuple[Work, Engine, Work]
        ] = {}  # the prompt's, and the answer's
        self._polled = 0.0

    def computes(self, request: Request) -> Engine:
        self._poll()
        ask = Ask(request.tokens, request.hashes, BLOCK, request.answer)
        prefills, decodes = self._in_turn
        alone = not prefills or self.knowledge.goes_alone(ask, prefills, decodes)
        return self._take_both(request, ask, alone)

    def _take_both(self, request: Request, ask: Ask, alone: bool) -> Engine:
        """Both legs begin at once."""
        self.lender = None
        engine, work = self._take(ask, self._in_turn[alone], True, alone)
        stream = (
            (engine, work) if alone else self._take(ask, self._in_turn[1], False, True)
        )
        self._works[id(request)] = work, *stream
        return engine

    def generates(self, request: Request) -> Engine:
        _, engine, stream = self._works[id(request)]
        self.knowledge.answered(stream)
        return engine

    def _take(
        self, ask: Ask, servers: list[Engine], computes: bool, generates: bool
    ) -> tuple[Engine, Work]:
        engine = self.knowledge.first(
            servers, ask, computes=computes, generates=generates
        )
        lenders = self.knowledge.lenders(engine, ask) if computes else []
        self.lender = self.lender or next(
            (e for e, _ in lenders if isinstance(e, Engine)), None
        )
        servers.append(servers.pop(servers.index(engine)))
        work = self.knowledge.begin(engine, ask, computes=computes, generates=generates)
        return engine, work

    def told(self, request: Request, what: str) -> None:
        prompt, _, stream = self._works[id(request)]
        if what == "computed":
            self.knowledge.answered(prompt)
        if what == "ended" or prompt is not stream:
            self.knowledge.ended(stream if what == "ended" else prompt)

    def _poll(self) -> None:
        if self._fleet.now >= self._polled + POLL_S:
            self._polled = self._fleet.now
            for each in self._fleet.engines:
                self.knowledge.told(each, each.times.capacity, each.totals)


class Known:
    """Placement by the servers' own state."""

    lender: Engine | None = None

    def __init__(self, fleet: Fleet, step_s: float) -> None:
        self._fleet, self._step_s = fleet, step_s

    def computes(self, request: Request) -> Engine:
        ask, depths, prefills, decodes = self._seen(request)
        found = place(ask, prefills, decodes, depths)
        return self._fleet.engines[
            found.decode if found.prefill is None else found.prefill
        ]

    def generates(self, request: Request) -> Engine:
        ask, _, _, decodes = self._seen(request)
        return self._fleet.decodes[cheapest_decode(ask, decodes)]

    def told(self, request: Request, what: str) -> None:
        pass

    def _seen(self, request: Request) -> tuple[Ask, Depths, list[Load], list[Load]]:
        fleet = self._fleet
        depths: Depths = {e.index: e.depth(request.hashes) for e in fleet.engines}
        ask = Ask(request.tokens, request.hashes, BLOCK, request.answer, fleet.now)
        prefills, decodes = (
            list(map(self._load, e)) for e in (fleet.prefills, fleet.decodes)
        )
        return ask, depths, prefills, decodes

    def _load(self, e: Engine) -> Load:
        streams, free_at = len(e.streams), self._fleet.now + e.queued_s()
        step_s = e.base_s() / (1 + streams / 96)
        load = Load(
            e.index,
            len(e.waiting),
            free_at,
            running=streams,
            held=e.held,
            step_s=step_s,
        )
        for each in e.waiting:
            load.queued_s[Ask(each.tokens).size] += each.left * load.token_s
        load.queue(0, 0.0)
        load.capacity, load.target_s = e.times.capacity, self._step_s
        return load


POLICIES: dict[str, tuple[Routing, Disaggregate, bool] | None] = {
    "round_robin": ("round_robin", "always", False),
    "least_loaded": ("least_loaded", "always", False),
    "always": ("auto", "always", False),
    "never": ("auto", "never", False),
    "auto": ("auto", "auto", False),
    "always_pulls": ("auto", "always", True),
    "auto_pulls": ("auto", "auto", True),
    "known": None,
}


def figures(fleet: Fleet, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a simulated run, in the order of the table's columns.

    "good" is the share of requests within --ttft-s and --tpot-s. "computed" is the
    share of prompt tokens that were computed and not cached. "alone" is the share of
    requests whose prompts a decode server computed.
    """
    requests = fleet.requests
    ttfts_s = sorted(each.first_token_s - each.arrival_s for each in requests)
    tpots_s = [_mean_time_per_token_s(request) for request in requests]
    num_good = 0
    for request, tpot_s in zip(requests, tpots_s, strict=True):
        ttft_s = request.first_token_s - request.arrival_s
        num_good += ttft_s <= args.ttft_s and tpot_s <= args.tpot_s
    gaps = Counter[int]()
    for engine in fleet.engines:
        gaps += engine.gaps
    computed_tokens = sum(request.computed_tokens for request in requests)
    num_on_decode_servers = sum(request.on_decode_server for request in requests)
    return {
        "ttft_p50_s": _percentile(ttfts_s, 0.5),
        "ttft_p99_s": _percentile(ttfts_s, 0.99),
        "itl_p50_ms": _counted_percentile(gaps, 0.5) * 0.1,
        "itl_p99_ms": _counted_percentile(gaps, 0.99) * 0.1,
        "tpot_mean_ms": statistics.mean(tpots_s) * 1e3,
        "good": num_good / len(requests),
        "computed": computed_tokens / sum(each.prompt_tokens for each in requests),
        "alone": num_on_decode_servers / len(requests),
        "requests": len(requests),
        "total_s": max(request.last_token_s for request in requests),
    }


def _mean_time_per_token_s(request: Request) -> float:
    decoding_s = request.last_token_s - request.first_token_s
    return decoding_s / max(request.generated_tokens - 1, 1)


def _percentile(sorted_values: list[float], share: float) -> float:
    index = min(int(share * len(sorted_values)), len(sorted_values) - 1)
    return sorted_values[index]


def _counted_percentile(counts: Counter[int], share: float) -> int:
    """Return the smallest value that at least `share` of all values do not exceed."""
    num_below = 0.0
    for value in sorted(counts):
        num_below += counts[value]
        if num_below >= share * counts.total():
            return value
    return 0


def simulate(
    policy_name: str,
    shape: str,
    requests: list[Request],
    follow_up: FollowUp,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return the figures of one policy.

    Args:
        shape: numbers of servers, such as "2P2D" or "4D".
    """
    prefills, _, decodes = shape.rstrip("D").rpartition("P")
    num_prefills = int(prefills or 0)
    num_engines = num_prefills + int(decodes or 0)
    step_s = args.itl_target_s
    times = EngineTimes()
    engines = [
        Engine(index, index < num_prefills, times, step_s)
        for index in range(num_engines)
    ]
    fleet = Fleet(engines, times, follow_up)
    policy = POLICIES[policy_name]
    if policy is None:
        fleet.router = IdealRouter(fleet, step_s)
    else:
        fleet.router = ProxyRouter(
            fleet, policy.routing, policy.disaggregate, step_s, policy.pulls
        )
    fleet.run(requests)
    return figures(fleet, args)


def _workload(args: argparse.Namespace, load: float) -> Workload:
    if args.mix:
        return MIXES[args.mix](load, args.requests)
    read = azure if args.trace.suffix == ".csv" else mooncake
    return read(args.trace, load, args.requests)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.routing", description=__doc__)
    add = parser.add_argument
    add("--trace", type=Path, help="JSON lines of Mooncake, or CSV of Azure")
    add("--mix", choices=MIXES, help="a synthetic load")
    add("--shapes", default="2P2D", help="such as 4D,2P2D,1P3D")
    add("--load", default="1.0", help="factors of the arrival rate, such as 1.0,1.5")
    add("--requests", type=int, default=4000, help="maximum number of requests")
    add("--policies", default=",".join(POLICIES))
    add("--ttft-s", type=float, default=2.0, help="longest good time to first token")
    add(
        "--tpot-s",
        type=float,
        default=0.025,
        help="longest good mean time per output token",
    )
    add(
        "--itl-target-s",
        type=float,
        default=USUAL_STEP_S,
        help="time between tokens that servers cut prompts for",
    )
    args = parser.parse_args(argv)
    if (args.trace is None) == (args.mix is None):
        parser.error("give either --trace FILE or --mix NAME")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _parse_args(argv)
    shapes = args.shapes.split(",")
    loads = args.load.split(",")
    policies = args.policies.split(",")
    rows = []
    print(HEAD)
    for shape, load, policy in itertools.product(shapes, loads, policies):
        # A simulation changes its requests, so each one gets new requests.
        requests, follow_up = _workload(args, float(load))
        row = {"shape": shape, "load": load, "policy": policy}
        row |= simulate(policy, shape, requests, follow_up, args)
        print(ROW.format(*row.values()), flush=True)
        rows.append(row)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

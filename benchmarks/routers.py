"""The routers of benchmarks.routing: the proxy's placement, and an ideal one.

The proxy's placement estimates loads from what it sent to each server and when that was
answered. The ideal router reads the state of the simulated servers.
"""

from typing import NamedTuple

from benchmarks.loads import BLOCK, Request
from benchmarks.simulation import Engine, Fleet
from proxy.knowledge import Disaggregate, Knowledge, Routing, Work
from proxy.placement import USUAL_STEP_S, Ask, Depths, Load, cheapest_decode, place

POLL_S = 1.0  # between two health checks
# The ideal router estimates that this many streams double the time of a step.
_DOUBLING_STREAMS = 96


class _Legs(NamedTuple):
    """The two legs of a request. They are the same Work if one server has both."""

    prompt: Work
    decode_engine: Engine
    stream: Work


def _profile(request: Request, now: float = 0.0) -> Ask:
    return Ask(request.prompt_tokens, request.hashes, BLOCK, request.output_tokens, now)


class ProxyRouter:
    """Places requests with the proxy's code and load estimates.

    Args:
        pulls: whether a server may pull the KV of a prefix from another server.
    """

    def __init__(
        self,
        fleet: Fleet,
        routing: Routing,
        disaggregate: Disaggregate,
        step_s: float = USUAL_STEP_S,
        pulls: bool = False,
    ):
        self.tracker = Knowledge(
            routing, disaggregate, step_s=step_s, clock=lambda: fleet.now
        )
        self.tracker.pulls = pulls
        self.lender: Engine | None = None
        for engine in fleet.engines:
            self.tracker.lends(engine, True)
        self._fleet = fleet
        # Each list is in the order of the least recent use.
        self._prefills = list(fleet.prefills)
        self._decodes = list(fleet.decodes)
        self._legs: dict[int, _Legs] = {}  # by the id of the request
        self._polled_at = 0.0

    def place_prompt(self, request: Request) -> Engine:
        self._poll()
        profile = _profile(request)
        on_decode_server = not self._prefills or self.tracker.goes_alone(
            profile, self._prefills, self._decodes
        )
        return self.begin_legs(request, profile, on_decode_server)

    def begin_legs(
        self, request: Request, profile: Ask, on_decode_server: bool
    ) -> Engine:
        """Begin both legs at once. Return the engine that computes the prompt."""
        self.lender = None
        if on_decode_server:
            engine, work = self._begin(
                profile, self._decodes, computes=True, generates=True
            )
            self._legs[id(request)] = _Legs(work, engine, work)
            return engine
        engine, prompt = self._begin(
            profile, self._prefills, computes=True, generates=False
        )
        decode_engine, stream = self._begin(
            profile, self._decodes, computes=False, generates=True
        )
        self._legs[id(request)] = _Legs(prompt, decode_engine, stream)
        return engine

    def place_stream(self, request: Request) -> Engine:
        legs = self._legs[id(request)]
        self.tracker.answered(legs.stream)
        return legs.decode_engine

    def _begin(
        self, profile: Ask, servers: list[Engine], *, computes: bool, generates: bool
    ) -> tuple[Engine, Work]:
        engine = self.tracker.first(
            servers, profile, computes=computes, generates=generates
        )
        lenders = self.tracker.lenders(engine, profile) if computes else []
        if self.lender is None and lenders:
            lender, _ = lenders[0]
            assert isinstance(lender, Engine)
            self.lender = lender
        servers.remove(engine)
        servers.append(engine)
        work = self.tracker.begin(
            engine, profile, computes=computes, generates=generates
        )
        return engine, work

    def on_computed(self, request: Request) -> None:
        legs = self._legs[id(request)]
        self.tracker.answered(legs.prompt)
        if legs.prompt is not legs.stream:
            self.tracker.ended(legs.prompt)

    def on_finished(self, request: Request) -> None:
        self.tracker.ended(self._legs[id(request)].stream)

    def _poll(self) -> None:
        """Send health reports to the tracker, once per POLL_S."""
        if self._fleet.now >= self._polled_at + POLL_S:
            self._polled_at = self._fleet.now
            for engine in self._fleet.engines:
                self.tracker.told(engine, engine.times.capacity, engine.totals)


class IdealRouter:
    """Places requests by the true state of the simulated servers."""

    lender: Engine | None = None

    def __init__(self, fleet: Fleet, step_s: float) -> None:
        self._fleet = fleet
        self._step_s = step_s

    def place_prompt(self, request: Request) -> Engine:
        fleet = self._fleet
        depths: Depths = {
            engine.index: engine.cached_blocks(request.hashes)
            for engine in fleet.engines
        }
        placement = place(
            _profile(request, fleet.now),
            [self._load(engine) for engine in fleet.prefills],
            [self._load(engine) for engine in fleet.decodes],
            depths,
        )
        if placement.prefill is None:
            return fleet.engines[placement.decode]
        return fleet.engines[placement.prefill]

    def place_stream(self, request: Request) -> Engine:
        loads = [self._load(engine) for engine in self._fleet.decodes]
        profile = _profile(request, self._fleet.now)
        return self._fleet.decodes[cheapest_decode(profile, loads)]

    def on_computed(self, request: Request) -> None:
        pass

    def on_finished(self, request: Request) -> None:
        pass

    def _load(self, engine: Engine) -> Load:
        num_streams = len(engine.streams)
        load = Load(
            engine.index,
            len(engine.waiting),
            self._fleet.now + engine.queued_s(),
            running=num_streams,
            held=engine.held_tokens,
            step_s=engine.stream_step_s() / (1 + num_streams / _DOUBLING_STREAMS),
        )
        for request in engine.waiting:
            size = Ask(request.prompt_tokens).size
            load.queued_s[size] += request.uncomputed_tokens * load.token_s
        load.queue(0, 0.0)  # updates the sums that depend on queued_s
        load.capacity = engine.times.capacity
        load.target_s = self._step_s
        return load

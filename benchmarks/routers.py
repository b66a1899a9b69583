"""The routers of benchmarks.routing: the proxy's placement, and an ideal one.

The proxy's placement estimates the load of a server from the requests that it sent to
the server, from the times of the answers, and from health reports. The ideal router
reads the state of the simulated servers.
"""

from typing import NamedTuple

from benchmarks.loads import Request
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.fleet import Fleet
from proxy.placement.assignment import Assignment
from proxy.placement.load_tracker import Disaggregate, LoadTracker, Routing
from proxy.placement.placement import CachedPrefixes, choose, emptiest_server
from proxy.placement.prefix_index import Depths
from proxy.placement.request_profile import RequestProfile
from proxy.placement.server_load import USUAL_STEP_S, ServerLoad

POLL_S = 1.0  # seconds between two health reports of a server
# The ideal router assumes that this number of streams doubles the time of a step.
_DOUBLING_STREAMS = 96


class _Legs(NamedTuple):
    """The legs of a request.

    Attributes:
        prompt: assignment of the leg that computes the prompt.
        decode_engine: engine of the leg that generates tokens.
        stream: assignment of the leg that generates tokens. It equals `prompt` if one
            server has both legs.
    """

    prompt: Assignment
    decode_engine: Engine
    stream: Assignment


def _profile(request: Request, block_tokens: int) -> RequestProfile:
    return RequestProfile(
        request.prompt_tokens, request.hashes, block_tokens, request.output_tokens
    )


class ProxyRouter:
    """Places requests with the proxy's code and load estimates.

    Args:
        step_s: target time between tokens, in seconds.
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
        self.tracker = LoadTracker(
            routing, disaggregate, step_s=step_s, clock=lambda: fleet.now
        )
        self.tracker.pulls = pulls
        self.lender: Engine | None = None
        for engine in fleet.engines:
            self.tracker.set_lender(engine, True)
        self._fleet = fleet
        # Each list starts with the least recently chosen server.
        self._prefills = list(fleet.prefills)
        self._decodes = list(fleet.decodes)
        self._legs: dict[int, _Legs] = {}  # by the id() of the request
        self._polled_at = 0.0
        self._reservation: Assignment | None = None

    def place_prompt(self, request: Request) -> Engine:
        self._poll()
        profile = _profile(request, self._fleet.times.block_tokens)
        on_decode_server = not self._prefills or self.tracker.decode_only
        if on_decode_server is None:  # it depends on the load
            self._reservation = self.tracker.reserve_decode_only(
                profile, self._prefills, self._decodes
            )
            on_decode_server = self._reservation is not None
        return self.begin_legs(request, profile, on_decode_server)

    def begin_legs(
        self, request: Request, profile: RequestProfile, on_decode_server: bool
    ) -> Engine:
        """Choose servers and begin both legs. Return the engine of the prompt's leg."""
        self.lender = None
        if on_decode_server:
            engine, leg = self._begin(
                profile, self._decodes, computes=True, generates=True
            )
            self._legs[id(request)] = _Legs(leg, engine, leg)
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
        self.tracker.on_answer(legs.stream)
        return legs.decode_engine

    def _begin(
        self,
        profile: RequestProfile,
        servers: list[Engine],
        *,
        computes: bool,
        generates: bool,
    ) -> tuple[Engine, Assignment]:
        """Choose a server and begin a leg on it.

        If the leg computes the prompt, and another server has cached more of the
        prompt, set `lender` to that server.
        """
        reservation = self._reservation
        self._reservation = None
        engine = self.tracker.choose_server(
            servers,
            profile,
            computes=computes,
            generates=generates,
            reservation=reservation,
        )
        lenders = self.tracker.lenders(engine, profile) if computes else []
        if self.lender is None and lenders:
            lender, _ = lenders[0]
            assert isinstance(lender, Engine)
            self.lender = lender
        servers.remove(engine)
        servers.append(engine)
        leg = self.tracker.start(
            engine,
            profile,
            computes=computes,
            generates=generates,
            reservation=reservation,
        )
        return engine, leg

    def on_computed(self, request: Request) -> None:
        legs = self._legs[id(request)]
        self.tracker.on_answer(legs.prompt)
        if legs.prompt is not legs.stream:
            self.tracker.end(legs.prompt)

    def on_finished(self, request: Request) -> None:
        self.tracker.end(self._legs[id(request)].stream)

    def _poll(self) -> None:
        """Pass all servers' health reports to the tracker, at most once per POLL_S."""
        if self._fleet.now >= self._polled_at + POLL_S:
            self._polled_at = self._fleet.now
            for engine in self._fleet.engines:
                self.tracker.on_report(
                    engine,
                    engine.times.capacity,
                    engine.totals,
                    host_tier=engine.store.report if engine.store else None,
                )


class IdealRouter:
    """Places requests by the true state of the simulated servers.

    Args:
        step_s: target time between tokens, in seconds.
    """

    lender: Engine | None = None

    def __init__(self, fleet: Fleet, step_s: float) -> None:
        self._fleet = fleet
        self._target_s = step_s

    def place_prompt(self, request: Request) -> Engine:
        fleet = self._fleet
        depths: Depths = {
            engine.index: engine.cached_blocks(request.hashes)
            for engine in fleet.engines
        }
        placement = choose(
            _profile(request, fleet.times.block_tokens),
            [self._load(engine) for engine in fleet.prefills],
            [self._load(engine) for engine in fleet.decodes],
            CachedPrefixes(depths),
            fleet.now,
        )
        if placement.prefill is None:
            return fleet.engines[placement.decode]
        return fleet.engines[placement.prefill]

    def place_stream(self, request: Request) -> Engine:
        loads = [self._load(engine) for engine in self._fleet.decodes]
        profile = _profile(request, self._fleet.times.block_tokens)
        return self._fleet.decodes[emptiest_server(profile, loads)]

    def on_computed(self, request: Request) -> None:
        pass

    def on_finished(self, request: Request) -> None:
        pass

    def _load(self, engine: Engine) -> ServerLoad:
        num_streams = len(engine.streams)
        load = ServerLoad(
            engine.index,
            len(engine.waiting),
            self._fleet.now + engine.queued_s(),
            streams=num_streams,
            kv_tokens=engine.held_tokens,
            base_step_s=engine.stream_step_s() / (1 + num_streams / _DOUBLING_STREAMS),
        )
        for request in engine.waiting:
            size_class = RequestProfile(request.prompt_tokens).size_class
            load.queued_s[size_class] += request.uncomputed_tokens * load.token_s
        load.add_queued(0, 0.0)  # update the sums that depend on queued_s
        load.kv_capacity = engine.times.capacity
        load.target_step_s = self._target_s
        return load

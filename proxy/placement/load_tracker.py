"""Estimates the load of the servers from this proxy's requests and their answers.

Servers report their speed and KV capacity, but not their queues. Proxies do not share
estimates. This proxy notices the requests of other proxies only because they lengthen
the times that it measures. This module does no I/O.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from protocol.messages import HostTierReport
from proxy.placement.assignment import Assignment
from proxy.placement.cached_tails import CachedTails
from proxy.placement.host_tiers import HostTiers
from proxy.placement.key_affinity import KeyAffinity
from proxy.placement.placement import (
    NOTHING_CACHED,
    CachedPrefixes,
    cheapest_server,
    choose,
    emptiest_server,
    saved_by_pull_s,
)
from proxy.placement.prefix_index import Depths, PrefixIndex
from proxy.placement.request_profile import RequestProfile
from proxy.placement.server_load import (
    STEP_TOKENS,
    USUAL_STEP_S,
    LoadsByServer,
    ServerLoad,
)
from proxy.placement.speed import (
    MAX_REPORTED,
    MIN_SECONDS,
    PromptSpeed,
    StepTotals,
    decay_to_fastest,
    measure_prompts,
    measure_streams,
    measures_prompts,
)

Routing = Literal["auto", "least_loaded", "round_robin"]
Disaggregate = Literal["always", "auto", "never"]

ServerT = TypeVar("ServerT")

# A server gets a hint to pull if the pull saves computing at least this many tokens. A
# smaller number of tokens is computed as fast as it is pulled.
MIN_HINT_TOKENS = 32


class LoadTracker:
    """The loads of all servers and the prefixes that they have cached.

    Args:
        max_blocks: limit on the remembered blocks of prefixes, over all servers, and
            once more over all KV stores.
        step_s: longest step with streams, for servers that report no such limit.
        clock: returns monotonic seconds.

    Attributes:
        pulls: servers receive hints that name the server from which to pull KV.
    """

    def __init__(
        self,
        routing: Routing = "round_robin",
        disaggregate: Disaggregate = "always",
        *,
        max_blocks: int = 250_000,
        step_s: float = USUAL_STEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routing = routing
        self._disaggregate = disaggregate
        self._prefixes = PrefixIndex(max_blocks)
        self._host_tiers = HostTiers(max_blocks)
        self._affinity = KeyAffinity()
        self._clock = clock
        self.loads = LoadsByServer(step_s)
        self._totals: dict[object, StepTotals] = {}
        self._speeds: dict[object, PromptSpeed] = {}
        self._lenders: dict[int, object] = {}  # servers by the index of their load
        self._tails = CachedTails()
        # Blocks that are being computed, each with the index of the server.
        self._pending_blocks = set[tuple[int, int]]()
        self.pulls = False

    # members

    def forget_cache(self, server: object) -> None:
        """Record that the server's cache is empty: it has restarted, or left.

        The KV store of the server's host keeps its content.
        """
        self._prefixes.remove_server(self.loads[server].index)

    def share_load(self, server: object, other: object) -> None:
        """Record that two members are the same server, which takes either leg."""
        self.loads[server] = self.loads[other]

    def remove(self, server: object) -> None:
        """Drop a server that is no longer a member and has no requests."""
        load = self.loads.pop(server, None)
        if load is not None:
            if self._lenders.get(load.index) is server:
                del self._lenders[load.index]
            if not any(other is load for other in self.loads.values()):
                self._prefixes.remove_server(load.index)
                self._host_tiers.remove_server(load)
        self._totals.pop(server, None)
        self._speeds.pop(server, None)

    # choices

    def reserve_decode_only(
        self,
        profile: RequestProfile,
        prefills: Sequence[object],
        decodes: Sequence[object],
    ) -> Assignment | None:
        """Assign both legs to one decode server, if that is the cheapest placement.

        Other requests may be placed before the leg starts, so the server's load
        includes the leg from now on. Pass the result to `choose_server` and `start`,
        and to `cancel` in any case. The result is None if a prefill server is cheaper.
        """
        cached = self._cached(profile)
        first = self._affinity.preferred_first
        prefills = first(prefills, self.loads, profile, generates=False)
        decodes = first(decodes, self.loads, profile, generates=True)
        placement = choose(
            profile,
            [self.loads[server] for server in prefills],
            [self.loads[server] for server in decodes],
            cached,
            self._clock(),
        )
        if placement.prefill is not None:
            return None
        for server in decodes:
            if self.loads[server].index == placement.decode:
                assignment = self.start(server, profile, computes=True, generates=True)
                assignment.is_reserved = True
                return assignment
        raise AssertionError("the chosen server is one of `decodes`")

    @property
    def decode_only(self) -> bool | None:
        """Whether decode servers compute all prompts; None: the load decides."""
        return None if self._disaggregate == "auto" else self._disaggregate == "never"

    def cancel(self, reservation: Assignment | None) -> None:
        """End a reservation, unless its leg has started."""
        if reservation is not None and reservation.is_reserved:
            reservation.is_reserved = False
            self.end(reservation)

    def choose_server(
        self,
        servers: Sequence[ServerT],
        profile: RequestProfile | None,
        *,
        computes: bool,
        generates: bool,
        reservation: Assignment | None = None,
    ) -> ServerT:
        """Return the best server for one leg; the first if several are equally good.

        Args:
            profile: None if the request has no prompt, as at /tokenize.
            reservation: the result of `reserve_decode_only` for the request.
        """
        if profile is None or self._routing == "round_robin" or len(servers) == 1:
            return servers[0]
        if generates and reservation is not None and reservation.is_reserved:
            for server in servers:
                if self.loads[server] is reservation.load:
                    return server
        servers = self._affinity.preferred_first(
            servers, self.loads, profile, generates=generates
        )
        loads = [self.loads[server] for server in servers]
        if not computes:
            return servers[emptiest_server(profile, loads)]
        cached = NOTHING_CACHED
        if self._routing == "auto":
            cached = self._cached(profile)
        now = self._clock()
        cost = cheapest_server(profile, loads, cached, now, generates=generates)
        return servers[cost.position]

    # pulls

    def set_lender(self, server: object, is_lender: bool) -> None:
        """Record whether other servers may pull this server's KV."""
        index = self.loads[server].index
        if is_lender:
            self._lenders[index] = server
        else:
            self._lenders.pop(index, None)

    def lenders(
        self, server: object, profile: RequestProfile
    ) -> list[tuple[object, int]]:
        """Return the lenders that have cached more of a prompt than `server` has.

        `server` is the server that computes the prompt. A lender is a server or a
        StoreLender, and is returned with its number of cached tokens. The lender with
        the most tokens is first.
        """
        if not self.pulls:
            return []
        index = self.loads[server].index
        # Pending blocks do not count as cached, neither those of lenders nor those of
        # `server`. It may have to pull its own pending blocks from a lender.
        computed = {
            i: self._computed_depth(profile, i, depth)
            for i, depth in self._depths(profile).items()
        }
        now = self._clock()
        margin = MIN_HINT_TOKENS / max(profile.block_tokens, 1.0)
        min_depth = computed.get(index, 0) + margin
        ranked = sorted(
            (-depth, self._reply_wait_s(self._lenders[i], now), i)
            for i, depth in computed.items()
            if i in self._lenders and depth >= min_depth
        )
        lenders = [
            (self._lenders[i], int(-depth * profile.block_tokens))
            for depth, _, i in ranked
        ]
        load = self.loads[server]
        min_tokens = int(min_depth * profile.block_tokens)
        stores = [
            (store, num_tokens)
            for store, num_tokens in self._host_tiers.lenders(
                load, profile, MIN_HINT_TOKENS
            )
            if num_tokens >= min_tokens
        ]
        # With equal numbers of tokens, a server is listed before a store.
        return sorted([*lenders, *stores], key=lambda lender: -lender[1])

    def _cached(self, profile: RequestProfile) -> CachedPrefixes:
        """Return the cached blocks of a prompt, and what can be pulled now."""
        depths = self._depths(profile)
        stored_tokens = self._host_tiers.cached_tokens(profile)
        if not self.pulls:
            return CachedPrefixes(depths, stored_tokens=stored_tokens)
        now = self._clock()
        lendable = 0.0
        wait_s = 0.0
        for index, depth in depths.items():
            if depth < lendable or index not in self._lenders:
                continue
            computed = self._computed_depth(profile, index, depth)
            if computed < lendable or (computed == lendable and wait_s == 0.0):
                continue
            lender_wait_s = self._reply_wait_s(self._lenders[index], now)
            if computed > lendable or lender_wait_s < wait_s:
                wait_s = lender_wait_s
            lendable = computed
        return CachedPrefixes(depths, lendable, wait_s, stored_tokens)

    def _reply_wait_s(self, lender: object, now: float) -> float:
        """Return the seconds until a lender replies. It replies between two steps."""
        load = self.loads[lender]
        if not load.free_at > now:
            return 0.0
        step_s = self.loads.target_step_s
        if not load.streams:
            step_s = STEP_TOKENS * load.token_s
        return min(load.free_at - now, step_s)

    def _computed_depth(
        self, profile: RequestProfile, index: int, depth: float
    ) -> float:
        """Return how many leading blocks of a prompt a server has computed.

        A server computes the blocks of a prompt in order.

        Args:
            index: the server's ServerLoad.index.
            depth: number of leading blocks that are computed or pending.
        """
        num_hashed = min(int(depth), len(profile.hashes))
        if not num_hashed:
            return depth
        if (profile.hashes[num_hashed - 1], index) not in self._pending_blocks:
            return depth
        return bisect_left(
            range(num_hashed),
            True,
            key=lambda n: (profile.hashes[n], index) in self._pending_blocks,
        )

    def _depths(self, profile: RequestProfile) -> Depths:
        """Return the cached blocks of a prompt by server.

        If this prompt continues an earlier prompt and the answer to it, the end of the
        earlier prompt and the answer count as cached, too.
        """
        depths = self._prefixes.depths(profile.hashes)
        self._tails.extend(depths, profile)
        return depths

    # legs

    def start(
        self,
        server: object,
        profile: RequestProfile,
        *,
        computes: bool,
        generates: bool,
        reservation: Assignment | None = None,
    ) -> Assignment:
        """Record that a leg is assigned to a server.

        Call `on_answer` when the answer to the leg begins, and `end` in any case.

        Args:
            reservation: the result of `reserve_decode_only` for the request. It is
                returned if it fits the leg, and otherwise cancelled.
        """
        load = self.loads[server]
        self._affinity.record(profile, load.index, generates=generates)
        if reservation is not None and reservation.is_reserved:
            if reservation.load is load and computes and generates:
                reservation.is_reserved = False
                return reservation
            self.cancel(reservation)
        prefill_s = 0.0
        new_blocks: list[tuple[int, int]] = []
        if computes:
            cached = self._cached(profile)
            prefill_s = self._prefill_s(load, profile, cached, generates)
            depth = int(cached.depths.get(load.index, 0))
            new_blocks = [(block, load.index) for block in profile.hashes[depth:]]
            self._pending_blocks.update(new_blocks)
            load.free_at = max(load.free_at, self._clock()) + prefill_s
            load.num_prompts += 1
            load.add_queued(profile.size_class, prefill_s)
            # When the server starts the prompts that are queued after this prompt, it
            # will have cached this prompt.
            self._add_prompt(load, profile)
        is_incoming = generates and not computes
        if is_incoming:
            load.incoming_streams += 1
        elif generates:
            load.streams += 1
        if generates:
            load.kv_tokens += profile.tokens
        return Assignment(
            load=load,
            profile=profile,
            computes=computes,
            generates=generates,
            prefill_s=prefill_s,
            expected_end_at=load.free_at - load.total_delay_s,
            started_at=self._clock(),
            new_blocks=new_blocks,
            is_incoming=is_incoming,
        )

    def _prefill_s(
        self,
        load: ServerLoad,
        profile: RequestProfile,
        cached: CachedPrefixes,
        generates: bool,
    ) -> float:
        """Return the estimated time for computing a prompt, not counting its wait."""
        num_cached = cached.depths.get(load.index, 0) * profile.block_tokens
        # At least the last token of a prompt is computed.
        num_tokens = max(int(profile.tokens - num_cached), 1)
        prefill_s = load.launch_s + num_tokens * load.token_s
        if cached.lendable_blocks or cached.stored_tokens:
            prefill_s -= saved_by_pull_s(profile, load, cached)
        if generates:
            # The incoming streams will be running when this prompt is computed.
            prefill_s /= load.prompt_share(load.incoming_streams)
        return prefill_s

    def wait_s(self, server: object) -> float:
        """Return the estimated time until the server has computed its prompts."""
        return max(self.loads[server].free_at - self._clock(), 0.0)

    def on_answer(self, assignment: Assignment) -> None:
        """Record that the answer has begun: the first token, or a prefill's result."""
        assignment.is_answered = True
        load = assignment.load
        hashes = assignment.profile.hashes
        is_indexed = bool(hashes) and self._prefixes.has(load.index, hashes[-1])
        # The index lacks blocks that another, refused request was to compute.
        if not assignment.computes or not is_indexed:
            self._add_prompt(load, assignment.profile)
        self._host_tiers.add_prompt(load, assignment.profile)
        self._count_as_running(assignment)
        delay_s = self._clock() - assignment.expected_end_at - load.total_delay_s
        self._end_prefill(assignment, delay_s)

    def end(self, assignment: Assignment) -> None:
        """Record that a leg has ended.

        A leg without an answer was refused or lost: its blocks are not cached.
        """
        load = assignment.load
        profile = assignment.profile
        self._count_as_running(assignment)
        self._end_prefill(assignment, -assignment.prefill_s)
        if not assignment.is_answered:
            blocks = [block for block, _ in assignment.new_blocks]
            self._prefixes.remove(load.index, blocks)
            self._tails.remove(load.index, profile)
        elif assignment.generates:
            # The number of generated tokens is estimated from the elapsed time.
            elapsed_s = self._clock() - assignment.started_at
            num_steps = elapsed_s / max(load.step_s(), MIN_SECONDS)
            num_generated = min(profile.max_output_tokens, num_steps)
            self._tails.add(load.index, profile, num_generated)
        if assignment.generates:
            load.streams -= 1
            load.kv_tokens -= profile.tokens

    def _count_as_running(self, assignment: Assignment) -> None:
        if assignment.is_incoming:
            assignment.is_incoming = False
            assignment.load.incoming_streams -= 1
            assignment.load.streams += 1

    def _end_prefill(self, assignment: Assignment, delay_s: float) -> None:
        """Record that a prompt is computed, or will not be computed.

        Args:
            delay_s: seconds by which the prompts that are queued after this prompt will
                be later than predicted; negative if they will be earlier.
        """
        load = assignment.load
        self._pending_blocks.difference_update(assignment.new_blocks)
        if not assignment.computes:
            return
        assignment.computes = False
        load.num_prompts -= 1
        load.add_queued(assignment.profile.size_class, -assignment.prefill_s)
        if not load.num_prompts:
            delay_s = self._clock() - load.free_at
        load.free_at += delay_s
        load.total_delay_s += delay_s

    def _add_prompt(self, load: ServerLoad, profile: RequestProfile) -> None:
        """Record that the server's cache has a prompt."""
        max_blocks = None
        if load.kv_capacity is not None:
            # A body without a prompt has blocks of 0 tokens; the server will refuse it.
            max_blocks = int(load.kv_capacity / (profile.block_tokens or 1.0))
        self._prefixes.add(load.index, profile.hashes, max_blocks)
        self._tails.add(load.index, profile)

    # health reports

    def on_report(
        self,
        server: object,
        kv_capacity: int | None,
        totals: StepTotals,
        target_step_s: float | None = None,
        host_tier: HostTierReport | None = None,
    ) -> None:
        """Update a server's estimates from the answer to a health check.

        Args:
            kv_capacity: tokens of KV.
            totals: counters of the engine since its start.
            target_step_s: longest step with streams, in seconds.
            host_tier: the KV store that the server uses.
        """
        load = self.loads[server]
        self._host_tiers.on_report(load, host_tier, server)
        load.kv_capacity = kv_capacity
        if kv_capacity:
            load.kv_capacity = max(min(kv_capacity, MAX_REPORTED), 0)
        load.target_step_s = target_step_s or self.loads.target_step_s
        before = self._totals.get(server, StepTotals())
        self._totals[server] = totals
        new = StepTotals(*(b - a for a, b in zip(before, totals, strict=True)))
        if not all(0 <= count < MAX_REPORTED for count in new):
            return  # the server has restarted, or reports impossible numbers
        measure_streams(load, new)
        if not new.prompts:
            token_times = [speed.token_s for speed in self._speeds.values()]
            decay_to_fastest(load, min(token_times, default=load.token_s))
        elif measures_prompts(new):
            speed = self._speeds.setdefault(server, PromptSpeed())
            measure_prompts(load, new, speed)

"""Chooses the servers for the prompt and the answer of a request, by estimated cost.

`choose` is pure: it maps a request and load estimates to a placement. Estimates may be
out of date or missing, which costs time and never correctness. The cost of a placement
is in seconds and has four terms:

1. The wait for queued prompts, and the prefill. The prefill counts twice if the server
   has other prompts, because the prefill then delays prompts that arrive later. It
   counts once on an idle server, which has usually finished the prefill before the next
   prompt arrives. Copied tokens are tokens that the server lacks and one of its peers
   has cached. A prefill with copied tokens counts twice on an idle server too, and the
   copied tokens count once more: a copy takes cache capacity, and later prompts can go
   to the peer instead.
2. The hand-off to a decode server, or the pull of a prefix from another server or from
   the KV store of the server's host. The cost of a prefix is that of the fastest way:
   one of these pulls, or computing the prefix.
3. The time that running streams lose while the server computes the prompt. It is at
   least the minimum duration of a step with prompts, because the kernels of such a step
   are launched one by one.
4. The wait for KV capacity, if the decode server has too little free.

The peers of a prefill server are the other prefill servers, and not the decode servers.
If only a decode server has a prefix, every later turn interrupts that server's streams.
An idle prefill server that computes the prefix once serves all later turns. If decode
servers were peers, the share of good requests in the row "agents", 2P2D, of the tables
in docs/performance.md would be 0.70 instead of 0.81.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from proxy.placement.prefix_index import Depths
from proxy.placement.request_profile import RequestProfile
from proxy.placement.server_load import ServerLoad

# The parameters of the cost. The comments cite rows of the tables in "Placement,
# simulated" (docs/performance.md), where the share of good requests is defined. Times
# of first tokens are medians.

# Seconds per hand-off or pull, in addition to the time for its tokens. A hand-off takes
# one more HTTP request and the start of a pull (measured: 4 to 6 ms). The pull of a
# prefix takes a lookup at the lender and a fence (measured: 5 to 10 ms).
TRANSFER_S = 0.01
# Seconds per token of a pulled prefix: the KV of an 8B model at 25 GB/s.
PULL_TOKEN_S = 5e-6
# Seconds. Up to this wait for the first token, the cost grows quadratically with the
# wait, beyond it linearly. At exactly this wait, the cost is three times the wait.
# Fitted: without this term, the share of good requests in the row "open loop at 24/s",
# 1P1D, is 0.33 instead of 0.87.
PATIENCE_S = 0.7
# Minimum cost in seconds for each running stream that a prompt interrupts: a step with
# a prompt is launched kernel by kernel, so even a short prompt takes this long. Fitted:
# with 0.006, the share of good requests in the row "agents", 2P2D, is 0.68 instead of
# 0.81. With 0.02, the first token in the row "Azure 15 x, 2P2D" takes 0.32 instead of
# 0.28 s.
INTERRUPTION_S = 0.016
# Interrupting more streams than this costs as much as interrupting this many. Fitted:
# without this limit, the first token in the row "Azure 15 x, 2P2D" takes 0.95 instead
# of 0.28 s.
MAX_COUNTED_STREAMS = 32
# Seconds of cost per running stream, for each second of prefill. Fitted: with 0, the
# first token in the row "Azure 15 x, 1P3D" takes 0.34 instead of 0.07 s.
STREAM_DELAY_WEIGHT = 0.15

_kv_tokens = attrgetter("kv_tokens")


class CachedPrefixes(NamedTuple):
    """The cached blocks of one prompt.

    Attributes:
        depths: number of leading blocks that each server has, by ServerLoad.index.
        lendable_blocks: number of leading blocks that the lender has. The lender is the
            server that can lend the most leading blocks.
        lender_wait_s: seconds until the lender can answer.
        stored_tokens: number of leading tokens that each KV store has, by
            HostTier.store.
    """

    depths: Depths
    lendable_blocks: float = 0.0
    lender_wait_s: float = 0.0
    stored_tokens: Mapping[int, float] = MappingProxyType({})


NOTHING_CACHED = CachedPrefixes(depths={})


class Placement(NamedTuple):
    """The servers of a request, by ServerLoad.index.

    Attributes:
        prefill: the server that computes the prompt; None if the decode server does.
        decode: the server that generates.
    """

    prefill: int | None
    decode: int


class _Cost(NamedTuple):
    """The cost of computing a prompt on one server, in seconds.

    Attributes:
        position: position of the server in the sequence of compared servers.
        first_token_s: seconds until the first token: the wait and the prefill.
        others_s: seconds that other requests lose: prompts that arrive while this
            prompt is computed, and running streams.
    """

    position: int
    first_token_s: float
    others_s: float

    def total_s(self, handoff_s: float = 0.0) -> float:
        """Return the total cost. The wait for the first token counts up to three times.

        Args:
            handoff_s: seconds by which a hand-off delays the first token.
        """
        first_token_s = self.first_token_s + handoff_s
        impatience_s = min(first_token_s, PATIENCE_S)
        impatience_s *= impatience_s / (PATIENCE_S / 2)
        return first_token_s + impatience_s + self.others_s


def choose(
    profile: RequestProfile,
    prefills: Sequence[ServerLoad],
    decodes: Sequence[ServerLoad],
    cached: CachedPrefixes = NOTHING_CACHED,
    now: float = 0.0,
) -> Placement:
    """Return the cheapest placement.

    Args:
        prefills: servers that may compute the prompt. Each is assumed to be compatible
            with each decode server.
        decodes: servers that may generate; at least one.
        now: the present time, by the clock of ServerLoad.free_at.
    """
    decode_only = cheapest_server(profile, decodes, cached, now, generates=True)
    decode_only_placement = Placement(None, decodes[decode_only.position].index)
    decode = decodes[emptiest_server(profile, decodes)]
    others = [server for server in prefills if server is not decode]
    if not others:
        return decode_only_placement
    pair = cheapest_server(profile, others, cached, now, generates=False)
    handoff_s = TRANSFER_S + decode.kv_shortage_s(profile)
    if pair.total_s(handoff_s) > decode_only.total_s():
        return decode_only_placement
    return Placement(others[pair.position].index, decode.index)


def cheapest_server(
    profile: RequestProfile,
    servers: Sequence[ServerLoad],
    cached: CachedPrefixes,
    now: float,
    *,
    generates: bool,
) -> _Cost:
    """Return the lowest cost of computing the prompt, with the position of the server.

    The server also generates the answer if `generates` is true. This function loops
    over all servers for every request, so the loop has few function calls.
    """
    lowest_cost_s = float("inf")
    cheapest = (servers[0], lowest_cost_s, 0.0)
    size_class = profile.size_class
    cached_tokens = _cached_tokens(profile, servers, cached)
    max_cached = max(cached_tokens)
    if generates and cached.depths:  # all servers are peers of a decode server
        max_cached = max(cached.depths.values()) * profile.block_tokens
    prefill_times_s = _prefill_times_s(profile, servers, cached, cached_tokens)
    for server, num_cached, prefill_s in zip(
        servers, cached_tokens, prefill_times_s, strict=True
    ):
        # If a prefill counted twice on an idle server too, the first token in the row
        # "open loop at 24/s", 1P3D, would take 98 instead of 87 ms.
        others_s = prefill_s if server.num_prompts else 0.0
        if num_cached < max_cached:
            copied_s = (max_cached - num_cached) * server.token_s
            others_s = prefill_s + (copied_s if copied_s < prefill_s else prefill_s)
        first_token_s = server.wait_s(size_class, now) + prefill_s
        cost_s = first_token_s + others_s
        if cost_s >= lowest_cost_s:
            continue
        num_streams = server.streams
        if num_streams:
            num_streams += server.incoming_streams
            # Streams lose the time of the prompt's tokens, or the minimum duration of a
            # step with a prompt, whichever is longer.
            loss_s = STREAM_DELAY_WEIGHT * num_streams * prefill_s
            is_crowded = num_streams > MAX_COUNTED_STREAMS
            num_counted = MAX_COUNTED_STREAMS if is_crowded else num_streams
            min_loss_s = INTERRUPTION_S * num_counted
            if loss_s < min_loss_s:
                loss_s = min_loss_s
            if cost_s + loss_s >= lowest_cost_s:
                continue
            share = server.prompt_share()
            others_s += loss_s / share
            if generates:
                first_token_s += prefill_s / share - prefill_s
                first_token_s += server.kv_shortage_s(profile)
            cost_s = first_token_s + others_s
        if cost_s < lowest_cost_s:
            lowest_cost_s = cost_s
            cheapest = (server, first_token_s, others_s)
    best, first_token_s, others_s = cheapest
    return _Cost(servers.index(best), first_token_s, others_s)


def _cached_tokens(
    profile: RequestProfile, servers: Sequence[ServerLoad], cached: CachedPrefixes
) -> list[float]:
    """Return the leading tokens of the prompt that each server has cached."""
    depths = cached.depths
    if not depths:
        return [0.0] * len(servers)
    block_tokens = profile.block_tokens
    return [depths.get(server.index, 0.0) * block_tokens for server in servers]


def _prefill_times_s(
    profile: RequestProfile,
    servers: Sequence[ServerLoad],
    cached: CachedPrefixes,
    cached_tokens: Sequence[float],
) -> list[float]:
    """Return each server's seconds for the prompt, not counting the wait in its queue.

    The server either computes all tokens that it has not cached, or pulls a prefix and
    computes the rest. It pulls from another server or from the KV store of its host.
    The result is the time of the fastest way.

    Args:
        cached_tokens: for each server, the leading tokens that it has cached.
    """
    times_s = []
    num_tokens = profile.tokens
    num_lendable, num_rest, pull_start_s = _pull(profile, cached)
    # For each store, the tokens that it has, and those that are computed after a pull.
    stored = {
        store: (num_stored, max(num_tokens - num_stored, 1))
        for store, num_stored in cached.stored_tokens.items()
    }
    for server, num_cached in zip(servers, cached_tokens, strict=True):
        token_s = server.token_s
        num_computed = num_tokens - num_cached
        prefill_s = (num_computed if num_computed > 1 else 1) * token_s
        if num_lendable > num_cached:
            pulled_s = pull_start_s + num_rest * token_s - num_cached * PULL_TOKEN_S
            if pulled_s < prefill_s:
                prefill_s = pulled_s
        tier = server.host_tier
        if tier is not None and tier.store in stored:
            num_stored, num_left = stored[tier.store]
            num_pulled = num_stored - num_cached
            if num_pulled > 0:
                pulled_s = tier.start_s + num_left * token_s + num_pulled * tier.token_s
                if pulled_s < prefill_s:
                    prefill_s = pulled_s
        times_s.append(prefill_s)
    return times_s


class _Pull(NamedTuple):
    """The pull of a prefix by a server that has none of it.

    Attributes:
        num_lendable: tokens that another server can lend.
        num_rest: tokens that have to be computed after the pull.
        start_s: seconds until the lendable tokens have arrived, so that the computation
            of the rest can start.
    """

    num_lendable: float
    num_rest: float
    start_s: float


def _pull(profile: RequestProfile, cached: CachedPrefixes) -> _Pull:
    num_lendable = cached.lendable_blocks * profile.block_tokens
    num_rest = max(profile.tokens - num_lendable, 1)
    start_s = TRANSFER_S + cached.lender_wait_s + num_lendable * PULL_TOKEN_S
    return _Pull(num_lendable, num_rest, start_s)


def saved_by_pull_s(
    profile: RequestProfile, server: ServerLoad, cached: CachedPrefixes
) -> float:
    """Return the seconds that a server saves if it pulls a prefix.

    The server pulls either the lendable blocks, or the prefix in the KV store of its
    host. The result is 0 if computing the prefix is faster.
    """
    num_cached = cached.depths.get(server.index, 0) * profile.block_tokens
    saved_s = 0.0
    if cached.lendable_blocks:
        num_pulled = cached.lendable_blocks * profile.block_tokens - num_cached
        pull_s = TRANSFER_S + num_pulled * PULL_TOKEN_S + cached.lender_wait_s
        saved_s = num_pulled * server.token_s - pull_s
    tier = server.host_tier
    if tier is not None:
        num_pulled = cached.stored_tokens.get(tier.store, 0.0) - num_cached
        pull_s = tier.start_s + num_pulled * tier.token_s
        saved_s = max(saved_s, num_pulled * server.token_s - pull_s)
    if not saved_s > 0:
        return 0.0
    return min(saved_s, max(profile.tokens - num_cached, 1) * server.token_s)


def emptiest_server(profile: RequestProfile, servers: Sequence[ServerLoad]) -> int:
    """Return the position of the decode server with the least KV in use.

    A server without enough free KV for this request is chosen only if all servers lack
    free KV. The result is then the server that lacks the least. A server with less KV
    in use has shorter steps, because a step reads the KV of all its streams.
    """
    best = min(servers, key=_kv_tokens)
    if best.missing_kv(profile):
        best = min(
            servers, key=lambda server: (server.missing_kv(profile), server.kv_tokens)
        )
    return servers.index(best)

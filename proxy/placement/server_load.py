"""The load of one server and its speed, as the proxy estimates them."""

from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.placement.request_profile import NUM_SIZE_CLASSES, RequestProfile

USUAL_STEP_S = 0.025  # default of --itl-target-s, the limit for a step with streams
# Prompt tokens in a step. Even a short prompt waits until the running step ends.
STEP_TOKENS = 8192
# The engine starts a prompt before queued prompts that are 4 times as long. The
# estimates assume this only for queued prompts that are at least this many size classes
# longer (64 times as long), because a short prompt hardly delays those.
SKIPPED_CLASSES = 6
STREAMS_PER_DOUBLING = 96.0  # this many streams make a step take about twice as long
MIN_PROMPT_SHARE = 0.2  # while streams run, prompts get at least this share of the time
INITIAL_TOKEN_S = 25e-6  # an 8B model on one H200; used until steps were measured
INITIAL_STEP_S = 0.005


class HostTier(NamedTuple):
    """The KV store of a server's host.

    Attributes:
        store: number of the store. Servers that use the same store have the same
            number.
        start_s: fixed seconds for each pull from the store, measured by the server.
        token_s: additional seconds per pulled token, measured by the server.
    """

    store: int
    start_s: float
    token_s: float


@dataclass(slots=True, eq=False)
class ServerLoad:
    """Estimates for one server. All of them may be out of date.

    Times that end in `_at` are seconds of the tracker's clock.

    Attributes:
        index: the server's bit in PrefixIndex; unique among the members.
        num_prompts: prompts that are queued or being computed.
        free_at: when the queued and computing prompts will all have been computed.
        total_delay_s: sum of the corrections of `free_at` so far.
        queued_s: compute time of the queued prompts, by size class.
        skippable_s: by size class of a new prompt, the seconds of `queued_s` for which
            the prompt does not wait, because these queued prompts are much longer.
        streams: requests for which this server generates, or will generate after it has
            computed their prompts itself.
        incoming_streams: requests for which this server will generate after another
            server has computed their prompts.
        kv_tokens: tokens of KV that streams and incoming streams hold.
        kv_capacity: tokens of KV; None until the server has reported it.
        token_s: seconds per prompt token.
        launch_s: additional seconds per step with prompts.
        base_step_s: seconds of a step with few streams; see `step_s`.
        target_step_s: longest time of a step with streams. The engine limits the prompt
            tokens of the step accordingly.
        host_tier: None if the server uses no KV store.
    """

    index: int
    num_prompts: int = 0
    free_at: float = float("-inf")
    total_delay_s: float = 0.0
    queued_s: list[float] = field(default_factory=lambda: [0.0] * NUM_SIZE_CLASSES)
    skippable_s: list[float] = field(default_factory=lambda: [0.0] * NUM_SIZE_CLASSES)
    streams: int = 0
    incoming_streams: int = 0
    kv_tokens: int = 0
    kv_capacity: int | None = None
    token_s: float = INITIAL_TOKEN_S
    launch_s: float = 0.0
    base_step_s: float = INITIAL_STEP_S
    target_step_s: float = USUAL_STEP_S
    host_tier: HostTier | None = None

    def add_queued(self, size_class: int, seconds: float) -> None:
        """Add compute time of a prompt to the queue; negative `seconds` remove it."""
        self.queued_s[size_class] += seconds
        # A short prompt waits for at least one step, because the engine may be in the
        # middle of a step of a long prompt.
        skippable_s = -STEP_TOKENS * self.token_s
        for longer in range(NUM_SIZE_CLASSES - 1, SKIPPED_CLASSES - 1, -1):
            skippable_s += self.queued_s[longer]
            self.skippable_s[longer - SKIPPED_CLASSES] = max(skippable_s, 0.0)

    def step_s(self, more_streams: int = 0) -> float:
        """Return the time of a step without prompts.

        Args:
            more_streams: streams in addition to the current ones.
        """
        num_streams = self.streams + more_streams
        return self.base_step_s * (1.0 + num_streams / STREAMS_PER_DOUBLING)

    def prompt_share(self, more_streams: int = 0) -> float:
        """Return the share of the server's time that prompts get.

        Running streams take the rest, so that steps stay within `target_step_s`.

        Args:
            more_streams: streams in addition to the current ones.
        """
        if not self.streams:
            return 1.0
        # This code repeats `step_s`, because a function call for each server is slow.
        num_streams = self.streams + more_streams
        step_s = self.base_step_s * (1.0 + num_streams / STREAMS_PER_DOUBLING)
        share = 1.0 - step_s / self.target_step_s
        return share if share > MIN_PROMPT_SHARE else MIN_PROMPT_SHARE

    def wait_s(self, size_class: int, now: float) -> float:
        """Return how long a new prompt waits before its computation starts.

        If the queued prompts are overdue, the wait is as long as their delay so far.

        Args:
            size_class: the size class of the new prompt.
            now: the present time, by the clock of `free_at`.
        """
        wait_s = self.free_at - self.skippable_s[size_class] - now
        if wait_s > 0.0:
            return wait_s
        if self.num_prompts and self.free_at < now:
            return now - self.free_at
        return 0.0

    def kv_shortage_s(self, profile: RequestProfile) -> float:
        """Return how many seconds a request waits until streams have freed enough KV.

        This is a rough estimate, which assumes that streams finish one after the other.
        """
        missing = self.missing_kv(profile)
        if not missing or not self.streams:
            return 0.0
        freed_share = missing / max(self.kv_tokens, 1)
        return freed_share * profile.max_output_tokens * self.step_s()

    def missing_kv(self, profile: RequestProfile) -> int:
        """Return the tokens of KV that the server lacks for a request."""
        if self.kv_capacity is None:
            return 0
        needed = self.kv_tokens + profile.tokens + profile.max_output_tokens
        missing = needed - self.kv_capacity
        return missing if missing > 0 else 0


class LoadsByServer(dict[object, ServerLoad]):
    """The loads of servers. A server without a load gets one when it is looked up.

    Each load gets the smallest index that no other load has. Indices are bits of the
    integers in PrefixIndex, which must not grow while servers join and leave.
    """

    def __init__(self, target_step_s: float) -> None:
        super().__init__()
        self.target_step_s = target_step_s

    def __missing__(self, server: object) -> ServerLoad:
        taken = {load.index for load in self.values()}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        load = ServerLoad(index, target_step_s=self.target_step_s)
        self[server] = load
        return load

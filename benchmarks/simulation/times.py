"""The times of the simulated engines of benchmarks.simulation.fleet."""

from dataclasses import dataclass
from functools import cache

from benchmarks.bench.traces import BLOCK_TOKENS
from benchmarks.simulation.contention import Contention, Slowdowns
from engine.core.budget import step_times
from engine.core.budget.measurement import StepSizes, measure
from engine.core.budget.step_times import StepTimes


@dataclass(frozen=True)
class EngineTimes:
    """Times and limits of one engine. The defaults are those of a Llama-3.1-8B shape on
    one H200.

    docs/performance.md has the measurements. All fields ending in `_s` are seconds.

    Attributes:
        step_s: fixed part of the time of a step; the terms below are added to it.
        sequence_s: time per sequence of a decode step.
        held_token_s: time per token of KV, because every step reads all KV.
        token_s: time per token of a prompt.
        pair_s: time per pair of a prompt's token and a token before it (attention).
        request_s: time of a request before its prompt is queued, for example for HTTP.
        request_work_s: processor time of a request outside of engines: in HTTP
            processes, in the proxy, and in a load generator on the same host. At most
            `request_s` of this time passes before the prompt is queued.
        delivery_s: processor time outside of engines to deliver the tokens of a step.
        delivery_token_s: processor time that each of these tokens adds to `delivery_s`.
        handoff_s: time that disaggregation adds before the first token.
        handoff_work_s: processor time that disaggregation adds to a request outside of
            engines. At most `handoff_s` of this time passes before the first token.
        handoff_step_s: time that a hand-over adds to the next step of the decode
            server, because the engine also works for the pull.
        sent_s: fixed time to send the KV of a prompt; `sent_token_s` is added to it.
        sent_token_s: time per token of KV that is sent over the link.
        lookup_s: time to look up a prefix on another server, before KV is sent.
        stored_token_s: time per token of KV that is pulled from the host's store. The
            default assumes 40 GB/s, of the 64 GB/s of PCIe 5.0.
        block_tokens: tokens of a block of the prefix cache.
        capacity: tokens that fit in the KV cache.
        max_streams: maximum number of concurrent streams.
        step_tokens: maximum prompt tokens in one step.
        min_prompt_step_s: shortest time of a step with prompts. It is the time to
            launch the step's kernels one by one.
        min_prompt_share: least share of a decode step's duration that prompts may add
            to the step, as assumed by `Engine.queued_s`. It equals _MIN_PROMPT_SHARE of
            engine.core.budget.prefill_budget, which the simulated steps use.
        decode_slowdown: factors by which a step without prompts takes longer while 1,
            2, 3, .. servers run such steps; the last factor is also for larger numbers.
            The default is for servers that each have a device of their own.
        prompt_slowdown: like `decode_slowdown`, for steps with prompts.
        mixed_decode_slowdown: factors by which a step without prompts takes longer
            while 0, 1, 2, .. other servers run steps with prompts. If it is empty,
            `decode_slowdown` is used.
        mixed_prompt_slowdown: factors by which a step with prompts takes longer while
            0, 1, 2, .. other servers run steps without prompts. If it is empty,
            `prompt_slowdown` is used.
        shares_processors: whether the work outside of engines runs on the processors on
            which engines compute, as on a CPU. Such work then slows engines down like
            another server's step.
    """

    step_s: float = 4.15e-3
    sequence_s: float = 11e-6
    held_token_s: float = 31e-9
    token_s: float = 23.2e-6
    pair_s: float = 0.16e-9
    request_s: float = 0.0
    request_work_s: float = 0.0
    delivery_s: float = 0.0
    delivery_token_s: float = 0.0
    handoff_s: float = 4e-3
    handoff_work_s: float = 0.0
    handoff_step_s: float = 0.0
    sent_s: float = 0.0
    sent_token_s: float = 131072 / 200e9
    lookup_s: float = 5e-3
    stored_token_s: float = 131072 / 40e9
    capacity: int = 880_000
    max_streams: int = 256
    step_tokens: int = 8192
    min_prompt_step_s: float = 13e-3
    min_prompt_share: float = 0.25
    block_tokens: int = BLOCK_TOKENS
    decode_slowdown: Slowdowns = (1.0,)
    prompt_slowdown: Slowdowns = (1.0,)
    mixed_decode_slowdown: Slowdowns = ()
    mixed_prompt_slowdown: Slowdowns = ()
    shares_processors: bool = False

    @property
    def decode_contention(self) -> Contention:
        """The slowdown of steps without prompts."""
        mixed = self.mixed_decode_slowdown or self.decode_slowdown
        return Contention("decode", self.decode_slowdown, mixed)

    @property
    def prompt_contention(self) -> Contention:
        """The slowdown of steps with prompts."""
        mixed = self.mixed_prompt_slowdown or self.prompt_slowdown
        return Contention("prompt", self.prompt_slowdown, mixed)

    def seconds(self, load: step_times.Load) -> float:
        """Return the time of a step with this load, in seconds."""
        seconds = (
            self.step_s
            + load.streams * self.sequence_s
            + load.context_tokens * self.held_token_s
        )
        if not load.prompt_tokens:
            return seconds
        num_pairs = load.prompt_tokens * (load.prompt_start + load.prompt_tokens / 2)
        seconds += load.prompt_tokens * self.token_s + num_pairs * self.pair_s
        return max(seconds, self.min_prompt_step_s)


@cache
def measured_times(times: EngineTimes, target_s: float) -> StepTimes:
    """Return the step times that a server with `times` would measure at its start."""

    def time_step(load: step_times.Load, *, is_required: bool = False) -> float:
        return times.seconds(load)

    sizes = StepSizes(
        max_streams=times.max_streams,
        max_tokens=times.step_tokens,
        max_len=times.capacity,
        pool_tokens=times.capacity,
        target_s=target_s,
    )
    return measure(time_step, sizes)

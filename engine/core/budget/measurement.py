"""Chooses the steps that are measured. The durations of other steps are interpolated.

A "stream" is a sequence that decodes (Load in step_times.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from engine.core.budget.step_times import (
    Load,
    MixedTimes,
    Point,
    Polyline,
    StepTimes,
    StreamTimes,
    decode_s,
)

# Numbers of prompt tokens, in the order of their measurements. The most important ones
# come first, because the time for measurements may end before all are measured.
_FIRST_SIZES: Final = (16, 256, 1024)
_LATER_SIZES: Final = (512, 2048)
_STREAM_COUNTS: Final = (1, 8, 64)
_MAX_STREAMS: Final = 256  # durations with more streams are extrapolated
_SHORT_CONTEXT: Final = 16  # tokens of KV of each stream
_LONG_CONTEXT: Final = 32_768
_MAX_CONTEXT_TOKENS: Final = 262_144  # tokens of KV of all streams together
# Tokens of the prompt chunks that are measured after KV of earlier chunks.
_CHUNK_SIZES: Final = (256, 2048)
# Tokens of these earlier chunks; fewer if the limits of the engine require it.
_TOKENS_BEFORE_CHUNK: Final = 16_384
# Sizes near the target are measured more closely. The interval between the two measured
# sizes around the target is halved at most _REFINEMENTS times, and only while its width
# exceeds this share of its smaller size.
_REFINEMENTS: Final = 3
_SMALL_INTERVAL: Final = 0.125


class TimeStep(Protocol):
    """Runs a step and measures its duration."""

    def __call__(self, load: Load, *, is_required: bool = False) -> float | None:
        """Returns the duration of a step with this load, in seconds. Returns None if no
        time is left to measure the step, unless the step is required."""


@dataclass(frozen=True)
class StepSizes:
    """The limits of the steps that an engine may run.

    Attributes:
        max_streams: largest number of sequences of a step.
        max_tokens: largest number of tokens of a step.
        max_len: largest number of tokens of a sequence.
        pool_tokens: tokens of KV that the pool can hold for all sequences together.
        captured_tokens: largest number of tokens of a step with prompts that runs as
            CUDA graphs; 0 if none does. Durations jump above this number, because
            larger steps are slower to launch.
        target_s: target duration. Steps near the target are measured more closely.
    """

    max_streams: int
    max_tokens: int
    max_len: int
    pool_tokens: int
    captured_tokens: int = 0
    target_s: float = 0.0

    @property
    def max_measured_streams(self) -> int:
        """The largest measured number of streams. One sequence and half of the tokens
        of a step are left for prompts."""
        return max(1, min(self.max_streams - 1, self.max_tokens // 2, _MAX_STREAMS))

    def stream_load(self, count: int, context: int) -> Load:
        """The load of `count` streams. Each has `context` tokens of KV, or as many as
        fit if that is fewer."""
        longest = min(self.max_len - 1, self.pool_tokens // count)
        return Load(count, count * max(1, min(context, longest)), 0)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """The largest number of tokens that runs as CUDA graphs, and the next number;
        empty without CUDA graphs."""
        limit = self.captured_tokens
        return (limit, limit + 1) if limit else ()


def measure(time_step: TimeStep, sizes: StepSizes) -> StepTimes:
    """Measures steps of an engine, the most important ones first."""
    decode = _measure_streams(time_step, sizes)
    max_count = max(row.streams for row in decode)
    light = _MixedSteps(sizes.stream_load(1, _SHORT_CONTEXT))
    crowded = _MixedSteps(sizes.stream_load(max_count, _SHORT_CONTEXT))
    long = _MixedSteps(sizes.stream_load(max_count, _long_context(max_count)))
    additions = []
    if crowded.load.streams > light.load.streams:
        additions.append(crowded)
    if long.load.context_tokens > crowded.load.context_tokens:
        additions.append(long)
    chunks = _Chunks(light)
    light.measure(time_step, sizes, _FIRST_SIZES)
    chunks.measure(time_step, sizes, _CHUNK_SIZES[0])
    for mixture in additions:
        mixture.measure(time_step, sizes, _FIRST_SIZES)
    light.measure(time_step, sizes, _LATER_SIZES)
    chunks.measure(time_step, sizes, _CHUNK_SIZES[1])
    for mixture in additions:
        mixture.measure(time_step, sizes, _LATER_SIZES)
    light.measure(time_step, sizes, (sizes.max_tokens,))
    for _ in range(_REFINEMENTS):
        light.refine(time_step, sizes)
    light_times = light.times(decode)
    return StepTimes(
        decode,
        light_times,
        crowded=crowded.times(decode) if crowded.points else None,
        long=long.times(decode) if long.points else None,
        context=chunks.seconds_per_token(light_times.seconds),
    )


def _measure_streams(time_step: TimeStep, sizes: StepSizes) -> list[StreamTimes]:
    """Measures steps without prompts, for several numbers of streams, with short and
    with long contexts."""
    max_count = sizes.max_measured_streams
    counts = [*(count for count in _STREAM_COUNTS if count < max_count), max_count]
    points = dict[int, dict[int, Point]]()
    for get_context in (lambda count: _SHORT_CONTEXT, _long_context):
        for count in counts:
            load = sizes.stream_load(count, get_context(count))
            row = points.setdefault(count, {})
            # Extrapolation to more streams needs two numbers of streams, so the first
            # two are measured even if no time is left.
            is_required = len(points) <= 2 and not row
            seconds = time_step(load, is_required=is_required)
            if seconds is not None:
                row[load.context_tokens] = Point(load.context_tokens, seconds)
    return [
        StreamTimes(count, Polyline(row.values()))
        for count, row in points.items()
        if row
    ]


def _long_context(count: int) -> int:
    """How many tokens of KV each stream has if `count` streams have long contexts."""
    return min(_LONG_CONTEXT, _MAX_CONTEXT_TOKENS // count)


@dataclass
class _MixedSteps:
    """Steps that combine the same streams with different numbers of prompt tokens.

    Attributes:
        load: the load of the streams alone.
        points: the measured durations, by the number of all tokens of the step.
    """

    load: Load
    points: dict[int, Point] = field(default_factory=dict)

    def times(self, decode: Sequence[StreamTimes]) -> MixedTimes:
        streams, context_tokens, _, _ = self.load
        points = list(self.points.values())
        if len(points) == 1:
            # A line needs two points. The second is a step without prompt tokens.
            points.append(Point(streams, decode_s(decode, streams, context_tokens)))
        return MixedTimes(streams, context_tokens, Polyline(points))

    def measure(
        self, time_step: TimeStep, sizes: StepSizes, prompt_sizes: Sequence[int]
    ) -> None:
        """Measures steps with these numbers of prompt tokens, and the two steps on both
        sides of the limit of CUDA graphs."""
        streams = self.load.streams
        max_prompt_tokens = max(1, min(sizes.max_tokens - streams, sizes.max_len))
        for size in prompt_sizes:
            self._measure_one(time_step, min(size, max_prompt_tokens))
        for num_tokens in sizes.captured_sizes:
            if 0 < num_tokens - streams <= max_prompt_tokens:
                self._measure_one(time_step, num_tokens - streams)

    def _measure_one(self, time_step: TimeStep, prompt_tokens: int) -> None:
        load = self.load._replace(prompt_tokens=prompt_tokens)
        if load.tokens in self.points:
            return
        # A single stream with the fewest prompt tokens is always measured.
        is_required = not self.points and load.streams == 1
        seconds = time_step(load, is_required=is_required)
        if seconds is not None:
            self.points[load.tokens] = Point(load.tokens, seconds)

    def refine(self, time_step: TimeStep, sizes: StepSizes) -> None:
        """Measures the size halfway between the two measured sizes around the target:
        the largest size that meets the target, and the next larger size."""
        points = sorted(self.points.values())
        fitting = [
            index for index, point in enumerate(points) if point.value <= sizes.target_s
        ]
        if not fitting or fitting[-1] + 1 == len(points):
            return
        first = int(points[fitting[-1]].size)
        second = int(points[fitting[-1] + 1].size)
        if second - first > max(1.0, _SMALL_INTERVAL * first):
            self._measure_one(time_step, (first + second) // 2 - self.load.streams)


class _Chunks:
    """Measures the time that the KV before a prompt chunk adds to a step.

    Args:
        light: steps with few streams. Chunks are measured together with these streams.
    """

    def __init__(self, light: _MixedSteps) -> None:
        self._light = light
        self._measured: list[tuple[Load, float]] = []

    def measure(self, time_step: TimeStep, sizes: StepSizes, chunk: int) -> None:
        """Measures a step with a chunk of `chunk` tokens after KV of the same prompt.
        Does nothing if the limits do not allow at least `chunk` tokens of that KV."""
        load = self._light.load._replace(prompt_tokens=chunk)
        num_before = min(
            _TOKENS_BEFORE_CHUNK,
            sizes.max_len - chunk,
            sizes.pool_tokens - chunk - load.context_tokens,
        )
        if num_before < chunk or load.tokens > sizes.max_tokens:
            return
        load = load._replace(prompt_start=num_before)
        seconds = time_step(load)
        if seconds is not None:
            self._measured.append((load, seconds))

    def seconds_per_token(self, without_context: Polyline) -> Polyline | None:
        """Returns the seconds that each token of KV before a chunk adds to a step, as a
        function of the chunk's tokens. Returns None if no chunk was measured.

        Args:
            without_context: the durations of steps without KV before the chunk, as a
                function of the step's tokens.
        """
        points = []
        for load, seconds in self._measured:
            extra_s = max(0.0, seconds - without_context(load.tokens))
            points.append(Point(load.prompt_tokens, extra_s / load.prompt_start))
        return Polyline(points) if points else None

"""Measured durations of steps, and interpolation between them.

A "stream" is a sequence that decodes. Steps without prompts run as CUDA graphs, while
steps with prompts often launch each kernel separately, so the two kinds are measured
separately. Steps with prompts and one stream are measured for many numbers of prompt
tokens. Steps with prompts and many streams are measured for few numbers of prompt
tokens, once with short and once with long contexts. The time that more streams or
longer contexts add is interpolated between these measurements. If an earlier step has
computed a part of a prompt, each KV token of that part adds a measured time.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Load(NamedTuple):
    """The work of one step.

    Attributes:
        streams: sequences that compute one token after their prompt.
        context_tokens: tokens of KV that all streams together read.
        prompt_tokens: tokens of prompts that the step computes.
        prompt_start: index of the first prompt token that the step computes, which is
            the number of tokens of KV before it. With several prompts, the mean of
            their indices, weighted by tokens.
    """

    streams: int
    context_tokens: int
    prompt_tokens: int
    prompt_start: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.streams + self.prompt_tokens


class Point(NamedTuple):
    """A measured value at a measured size."""

    size: float
    value: float


class Polyline:
    """A function that is linear between points.

    Args:
        points: at least one, in any order, with different sizes.
        is_extended: whether the function continues beyond the points. Before the first
            point, the first line continues. After the last point, the slope is that
            from the first point to the last: the last line alone may be a jump.
            Otherwise the function is constant there.
    """

    def __init__(self, points: Iterable[Point], *, is_extended: bool = True) -> None:
        self.points = tuple(sorted(points))
        self._is_extended = is_extended
        self._sizes = [point.size for point in self.points]

    def __call__(self, size: float) -> float:
        points = self.points
        if len(points) == 1:
            return points[0].value
        if not self._is_extended:
            size = min(max(size, points[0].size), points[-1].size)
        index = bisect_right(self._sizes, size)
        if index == len(points):
            first = points[0]
            last = points[-1]
            slope = (last.value - first.value) / (last.size - first.size)
            return last.value + slope * (size - last.size)
        index = max(index, 1)
        return _on_line(points[index - 1], points[index], size)


def _on_line(first: Point, second: Point, size: float) -> float:
    share = (size - first.size) / (second.size - first.size)
    return first.value + share * (second.value - first.value)


@dataclass(frozen=True)
class StreamTimes:
    """Durations of steps with a number of streams and no prompts, in seconds.

    Attributes:
        seconds: the durations, by the tokens of KV that all streams together read.
    """

    streams: int
    seconds: Polyline


@dataclass(frozen=True)
class MixedTimes:
    """Durations of steps with prompts and one fixed load of streams, in seconds.

    Attributes:
        streams: sequences that decode.
        context_tokens: tokens of KV that all these streams together read.
        seconds: the durations, by the number of all tokens of the step, including those
            of the streams.
    """

    streams: int
    context_tokens: int
    seconds: Polyline


def decode_s(times: Iterable[StreamTimes], streams: int, context_tokens: int) -> float:
    """The duration in seconds of a step with these streams and no prompts, interpolated
    from `times`."""
    points = [Point(row.streams, row.seconds(context_tokens)) for row in times]
    return max(0.0, Polyline(points)(streams))


class StepTimes:
    """The measured durations of one engine's steps.

    Args:
        decode: steps without prompts, for different numbers of streams; at least one.
        light: steps with prompts and few streams with short contexts.
        crowded: steps with prompts and more streams than `light`, with short contexts;
            None if not measured.
        long: steps with prompts and as many streams as `crowded` (as `light` if
            `crowded` is None), with longer contexts; None if not measured.
        context: seconds that each token of KV before a prompt chunk adds to a step, as
            a function of the prompt tokens of the step. None: KV adds no time.
    """

    def __init__(
        self,
        decode: Sequence[StreamTimes],
        light: MixedTimes,
        *,
        crowded: MixedTimes | None = None,
        long: MixedTimes | None = None,
        context: Polyline | None = None,
    ) -> None:
        self._decode = tuple(decode)
        self._light = light
        self._crowded = _Addition(light, crowded) if crowded is not None else None
        self._long = _Addition(crowded or light, long) if long is not None else None
        self._context = context
        self._knots = self._make_knots()

    def _make_knots(self) -> "list[_Knot]":
        """The durations of the measured sizes, largest size first. Between these sizes,
        durations are linear."""
        sizes = {point.size for point in self._light.seconds.points}
        for addition in (self._crowded, self._long):
            if addition is not None:
                sizes.update(point.size for point in addition.seconds.points)
        return [self._knot(int(size)) for size in sorted(sizes, reverse=True)]

    def _knot(self, tokens: int) -> "_Knot":
        crowded_s = self._crowded.seconds(tokens) if self._crowded is not None else 0.0
        long_s = self._long.seconds(tokens) if self._long is not None else 0.0
        light_s = self._light.seconds(tokens)
        return _Knot(tokens, max(0.0, light_s), crowded_s, max(0.0, long_s))

    def seconds(self, load: Load) -> float:
        """The duration of a step."""
        if not load.prompt_tokens:
            return self.decode_s(load.streams, load.context_tokens)
        seconds = self._knot(load.tokens).seconds(*self._shares(load))
        return seconds + self._context_s(load.prompt_start, load.prompt_tokens)

    def _shares(self, load: Load) -> tuple[float, float]:
        """The factors for the times that `_crowded` and `_long` add, in a step with
        this load."""
        light = self._light
        short_context = float(light.context_tokens)
        crowded_share = 0.0
        if self._crowded is not None:
            crowded_share = load.streams - light.streams
            crowded_share /= self._crowded.more_streams
            short_context += crowded_share * self._crowded.more_context_tokens
        if self._long is None:
            return crowded_share, 0.0
        more_context_tokens = load.context_tokens - short_context
        long_share = more_context_tokens / self._long.more_context_tokens
        return crowded_share, max(0.0, long_share)

    def _context_s(self, prompt_start: float, prompt_tokens: int) -> float:
        """The seconds that the KV before the prompts adds to a step."""
        if self._context is None or not prompt_start:
            return 0.0
        return prompt_start * max(0.0, self._context(prompt_tokens))

    def decode_s(self, streams: int, context_tokens: int) -> float:
        """The duration of a step with these streams and no prompts."""
        return decode_s(self._decode, streams, context_tokens)

    def max_prompt_tokens(self, load: Load, limit_s: float) -> int:
        """The most prompt tokens with which a step takes at most `limit_s`.

        Args:
            load: the step with the largest allowed number of prompt tokens.

        Returns:
            0 if even a step with one prompt token takes longer than `limit_s`.
        """
        above = Point(load.prompt_tokens, self.seconds(load))
        if above.value <= limit_s:
            return load.prompt_tokens
        shares = self._shares(load)
        for knot in (*self._knots, self._knot(load.streams + 1)):
            size = knot.tokens - load.streams
            if not 0 < size < above.size:
                continue
            seconds = knot.seconds(*shares) + self._context_s(load.prompt_start, size)
            if seconds <= limit_s:
                share = (limit_s - seconds) / (above.value - seconds)
                return int(size + share * (above.size - size))
            above = Point(size, seconds)
        return 0


class _Knot(NamedTuple):
    """The durations of steps of one size. `light_s` is the duration with prompts and
    few streams; `crowded_s` and `long_s` are the times that more streams and longer
    contexts add."""

    tokens: int
    light_s: float
    crowded_s: float
    long_s: float

    def seconds(self, crowded_share: float, long_share: float) -> float:
        seconds = self.light_s
        seconds += crowded_share * self.crowded_s
        seconds += long_share * self.long_s
        return max(0.0, seconds)


class _Addition:
    """The time that more streams or longer contexts add to steps with prompts.

    Attributes:
        more_streams, more_context_tokens: how many more streams and more tokens of
            their KV the steps `more` have than the steps `less`.
        seconds: the added seconds, as a function of all tokens of the step.
    """

    def __init__(self, less: MixedTimes, more: MixedTimes) -> None:
        self.more_streams = more.streams - less.streams
        self.more_context_tokens = more.context_tokens - less.context_tokens
        # The difference of two measurements is not extrapolated beyond the points,
        # because that would magnify the errors of both.
        self.seconds = Polyline(
            [
                Point(point.size, point.value - less.seconds(point.size))
                for point in more.seconds.points
            ],
            is_extended=False,
        )

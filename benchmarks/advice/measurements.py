"""Single measurements with real servers: steps, prompts, hand-overs, processor time."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.advice.client import Client, ClosedLoop, probe_s
from benchmarks.advice.processors import typical_s
from benchmarks.advice.saturation import USUAL_STEP_TOKENS
from benchmarks.bench.endpoint import Timeline
from benchmarks.bench.errors import BenchError

SHORT_PROMPT = 16
# The load of each server while the slowdown of several servers is measured: this number
# of streams, or prompts of this length (tokens, for steps of USUAL_STEP_TOKENS).
SHARED_STREAMS = 4
_SHARED_PROMPT = 256
_PROMPTS_IN_FLIGHT = 2  # per server, so that its engine does not wait for requests
_SHARED_PROMPTS = 8  # per server
_DECODE_TOKENS = 32
# Mixed measurements decode answers of this many tokens on some servers while other
# servers compute prompts. Several prompts usually end during one such answer.
_MIXED_TOKENS = 160
# The prompt lengths are for steps of USUAL_STEP_TOKENS prompt tokens, as on a CPU. If
# steps are larger by a factor, as on a GPU, prompts are longer by the same factor.
_PROMPT_LENGTHS = (32, 128, 512, 1536)
_LONG_CONTEXT = 1024
_REPEATS = 5
# Number of requests with which processor time is measured, and of those in flight.
_WORK_REQUESTS = 24
_WORK_IN_FLIGHT = 4
_WORK_STEPS = 4  # additional steps, to measure the processor time of a step


class Measurements:
    """Measures times and processor times through proxies.

    Args:
        max_model_len: longest prompt and answer of the model together (tokens).
        pids: processes of the measured servers and proxies.
        step_tokens: maximum prompt tokens of a step.

    Attributes:
        lengths: lengths of prompts to measure, in ascending order; at least two.
        long_context: prompt tokens of streams with a long context.
    """

    def __init__(
        self, max_model_len: int, pids: Sequence[int], step_tokens: int
    ) -> None:
        self._pids = pids
        self._seed = int(time.time())  # so that earlier runs have cached no prompt
        scale = max(1, step_tokens // USUAL_STEP_TOKENS)
        limit = max_model_len - _DECODE_TOKENS
        if limit < scale * _PROMPT_LENGTHS[1]:
            raise BenchError(
                f"the model takes {limit + _DECODE_TOKENS} tokens, too few to measure "
                "prompts; its context must have "
                f"{scale * _PROMPT_LENGTHS[1] + _DECODE_TOKENS} or more"
            )
        lengths = [scale * length for length in _PROMPT_LENGTHS]
        self.lengths = [length for length in lengths if length <= limit]
        self._shared_length = min(scale * _SHARED_PROMPT, self.lengths[-1])
        self.long_context = min(scale * _LONG_CONTEXT, limit // 2)

    @property
    def handoff_lengths(self) -> tuple[int, int]:
        """The two prompt lengths with which hand-overs are measured.

        The shortest length is left out if there are two longer ones, because the
        transfer of a short prompt takes little time.
        """
        return self.lengths[min(1, len(self.lengths) - 2)], self.lengths[-1]

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    async def decode_s(
        self, clients: Sequence[Client], streams: int, prompt_tokens: int
    ) -> float:
        """Return the mean duration of steps while each server has `streams` streams."""
        return await self._typical(
            lambda: self._decode_once_s(clients, streams, prompt_tokens)
        )

    async def _decode_once_s(
        self, clients: Sequence[Client], streams: int, prompt_tokens: int
    ) -> float:
        """Return the mean duration of the steps in which all streams generate."""
        requests = [
            client.send(prompt_tokens, _DECODE_TOKENS, self._next_seed())
            for client in clients
            for _ in range(streams)
        ]
        return _mean_step_s(await asyncio.gather(*requests))

    async def prompt_s(self, client: Client, num_tokens: int) -> float:
        """Return the time to first token on an idle server."""

        async def once() -> float:
            timeline = await client.send(num_tokens, 1, self._next_seed())
            return timeline.ttft_s

        return await self._typical(once)

    async def shared_prompt_s(self, clients: Sequence[Client]) -> float:
        """Return the time per prompt while all servers compute prompts continuously."""

        async def once() -> float:
            runs = [
                self._send_prompts(
                    client, _SHARED_PROMPTS, _PROMPTS_IN_FLIGHT, self._shared_length
                )
                for client in clients
            ]
            elapsed_s = await asyncio.gather(*runs)
            return statistics.mean(elapsed_s) / _SHARED_PROMPTS

        return await self._typical(once)

    async def mixed_decode_s(self, client: Client, others: Sequence[Client]) -> float:
        """Return the mean duration of a server's decode steps with SHARED_STREAMS
        streams, while the servers of `others` compute prompts.
        """

        async def once() -> float:
            decode_s, _ = await self._mixed_once_s(others, [client])
            return decode_s

        return await self._typical(once)

    async def mixed_prompt_s(self, client: Client, others: Sequence[Client]) -> float:
        """Return the time per prompt of a server, while each server of `others` decodes
        SHARED_STREAMS streams.
        """

        async def once() -> float:
            _, prompt_s = await self._mixed_once_s([client], others)
            return prompt_s

        return await self._typical(once)

    async def _mixed_once_s(
        self, prompt_clients: Sequence[Client], decode_clients: Sequence[Client]
    ) -> tuple[float, float]:
        """Return the mean duration of decode steps, and the time per prompt, while some
        servers decode and other servers compute prompts.
        """
        streams = [
            client.send(SHORT_PROMPT, _MIXED_TOKENS, self._next_seed())
            for client in decode_clients
            for _ in range(SHARED_STREAMS)
        ]
        answers = asyncio.gather(*streams)
        loops = [
            self._prompt_ends(client, answers)
            for client in prompt_clients
            for _ in range(_PROMPTS_IN_FLIGHT)
        ]
        ends = list(itertools.chain.from_iterable(await asyncio.gather(*loops)))
        timelines = await answers
        begin = max(timeline.token_at[0] for timeline in timelines)
        end = min(timeline.token_at[-1] for timeline in timelines)
        overlapping = sorted(at for at in ends if begin <= at <= end)
        if len(overlapping) < 2:  # a prompt takes longer than an answer
            overlapping = sorted(ends)
        elapsed_s = overlapping[-1] - overlapping[0]
        prompt_s = elapsed_s * len(prompt_clients) / (len(overlapping) - 1)
        return _mean_step_s(timelines), prompt_s

    async def _prompt_ends(
        self, client: Client, until: asyncio.Future[list[Timeline]]
    ) -> list[float]:
        """Send prompts one after another. Return the times of their first tokens.

        Args:
            until: a future. When it is done, no further prompt is sent. At least two
                prompts are sent in any case.
        """
        ends: list[float] = []
        while len(ends) < 2 or not until.done():
            timeline = await client.send(self._shared_length, 1, self._next_seed())
            ends.append(timeline.token_at[0])
        return ends

    async def request_work_s(self, client: Client, num_outputs: int = 1) -> float:
        """Return the processor time that a request with a short prompt needs outside of
        engines.
        """

        async def once() -> float:
            before_s = client.work_s()
            await self._send_prompts(
                client, _WORK_REQUESTS, _WORK_IN_FLIGHT, self.lengths[1], num_outputs
            )
            return (client.work_s() - before_s) / _WORK_REQUESTS

        return await self._typical(once)

    async def handoff_step_s(self, pair: Client) -> float:
        """Return the processor time of `Client.engine_pids` for a hand-over, without
        that of the step that generates the second token.
        """

        async def once() -> float:
            work_s = []
            for num_outputs in (2, 2 + _WORK_STEPS):
                before_s = pair.engine_work_s()
                await self._send_prompts(
                    pair, _WORK_REQUESTS, 1, self.lengths[1], num_outputs
                )
                work_s.append((pair.engine_work_s() - before_s) / _WORK_REQUESTS)
            # A step is measured in processor time as well, because an engine with
            # several threads needs more of it than the step lasts.
            step_s = (work_s[1] - work_s[0]) / _WORK_STEPS
            return max(work_s[0] - step_s, 0.0)

        return await self._typical(once)

    async def _typical(self, run: Callable[[], Awaitable[float]]) -> float:
        return await typical_s(self._pids, run)

    async def delivery_work_s(self, client: Client, streams: int) -> float:
        """Return the processor time to deliver the tokens of a step.

        The result is the additional processor time of requests with many output tokens,
        compared with requests with one output token, divided by the additional steps.
        """

        async def once() -> float:
            work_s = []
            for num_outputs in (1, _DECODE_TOKENS):
                before_s = client.work_s()
                requests = [
                    client.send(SHORT_PROMPT, num_outputs, self._next_seed())
                    for _ in range(streams)
                ]
                await asyncio.gather(*requests)
                work_s.append(client.work_s() - before_s)
            return (work_s[1] - work_s[0]) / (_DECODE_TOKENS - 1)

        return await self._typical(once)

    async def _send_prompts(
        self,
        client: Client,
        count: int,
        in_flight: int,
        num_tokens: int,
        num_outputs: int = 1,
    ) -> float:
        """Send prompts, at most `in_flight` concurrently. Return the total seconds."""
        loop = ClosedLoop(num_tokens, num_outputs, count, in_flight)
        seed = self._seed
        self._seed += count
        return await client.send_loop(loop, seed)

    async def handoff_delays_s(
        self, single: Client, pair: Client, length: int
    ) -> tuple[float, float]:
        """Return the delays (s) that a hand-over adds before the first token, and
        between the first and the second token.

        Args:
            single: client of a server that computes prompts itself.
            pair: client of a prefill server and a decode server.
        """
        extra_s = []
        gaps_s = []
        await pair.send(length, 4, self._next_seed())  # connects the two servers
        for _ in range(_REPEATS):
            unpaired = await single.send(length, 4, self._next_seed())
            paired = await pair.send(length, 4, self._next_seed())
            extra_s.append(paired.ttft_s - unpaired.ttft_s)
            # There is no gap if all tokens of an answer arrived in one event.
            if paired.gaps_s and unpaired.gaps_s:
                gaps_s.append(paired.gaps_s[0] - unpaired.gaps_s[0])
        return statistics.median(extra_s), statistics.median(gaps_s or [0.0])

    async def probe_s(self, client: Client) -> float:
        """Run the probe, and return its seconds."""
        return await probe_s(client, self._next_seed())


def _mean_step_s(timelines: Sequence[Timeline]) -> float:
    """Return the mean duration of the steps in which all streams generate."""
    # An answer counts from its second event, or from its only event if it has one.
    begin = max(timeline.token_at[:2][-1] for timeline in timelines)
    end = min(timeline.token_at[-1] for timeline in timelines)
    means = []
    for timeline in timelines:
        times = [at for at in timeline.token_at if begin <= at <= end]
        if len(times) > 1:
            means.append((times[-1] - times[0]) / (len(times) - 1))
    if not means:
        # The streams did not overlap, because prompts took longer than answers.
        means = [timeline.mean_itl_s for timeline in timelines]
    return statistics.mean(means)


def mean_context(streams: int, prompt_tokens: int) -> float:
    """Return how many tokens of KV all streams of a server have together, as the mean
    over a measurement of `decode_s`.
    """
    return streams * (prompt_tokens + _DECODE_TOKENS / 2)

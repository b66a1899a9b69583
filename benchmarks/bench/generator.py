"""Sends a load to one or several sides at the same time.

A side is one endpoint, or several endpoints that get the requests round-robin. Every
side gets the same sessions at the same times. In an open loop, a session is due at its
arrival time, whether or not earlier sessions have ended. If a request is sent late, its
latencies still count from its due time. In a closed loop, `concurrency` sessions are
always in flight.
"""

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.bench.client_lag import measured_loop_lag
from benchmarks.bench.endpoint import Timeline, find_model, open_session, stream
from benchmarks.bench.errors import BenchError
from benchmarks.bench.prompts import Answer, BodyOptions, PromptMaker
from benchmarks.bench.scrape import increases, scrape_all
from benchmarks.bench.workload import Session, Workload

# Values of `owned_by` in /v1/models of servers that return token ids on request.
TOKEN_ID_OWNERS = ("baton", "vllm")


@dataclass(frozen=True)
class Side:
    """Endpoints that share one load.

    Attributes:
        name: name of the side in the report.
        urls: the endpoints, to which requests are sent round-robin.
        metrics_urls: further servers of this side, to read their /metrics.
    """

    name: str
    urls: tuple[str, ...]
    metrics_urls: tuple[str, ...] = ()

    @property
    def scraped_urls(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.urls, *self.metrics_urls)))


@dataclass(frozen=True)
class LoadOptions:
    """The options with which a load is sent.

    Attributes:
        model: name of the model; None: the first model of each endpoint.
        concurrency: maximum number of sessions in flight.
        warmup: number of requests to each endpoint before the measurement.
        duration_s: no request is sent later than this after the start.
        drain_s: longest time from the last arrival until the last requests finish. In
            closed loops and conversations, this time begins after `duration_s`.
        timeout_s: longest time without data from an endpoint.
    """

    body: BodyOptions
    concurrency: int
    model: str | None = None
    api_key: str | None = None
    warmup: int = 1
    duration_s: float = 600.0
    drain_s: float = 120.0
    timeout_s: float = 120.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.body.is_chat else "/v1/completions"


@dataclass
class RequestRecord:
    """One request of a side.

    Attributes:
        index: number of the request in the workload; equal on all sides.
    """

    index: int
    session: int
    turn: int
    url: str
    timeline: Timeline


@dataclass
class SideResult:
    """The result of one side.

    Attributes:
        skipped: number of requests that were not sent: turns after a failed turn, and
            turns that were due after the end of the duration.
        counters: the increase of each counter of /metrics during the run, by URL and by
            name.
    """

    side: Side
    model: str
    records: list[RequestRecord]
    elapsed_s: float
    skipped: int = 0
    counters: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """The results of all sides of a run.

    Attributes:
        started_at: `time.perf_counter` at the start. Arrival times count from it.
        loop_lags_s: lags of this program's event loop; see `measured_loop_lag`.
    """

    sides: list[SideResult]
    started_at: float
    loop_lags_s: list[float]


@dataclass(frozen=True)
class _Endpoint:
    url: str
    session: aiohttp.ClientSession
    model: str
    returns_token_ids: bool


class _SideRun:
    """Sends the load to one side."""

    def __init__(
        self,
        side: Side,
        endpoints: Sequence[_Endpoint],
        workload: Workload,
        prompts: PromptMaker,
        options: LoadOptions,
        on_end: Callable[[Timeline], None],
    ) -> None:
        self.side = side
        self.endpoints = endpoints
        self.records: list[RequestRecord] = []
        self.skipped = 0
        self.last_end_at = 0.0
        self._workload = workload
        self._prompts = prompts
        self._options = options
        self._on_end = on_end
        self._turn_counter = itertools.count()
        counts = (len(session.turns) for session in workload.sessions)
        self._first_index = list(itertools.accumulate(counts, initial=0))

    async def warm_up(self) -> None:
        """Send the warm-up requests to each endpoint, one after the other.

        Raises:
            BenchError: a warm-up request failed.
        """
        for endpoint in self.endpoints:
            for number in range(self._options.warmup):
                body = self._prompts.warmup_body(
                    number,
                    model=endpoint.model,
                    returns_token_ids=endpoint.returns_token_ids,
                )
                timeline = Timeline(time.perf_counter())
                await stream(endpoint.session, self._options.path, body, timeline)
                if not timeline.succeeded:
                    raise BenchError(
                        f"a warm-up request to {endpoint.url} failed: {timeline.error}"
                    )

    async def run(self, started_at: float) -> None:
        """Send all sessions. Cancel those that have not ended within `drain_s`."""
        sessions = self._workload.sessions
        if self._workload.is_closed:
            numbers = iter(range(len(sessions)))
            coroutines = [
                self._run_in_turn(numbers, started_at)
                for _ in range(min(self._options.concurrency, len(sessions)))
            ]
        else:
            slots = asyncio.Semaphore(self._options.concurrency)
            coroutines = [
                self._run_at_arrival(index, slots, started_at)
                for index in range(len(sessions))
            ]
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        _, pending = await asyncio.wait(
            tasks, timeout=self._last_start_s() + self._options.drain_s
        )
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks)
        self.last_end_at = max(
            (record.timeline.ended_at for record in self.records), default=started_at
        )
        self.records.sort(key=lambda record: record.index)

    def _last_start_s(self) -> float:
        """Return the latest time at which a request may be sent (s from the start)."""
        sessions = self._workload.sessions
        has_turns = any(len(session.turns) > 1 for session in sessions)
        if self._workload.is_closed or has_turns:
            return self._options.duration_s
        return min(self._options.duration_s, sessions[-1].arrival_s)

    async def _run_in_turn(self, numbers: Iterator[int], started_at: float) -> None:
        for index in numbers:
            await self._run_session(index, None, started_at)

    async def _run_at_arrival(
        self, index: int, slots: asyncio.Semaphore, started_at: float
    ) -> None:
        due_at = started_at + self._workload.sessions[index].arrival_s
        try:
            await asyncio.sleep(due_at - time.perf_counter())
            async with slots:
                await self._run_session(index, due_at, started_at)
        except asyncio.CancelledError:
            if not any(record.session == index for record in self.records):
                timeline = Timeline(due_at, error="not sent within --drain-s")
                timeline.ended_at = time.perf_counter()
                self._record(index, 0, "", timeline)

    async def _run_session(
        self, index: int, due_at: float | None, started_at: float
    ) -> None:
        """Send the turns of a session, one after the other.

        Args:
            due_at: time at which the first turn is due; None: now.
        """
        session = self._workload.sessions[index]
        end_at = started_at + self._options.duration_s
        answers: list[Answer] = []
        for number, turn in enumerate(session.turns):
            if due_at is None:
                due_at = time.perf_counter()
            if number:
                due_at += turn.think_s
                await asyncio.sleep(due_at - time.perf_counter())
            if due_at > end_at:
                self.skipped += len(session.turns) - number
                return
            timeline = await self._send(session, index, number, answers, due_at)
            if not timeline.succeeded:
                self.skipped += len(session.turns) - number - 1
                return
            answer = Answer("".join(timeline.text), tuple(timeline.token_ids))
            answers.append(answer)
            due_at = timeline.ended_at

    async def _send(
        self,
        session: Session,
        index: int,
        number: int,
        answers: Sequence[Answer],
        due_at: float,
    ) -> Timeline:
        endpoint = self.endpoints[next(self._turn_counter) % len(self.endpoints)]
        body = self._prompts.body(
            index,
            number,
            answers,
            model=endpoint.model,
            returns_token_ids=endpoint.returns_token_ids,
        )
        timeline = Timeline(due_at, keeps_answer=number + 1 < len(session.turns))
        try:
            await stream(endpoint.session, self._options.path, body, timeline)
        except asyncio.CancelledError:
            timeline.error = "did not finish within --drain-s"
            timeline.ended_at = time.perf_counter()
        self._record(index, number, endpoint.url, timeline)
        return timeline

    def _record(self, index: int, number: int, url: str, timeline: Timeline) -> None:
        request_index = self._first_index[index] + number
        self.records.append(RequestRecord(request_index, index, number, url, timeline))
        self._on_end(timeline)


async def run_load(
    sides: Sequence[Side],
    workload: Workload,
    options: LoadOptions,
    on_end: Callable[[Timeline], None] = lambda timeline: None,
) -> RunResult:
    """Send the workload to all sides at the same time.

    Args:
        on_end: called when a request of any side has ended.

    Raises:
        BenchError: an endpoint does not answer or does not serve the model, or a
            warm-up request failed.
    """
    async with AsyncExitStack() as stack:
        endpoints = [
            [await _connect(stack, url, options) for url in side.urls] for side in sides
        ]
        prompts = PromptMaker(workload, options.body)
        runs = [
            _SideRun(side, side_endpoints, workload, prompts, options, on_end)
            for side, side_endpoints in zip(sides, endpoints, strict=True)
        ]
        for run in runs:
            await run.warm_up()
        urls = [url for side in sides for url in side.scraped_urls]
        before = await scrape_all(urls, options.api_key)
        # A garbage collection that scans the prompts would lengthen the latencies, so
        # existing objects are excluded from it.
        gc.collect()
        gc.freeze()
        async with measured_loop_lag() as loop_lags_s:
            started_at = time.perf_counter()
            await asyncio.gather(*(run.run(started_at) for run in runs))
        gc.unfreeze()
        after = await scrape_all(urls, options.api_key)
    grown = {url: increases(before[url], after[url]) for url in urls}
    results = [
        SideResult(
            side=run.side,
            model=run.endpoints[0].model,
            records=run.records,
            elapsed_s=run.last_end_at - started_at,
            skipped=run.skipped,
            counters={url: grown[url] for url in run.side.scraped_urls},
        )
        for run in runs
    ]
    return RunResult(results, started_at, loop_lags_s)


async def _connect(stack: AsyncExitStack, url: str, options: LoadOptions) -> _Endpoint:
    session = await stack.enter_async_context(
        open_session(url, options.timeout_s, options.api_key)
    )
    entry: dict[str, Any] = await find_model(session, url, options.model)
    return _Endpoint(
        url=url,
        session=session,
        model=str(entry["id"]),
        returns_token_ids=entry.get("owned_by") in TOKEN_ID_OWNERS,
    )

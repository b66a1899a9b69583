"""The HTTP process's client of the engine. Sends requests, and receives tokens.

    submit([AddRequest, ...]) -> Subscription -> batches of TokenDeltas

Each choice ends with one terminal delta. One subscription serves all prompts of a call,
so the prompts do not need a task each. Use all objects on one event loop.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Sequence

from protocol.errors import BatonError, ClientTooSlow, EngineDied, NoServerAvailable
from protocol.http.admission import Admission, QueueEntry
from protocol.ipc.wire import framed
from protocol.messages import (
    MOVED,
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineInput,
    EngineOutput,
    EngineProgress,
    EngineReady,
    EngineStats,
    ErrorInfo,
    HostTierReport,
    Migrate,
    Outputs,
    TokenDelta,
    decode_output,
    encode,
)
from protocol.process.logging import get_logger
from protocol.settings.server_options import QueueOptions

log = get_logger(__name__)

# Keys of EngineClient.stats.
LEASES = "baton_leases_held"
OFFERS = "baton_host_kv_demotions_pending"
LEASES_POLL_INTERVAL_S = 0.02
# Seconds within which an engine reports the leases of a request that has migrated.
_SETTLE_S = 0.5
# Maximum number of unread tokens of a call per choice. If a client leaves more unread,
# the call fails with ClientTooSlow. Alternatives in logprobs count as tokens. This many
# tokens take some megabytes.
MAX_UNREAD = 1 << 14
MAX_UNREAD_CHOICES = 32  # choices beyond this number do not raise a call's limit


class Subscription:
    """Receives the deltas of the requests of one call, in batches.

    Closing the subscription aborts the requests that have not ended.

    Args:
        requests: the requests, all of one call.
        queue_entry: the entry of these requests in the waiting queue; None if they were
            not queued.
    """

    def __init__(
        self,
        engine: "EngineClient",
        requests: Iterable[AddRequest],
        queue_entry: QueueEntry | None,
    ) -> None:
        self._engine = engine
        self._queue_entry = queue_entry
        requests = tuple(requests)
        # For each request id, the number of choices without a terminal delta.
        self._num_open_choices: dict[str, int] = {}
        for request in requests:
            num_ended = sum(choice.has_ended for choice in request.resumed_choices)
            self._num_open_choices[request.request_id] = request.num_choices - num_ended
        num_choices = min(sum(self._num_open_choices.values()), MAX_UNREAD_CHOICES)
        self._max_unread = MAX_UNREAD * num_choices
        # Ids of the requests that retain their KV until the client has received the
        # response that refers to the KV.
        self._retaining = [
            request.request_id for request in requests if request.retain_kv
        ]
        self._pending: list[TokenDelta] = []
        self._num_unread = 0  # pending deltas, plus the alternatives in their logprobs
        self._has_news = asyncio.Event()

    async def next_batch(self) -> list[TokenDelta]:
        """Wait for deltas. An empty batch means that all requests have ended."""
        if not self._pending and self._num_open_choices:
            self._has_news.clear()
            await self._has_news.wait()
        batch = self._pending
        self._pending = []
        self._num_unread = 0
        return batch

    async def wait_for_news(self, timeout_s: float) -> bool:
        """Wait until `next_batch` has a result. Return False after `timeout_s`."""
        if not self._pending and self._num_open_choices:
            self._has_news.clear()
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, self._has_news.set)
            try:
                await self._has_news.wait()
            finally:
                timer.cancel()
        return bool(self._pending) or not self._num_open_choices

    def deliver(self, delta: TokenDelta) -> None:
        """Add a delta of an open request. EngineClient calls this method.

        Fails the requests if the client leaves too many tokens unread.
        """
        if self._queue_entry is not None:
            _update_queue(self._queue_entry, delta)
        self._pending.append(delta)
        num_alternatives = sum(len(top.top_ids) for top in delta.logprobs or ())
        self._num_unread += 1 + num_alternatives
        self._num_open_choices[delta.request_id] -= delta.finish_reason is not None
        if delta.finish_reason == MOVED:
            self._retaining.append(delta.request_id)
        has_ended = not self._num_open_choices[delta.request_id]
        if delta.error is not None or has_ended:  # an error ends all choices
            del self._num_open_choices[delta.request_id]
        self._has_news.set()
        if self._num_unread > self._max_unread:
            self.fail(
                ClientTooSlow(
                    f"{self._num_unread} tokens and likely alternatives were not read "
                    "in time; read the stream as it arrives"
                )
            )

    def on_grammar_compiled(self, request_id: str) -> None:
        """Record that a request has its compiled grammar, and now waits for a token.

        EngineClient calls this method.
        """
        if self._queue_entry is not None:
            self._queue_entry.enqueue(request_id)

    def is_open(self, request_id: str) -> bool:
        """Whether more deltas of a request may arrive."""
        return request_id in self._num_open_choices

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Send the engine an abort of a request, or of one of its choices.

        Each aborted choice still gets a delta with the finish reason "abort".
        """
        if request_id in self._num_open_choices:
            self._engine.send(AbortRequest(request_id, choice))

    def allow_migration(
        self, may_move: Callable[[], bool], *, is_resumed: bool
    ) -> None:
        """Allow the call's only request to migrate while `may_move` returns True.

        During a hand-over (EngineClient.hand_over), the request migrates at once.

        Args:
            is_resumed: whether the request has just migrated to this server. Then it
                does not migrate in a hand-over, because no other server accepted it.
        """
        if is_resumed and self._engine.is_handing_over:
            return
        if request_id := next(iter(self._num_open_choices), None):
            self._engine.movable[request_id] = may_move
            if self._engine.is_handing_over:
                self._engine.migrate()

    def fail_at(self, time_s: float, error: BatonError) -> Callable[[], None]:
        """Fail the open requests at a time of the loop's clock.

        Returns a function that cancels the timer.
        """
        return asyncio.get_running_loop().call_at(time_s, self.fail, error).cancel

    def fail(self, error: BatonError) -> None:
        """End every request with `error`, and abort the requests in the engine.

        The error replaces the deltas that were not read.
        """
        if self._num_open_choices:
            request_id = next(iter(self._num_open_choices))
            self.close()
            self._pending.append(
                TokenDelta(request_id=request_id, error=ErrorInfo.from_error(error))
            )
            self._has_news.set()

    def confirm_delivery(self) -> None:
        """Let the engine keep the retained KV, because the client has received the
        response that refers to this KV."""
        self._retaining.clear()

    def close(self) -> None:
        """Forget every request, abort open ones, and release retained KV.

        KV stays retained only after `confirm_delivery`. Idempotent.
        """
        for request_id in dict.fromkeys([*self._num_open_choices, *self._retaining]):
            self._engine.forget(request_id)
            self._engine.send(AbortRequest(request_id))
        self._num_open_choices.clear()
        self._retaining.clear()
        self._pending.clear()


def _update_queue(queue_entry: QueueEntry, delta: TokenDelta) -> None:
    """Remove a prompt from the queue at its first token or its end.

    The prompt's logprobs may arrive earlier, in pieces, and change nothing.
    """
    if delta.error is not None or delta.finish_reason == "abort":
        queue_entry.drop(delta.request_id)
    elif (
        delta.token_ids
        or delta.finish_reason is not None
        or delta.prompt_logprobs is None
    ):
        usage = delta.usage
        num_processed = None if usage is None else usage.recomputed + usage.transferred
        queue_entry.mark_served(delta.request_id, num_processed)


class EngineClient:
    """The client of an engine that runs in another process, over a socket.

    Args:
        queue: the limits of the queue.
        caches_prefixes: whether the engine reuses the KV of common prefixes.

    Attributes:
        queue: the waiting queue. A request must enter it before it is submitted.
        ready: the engine's report about itself, once the engine can serve.
        progress: a description of what the engine does before it is ready.
        on_progress: called with each new value of `progress`.
        stats: the engine's latest values, by metric series.
        host_tier: the KV store that the engine uses, or None.
        failure: why the engine cannot continue, or None.
        movable: the open requests that can migrate, by request id. The values are
            functions that return whether the request may migrate now.
        moving: ids of the requests for which Migrate was sent to the engine, and that
            have not ended in this process.
        is_draining: whether the server is shutting down.
        is_handing_over: whether `hand_over` is running.
    """

    def __init__(
        self, queue: QueueOptions | None = None, *, caches_prefixes: bool = True
    ) -> None:
        self.queue = Admission(queue or QueueOptions())
        self._caches_prefixes = caches_prefixes
        self.ready: EngineReady | None = None
        self.progress = "the engine is starting"
        self.stats: dict[str, float] = {}
        self.host_tier: HostTierReport | None = None
        self.on_progress: Callable[[str], None] = lambda text: None
        self.movable: dict[str, Callable[[], bool]] = {}
        self.moving: set[str] = set()
        self.is_draining = False
        self.is_handing_over = False
        # The loop's time at which the engine will have reported the leases of the
        # request that migrated last. 0: no request has migrated.
        self._leases_reported_by_s = 0.0
        self.failure: str | None = None
        self._subscriptions: dict[str, Subscription] = {}  # by request id
        self._start_decided = asyncio.Event()  # the engine is ready or has failed
        # Whether the engine sent a message, or received work when it had none, since
        # the last call of `is_stalled`.
        self._was_active = False
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._has_hung_up = False

    @property
    def healthy(self) -> bool:
        return self.failure is None

    @property
    def is_lost(self) -> bool:
        """Whether the engine failed or closed the link, so that its processes should
        exit soon."""
        return self._has_hung_up or not self.healthy

    async def start(self, link: socket.socket) -> None:
        """Begin to read from the engine. Must be called on the event loop that serves
        requests.

        Args:
            link: the socket to the engine.
        """
        reader, self._writer = await asyncio.open_unix_connection(sock=link)
        self._reading = asyncio.create_task(self._read(reader))

    async def close(self) -> None:
        """End every open request with NoServerAvailable, and close the link.

        The engine then exits without finishing any request.
        """
        self.fail("the server is shutting down", NoServerAvailable.code)
        self._disconnect()

    async def wait_ready(self, timeout_s: float) -> EngineReady:
        """Wait until the engine can serve.

        Args:
            timeout_s: the longest time without progress, in seconds.

        Raises:
            EngineDied: the engine failed, or made no progress for `timeout_s`.
        """
        while not self._start_decided.is_set():
            self._was_active = False
            try:
                await asyncio.wait_for(self._start_decided.wait(), timeout_s)
            except TimeoutError:
                if not self._was_active:
                    raise EngineDied(
                        f"the engine did not start: {self.progress}, and nothing has "
                        f"changed for {timeout_s:g} s"
                    ) from None
        if self.ready is None or self.failure is not None:
            raise EngineDied(f"the engine did not start: {self.failure}")
        return self.ready

    def submit(
        self, requests: Sequence[AddRequest], queue_entry: QueueEntry | None = None
    ) -> Subscription:
        """Start requests. The returned subscription receives all of their deltas.

        Each request leaves the queue of `queue_entry` with its first token, or at its
        end.

        Raises:
            EngineDied: the engine has failed or exited; no request was started.
        """
        self.check_alive()
        ids = [request.request_id for request in requests]
        assert len(set(ids)) == len(ids), ids
        assert self._subscriptions.keys().isdisjoint(ids), ids
        subscription = Subscription(self, requests, queue_entry)
        self._was_active |= not self._subscriptions
        self._subscriptions.update(dict.fromkeys(ids, subscription))
        try:
            for request in requests:
                self._write(request)
        except BaseException:
            subscription.close()
            raise
        return subscription

    def send(self, message: EngineInput) -> None:
        """Send a message to the engine; drop it if the engine has failed or exited."""
        with contextlib.suppress(EngineDied):
            self._write(message)

    def is_stalled(self) -> bool:
        """Whether the engine has open requests and was silent since the last call."""
        was_active = self._was_active
        self._was_active = False
        return bool(self._subscriptions) and not was_active

    def migrate(self, limit: int | None = None) -> int:
        """Migrate at most `limit` requests (None: all), and return their number.

        Requests that may not migrate now are left out.
        """
        movable = [name for name, may_move in self.movable.items() if may_move()]
        request_ids = movable[:limit]
        for request_id in request_ids:
            del self.movable[request_id]
            self.moving.add(request_id)
            self.send(Migrate(request_id))
        return len(request_ids)

    async def hand_over(self, until_s: float) -> None:
        """Migrate all requests that can migrate now or while this call runs.

        Returns when other servers have pulled the KV of these requests, or at
        `until_s`. Until this call returns, the server must accept requests, because
        requests that no other server takes return to this server. Requests that cannot
        migrate before this call returns finish at this server.

        Args:
            until_s: a time of the loop's clock.
        """
        clock = asyncio.get_running_loop().time
        self.is_draining = True
        self.is_handing_over = True
        self.migrate()
        while (now_s := clock()) < until_s:
            has_leases = self._leases_reported_by_s and self.stats.get(LEASES, 0)
            if not (self.moving or has_leases or now_s < self._leases_reported_by_s):
                break
            await asyncio.sleep(LEASES_POLL_INTERVAL_S)
        self.is_handing_over = False

    def forget(self, request_id: str) -> None:
        """Drop all later deltas of a request."""
        self.movable.pop(request_id, None)
        if request_id in self.moving:
            self.moving.remove(request_id)
            self._leases_reported_by_s = asyncio.get_running_loop().time() + _SETTLE_S
        self._subscriptions.pop(request_id, None)

    def fail(self, reason: str, code: str = EngineDied.code) -> None:
        """End every open request with an error, because the engine cannot continue or
        the server shuts down."""
        if self.failure is not None:
            return
        self.failure = reason
        self._start_decided.set()
        error = ErrorInfo(code, f"the engine ended: {reason}")
        for request_id in list(self._subscriptions):
            self._deliver(TokenDelta(request_id=request_id, error=error))

    def check_alive(self) -> None:
        """Raise EngineDied if the engine has failed or exited."""
        if self.failure is not None:
            raise EngineDied(f"the engine ended: {self.failure}")

    def require_ready(self) -> EngineReady:
        """Return the engine's report about itself.

        Raises:
            NoServerAvailable: the engine is still starting.
            EngineDied: the engine has failed or exited.
        """
        if self.ready is None and self.healthy:
            raise NoServerAvailable(
                f"This server is still starting ({self.progress}); try again soon."
            )
        self.check_alive()
        assert self.ready is not None
        return self.ready

    def _on_message(self, message: EngineOutput) -> None:
        self._was_active = True
        match message:
            case Outputs(deltas, compiled):
                for request_id in compiled:
                    if subscription := self._subscriptions.get(request_id):
                        subscription.on_grammar_compiled(request_id)
                for delta in deltas:
                    self._deliver(delta)
            case EngineStats(values, host_tier):
                self.stats.update(values)
                self.host_tier = host_tier
            case EngineProgress(text):
                self.progress = text
                self.on_progress(text)
            case EngineReady(num_blocks=num_blocks, block_size=block_size):
                self.ready = message
                if self._caches_prefixes:
                    self.queue.set_cache_capacity(num_blocks * block_size)
                self._start_decided.set()
            case EngineFailed(reason):
                self.fail(reason)

    def _deliver(self, delta: TokenDelta) -> None:
        subscription = self._subscriptions.get(delta.request_id)
        if subscription is None:
            return  # the engine sent this delta before it read the request's abort
        subscription.deliver(delta)
        if not subscription.is_open(delta.request_id):
            self.forget(delta.request_id)

    def _write(self, message: EngineInput) -> None:
        """Write a message to the socket, which buffers what the engine has not read.

        Raises:
            EngineDied: the engine is not connected.
        """
        if self._writer is None:
            raise EngineDied("the engine is not connected")
        self._writer.write(framed(encode(message)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                self._on_message(decode_output(await reader.readexactly(length)))
        except (OSError, asyncio.IncompleteReadError):
            # EngineProcesses reports why the engine's process ended.
            self._has_hung_up = True
        except Exception as error:
            log.exception("the engine's messages cannot be read")
            self.fail(f"its messages cannot be read: {error}")
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close()

"""The HTTP process's side of the engine: requests out, tokens in.

    submit([AddRequest, ...]) -> Subscription -> batches of TokenDeltas, one terminal each

One subscription serves all prompts of a call, so several prompts need no tasks of their own.
Everything here runs on one event loop.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Sequence

from protocol.errors import BatonError, ClientTooSlow, EngineDied, NoServerAvailable
from protocol.http.admission import Admission, Place
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
    Migrate,
    Outputs,
    TokenDelta,
    decode_output,
    encode,
)
from protocol.process.logging import get_logger
from protocol.settings.options import QueueOptions

log = get_logger(__name__)

LEASES = "baton_leases_held"  # among an engine's stats
LEASES_POLL_INTERVAL_S = 0.02
_SETTLE_S = 0.5  # within which an engine tells of the leases of what has moved
MAX_UNREAD = (
    1 << 14
)  # deltas of a choice whose client is too slow for it: some megabytes
MAX_UNREAD_CHOICES = 32  # that a call with more of them counts as


class Subscription:
    """The deltas of some requests, in batches of what has arrived since the last look.

    Closing it aborts whatever has not ended.
    """

    def __init__(
        self,
        engine: "EngineClient",
        requests: Iterable[AddRequest],
        place: Place | None,
    ) -> None:
        self._engine = engine
        self._place = place
        # Choices without a terminal event, by request.
        requests = tuple(requests)
        self._open = {
            request.request_id: request.num_choices
            - sum(one.has_ended for one in request.resumed_choices)
            for request in requests
        }
        self._max_unread = MAX_UNREAD * min(
            sum(self._open.values()), MAX_UNREAD_CHOICES
        )
        # Those that keep their KV for an answer that has not been given yet.
        self._retaining = [
            request.request_id for request in requests if request.retain_kv
        ]
        self._pending: list[TokenDelta] = []
        self._num_unread = 0  # of these, with the likely alternatives that they name
        self._news = asyncio.Event()

    async def next_batch(self) -> list[TokenDelta]:
        """Waits for news; an empty list says that every request has ended and been read."""
        if not self._pending and self._open:
            self._news.clear()
            await self._news.wait()
        batch, self._pending, self._num_unread = self._pending, [], 0
        return batch

    def deliver(self, delta: TokenDelta) -> None:
        """Called by the engine for each delta of an open request."""
        if self._place is not None:
            _leave_queue(self._place, delta)
        self._pending.append(delta)
        self._num_unread += 1 + sum(
            len(found.top_ids) for found in delta.logprobs or ()
        )
        self._open[delta.request_id] -= delta.finish_reason is not None
        if delta.finish_reason == MOVED:
            self._retaining.append(delta.request_id)
        if (
            delta.error is not None or not self._open[delta.request_id]
        ):  # the end of all choices
            del self._open[delta.request_id]
        self._news.set()
        if self._num_unread > self._max_unread:
            told = f"{self._num_unread} tokens and likely alternatives were not read in time"
            self.fail(ClientTooSlow(f"{told}; read the stream as it comes"))

    def compiled(self, request_id: str) -> None:
        """Called by the engine once the grammar of a request is there."""
        if self._place is not None:
            self._place.begin(request_id)

    def is_open(self, request_id: str) -> bool:
        """Whether more may come for a request."""
        return request_id in self._open

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Asks the engine to end a request, or one choice of it; "abort" still comes of each."""
        if request_id in self._open:
            self._engine.send(AbortRequest(request_id, choice))

    def let_move(self, may_move: Callable[[], bool], *, has_come: bool) -> None:
        """Its one request may go on at another server while `may_move`: now, if this one is
        handed over and it has not just come as there is no other."""
        if request_id := next(iter(self._open), None):
            self._engine.movable[request_id] = may_move
            if self._engine.hands_over and not has_come:
                self._engine.migrate()

    def fail_at(self, at: float, error: BatonError) -> Callable[[], None]:
        """Ends what is open at a time of the loop's clock, unless the result is called before."""
        return asyncio.get_running_loop().call_at(at, self.fail, error).cancel

    def fail(self, error: BatonError) -> None:
        """Ends every request here and in the engine; what was not read is dropped for the error."""
        if self._open:
            request_id = next(iter(self._open))
            self.close()
            self._pending.append(
                TokenDelta(request_id=request_id, error=ErrorInfo.of(error))
            )
            self._news.set()

    def answered(self) -> None:
        """The client is told where the KV of these requests is, and may come for it."""
        self._retaining.clear()

    def close(self) -> None:
        """Forgets every request, aborts those that have not ended, and lets go of KV that nobody
        was told of. Idempotent."""
        for request_id in dict.fromkeys([*self._open, *self._retaining]):
            self._engine.forget(request_id)
            self._engine.send(AbortRequest(request_id))
        self._open.clear()
        self._retaining.clear()
        self._pending.clear()


def _leave_queue(place: Place, delta: TokenDelta) -> None:
    """A prompt waits no longer once its first token or its end has come. Its logprobs may come
    before, piece by piece."""
    if delta.error is not None or delta.finish_reason == "abort":
        place.drop(delta.request_id)
    elif (
        delta.token_ids
        or delta.finish_reason is not None
        or delta.prompt_logprobs is None
    ):
        usage = delta.usage
        num_processed = None if usage is None else usage.recomputed + usage.transferred
        place.served(delta.request_id, num_processed)


class EngineClient:
    """An engine in another process, which is at the other end of a socket.

    Args:
        queue: how much may wait.
        caches_prefixes: the engine reuses the KV of prompts that begin alike.

    Attributes:
        queue: where to ask for a place before a request is submitted.
        progress: what the engine is busy with, until it is ready.
        on_progress: told that whenever it changes.
        movable: open requests that can go on at another server, and whether they may.
        moving: those that are told to, and have not gone yet.
        is_draining: the server ends.
        hands_over: all that can is to go on elsewhere: the server still listens.
    """

    def __init__(
        self, queue: QueueOptions | None = None, *, caches_prefixes: bool = True
    ) -> None:
        self.queue = Admission(queue or QueueOptions())
        self._caches_prefixes = caches_prefixes
        self.ready: EngineReady | None = None
        self.progress = "the engine is starting"
        self.stats: dict[str, float] = {}
        self.on_progress: Callable[[str], None] = lambda text: None
        self.movable: dict[str, Callable[[], bool]] = {}
        self.moving: set[str] = set()
        self.is_draining = self.hands_over = False
        self._settled_s = (
            0.0  # when the engine has told of the leases of the last that has moved
        )
        self.failure: str | None = None  # why the engine cannot go on
        self._subscriptions: dict[str, Subscription] = {}
        self._settled = asyncio.Event()  # ready or failed
        # Since the last look: it spoke, or was given work after having none.
        self._was_heard = False
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._hung_up = False

    @property
    def healthy(self) -> bool:
        return self.failure is None

    @property
    def is_lost(self) -> bool:
        """Whether the engine has failed or hung up, after which its processes should be ending."""
        return self._hung_up or not self.healthy

    async def start(self, link: socket.socket) -> None:
        """Begins to listen to the engine at its other end; call it on the event loop that the
        requests will run on."""
        reader, self._writer = await asyncio.open_unix_connection(sock=link)
        self._reading = asyncio.create_task(self._read(reader))

    async def close(self) -> None:
        """Ends every open request with NoServerAvailable and hangs up: the engine then finishes
        nothing, and exits."""
        self.fail("the server is shutting down", NoServerAvailable.code)
        self._disconnect()

    async def wait_ready(self, timeout_s: float) -> EngineReady:
        """Waits for the engine to say that it can serve.

        Raises:
            EngineDied: it failed, or made no progress for so long.
        """
        while not self._settled.is_set():
            self._was_heard = False
            try:
                await asyncio.wait_for(self._settled.wait(), timeout_s)
            except TimeoutError:
                if not self._was_heard:
                    told = (
                        f"{self.progress}, and nothing has changed for {timeout_s:g} s"
                    )
                    raise EngineDied(f"the engine did not start: {told}") from None
        if self.ready is None or self.failure is not None:
            raise EngineDied(f"the engine did not start: {self.failure}")
        return self.ready

    def submit(
        self, requests: Sequence[AddRequest], place: Place | None = None
    ) -> Subscription:
        """Starts requests; all their deltas come through the one subscription. Each leaves its
        `place` in the queue with its first token, or its end.

        Raises:
            EngineDied: the engine is gone; nothing was started.
        """
        self.check_alive()
        ids = [request.request_id for request in requests]
        assert len(set(ids)) == len(ids) and self._subscriptions.keys().isdisjoint(
            ids
        ), ids
        subscription = Subscription(self, requests, place)
        self._was_heard |= not self._subscriptions
        self._subscriptions.update(dict.fromkeys(ids, subscription))
        try:
            for request in requests:
                self._send(request)
        except BaseException:
            subscription.close()
            raise
        return subscription

    def send(self, message: EngineInput) -> None:
        """Sends what has no answer; to a dead engine there is nobody left to tell."""
        with contextlib.suppress(EngineDied):
            self._send(message)

    def look(self) -> bool:
        """Whether the engine has open requests and said nothing since it was looked at last."""
        was_heard, self._was_heard = self._was_heard, False
        return bool(self._subscriptions) and not was_heard

    def migrate(self, limit: int | None = None) -> int:
        """Has at most so many requests go on at other servers; returns how many are to."""
        chosen = [name for name, may_move in self.movable.items() if may_move()][:limit]
        for request_id in chosen:
            del self.movable[request_id]
            self.moving.add(request_id)
            self.send(Migrate(request_id))
        return len(chosen)

    async def hand_over(self, until_s: float) -> None:
        """Has all go on at other servers that can, and those that become able to meanwhile, until
        their KV was fetched, or this time of the loop's clock. Whoever listens until then gets back
        what no other takes; what comes to be later ends here."""
        clock = asyncio.get_running_loop().time
        self.is_draining = self.hands_over = True
        self.migrate()
        while (now_s := clock()) < until_s:
            has_leases = self._settled_s and self.stats.get(LEASES, 0)
            if not (self.moving or has_leases or now_s < self._settled_s):
                break
            await asyncio.sleep(LEASES_POLL_INTERVAL_S)
        self.hands_over = False

    def forget(self, request_id: str) -> None:
        """Drops what may still come for a request."""
        self.movable.pop(request_id, None)
        if request_id in self.moving:
            self.moving.remove(request_id)
            self._settled_s = asyncio.get_running_loop().time() + _SETTLE_S
        self._subscriptions.pop(request_id, None)

    def fail(self, reason: str, code: str = EngineDied.code) -> None:
        """Ends every open request: the engine's process is gone."""
        if self.failure is not None:
            return
        self.failure = reason
        self._settled.set()
        error = ErrorInfo(code, f"the engine ended: {reason}")
        for request_id in list(self._subscriptions):
            self._deliver(TokenDelta(request_id=request_id, error=error))

    def check_alive(self) -> None:
        """Raises EngineDied when the engine is gone."""
        if self.failure is not None:
            raise EngineDied(f"the engine ended: {self.failure}")

    def require_ready(self) -> EngineReady:
        """What the engine said of itself. Raises BatonError before it did, or when it died."""
        if self.ready is None and self.healthy:
            starting = (
                f"This server is still starting ({self.progress}); try again soon."
            )
            raise NoServerAvailable(starting)
        self.check_alive()
        assert self.ready is not None
        return self.ready

    def _take(self, message: EngineOutput) -> None:
        self._was_heard = True
        match message:
            case Outputs(deltas, compiled):
                for request_id in compiled:
                    if subscription := self._subscriptions.get(request_id):
                        subscription.compiled(request_id)
                for delta in deltas:
                    self._deliver(delta)
            case EngineStats(values):
                self.stats.update(values)
            case EngineProgress(text):
                self.progress = text
                self.on_progress(text)
            case EngineReady(num_blocks=num_blocks, block_size=block_size):
                self.ready = message
                if self._caches_prefixes:
                    self.queue.set_cache_capacity(num_blocks * block_size)
                self._settled.set()
            case EngineFailed(reason):
                self.fail(reason)

    def _deliver(self, delta: TokenDelta) -> None:
        subscription = self._subscriptions.get(delta.request_id)
        if subscription is None:
            return  # aborted and forgotten; the engine had not heard of it yet
        subscription.deliver(delta)
        if not subscription.is_open(delta.request_id):
            self.forget(delta.request_id)

    def _send(self, message: EngineInput) -> None:
        """What the engine has not read yet is kept here. Raises EngineDied where nobody will."""
        if self._writer is None:
            raise EngineDied("the engine is not connected")
        self._writer.write(framed(encode(message)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                self._take(decode_output(await reader.readexactly(length)))
        except (OSError, asyncio.IncompleteReadError):
            self._hung_up = True  # who watches the engine's processes says why
        except Exception as error:
            log.exception("the engine's messages cannot be read")
            self.fail(f"its messages cannot be read: {error}")
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

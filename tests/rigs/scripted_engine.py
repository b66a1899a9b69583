"""A stand-in for an engine, without processes: a script determines its answers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from engine.process.client import EngineClient
from protocol.messages import (
    AbortRequest,
    AddRequest,
    EngineInput,
    EngineOutput,
    EngineReady,
    KVUsage,
    TokenDelta,
)
from protocol.settings.server_options import QueueOptions


async def generate(
    engine: EngineClient, request: AddRequest
) -> AsyncGenerator[TokenDelta, None]:
    """Yield the deltas of one request, up to the terminal one.

    Closing the generator early aborts the request.
    """
    subscription = engine.submit([request])
    try:
        while batch := await subscription.next_batch():
            for delta in batch:
                yield delta
    finally:
        subscription.close()


Script = Callable[[AddRequest], AsyncIterator[TokenDelta]]


async def count_up(request: AddRequest) -> AsyncIterator[TokenDelta]:
    """Answer with the prompt's last token + 1, + 2, and so on, up to `max_tokens`
    tokens.

    This is the default script.
    """
    last = request.token_ids[-1]
    for step in range(1, request.max_tokens + 1):
        yield TokenDelta(request_id=request.request_id, token_ids=[last + step])
        await asyncio.sleep(0)
    yield TokenDelta(
        request_id=request.request_id,
        finish_reason="length",
        usage=KVUsage(recomputed=len(request.token_ids)),
    )


async def hang(request: AddRequest) -> AsyncIterator[TokenDelta]:
    """A script that sends nothing and never returns."""
    await asyncio.Event().wait()
    yield TokenDelta(request_id=request.request_id)


SMALL_ENGINE = EngineReady(
    num_blocks=64, block_size=16, max_model_len=256, max_num_seqs=64, vocab_size=1000
)


class ScriptedEngine(EngineClient):
    """An engine in memory that answers each request with the deltas of a script.

    If a script raises, or returns without a terminal delta, the request stays open, so
    that a test can make the engine hang. An abort ends the script and gets the same
    answer as from a real engine.

    Args:
        script: an async generator function of the request.
        ready: the engine's ready message; if None, the engine never becomes ready by
            itself.
    """

    def __init__(
        self,
        script: Script = count_up,
        ready: EngineReady | None = SMALL_ENGINE,
        queue: QueueOptions | None = None,
    ) -> None:
        super().__init__(queue)
        self.added: list[AddRequest] = []
        self.aborted: list[str] = []
        self._script = script
        self._tasks: dict[str, asyncio.Task[None]] = {}
        if ready is not None:
            self._on_message(ready)

    async def start(self, link: object = None) -> None: ...

    async def close(self) -> None:
        await super().close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def emit(self, message: EngineOutput) -> None:
        """Process a message as if it came from the engine."""
        self._on_message(message)

    def _write(self, message: EngineInput) -> None:
        self.check_alive()
        if isinstance(message, AddRequest):
            self.added.append(message)
            self._tasks[message.request_id] = asyncio.create_task(self._play(message))
        elif isinstance(message, AbortRequest):
            self.aborted.append(message.request_id)
            self._tasks.pop(message.request_id).cancel()
            delta = TokenDelta(
                request_id=message.request_id, finish_reason="abort", usage=KVUsage()
            )
            asyncio.get_running_loop().call_soon(self._deliver, delta)

    async def _play(self, request: AddRequest) -> None:
        async for delta in self._script(request):
            self._deliver(delta)

"""Tries the grammars of a request before the request is accepted.

Each grammar is tried by a child of a separate process (grammar_compile.py). The first
trial runs among many others, for a short time that suffices for nearly all grammars. A
grammar that takes longer is tried again, one at a time and up to the server's limit, so
that it delays only other slow grammars.

Requests that wait for a trial form the trial queue, which is separate from the queue of
prompts. Requests that find it full, or wait too long in it, are refused with a 429 of
their own. Requests without a schema, or with schemas that were tried before, skip it.
"""

import asyncio
import contextlib
import hashlib
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from engine.text.grammar_compile import Try, Verdict, line_of
from engine.text.tokenizer import Tokenizer
from protocol.errors import GrammarQueueFull, InternalError, Overloaded
from protocol.messages import Grammar
from protocol.openai.requests import refuse
from protocol.openai.structured import GuidedDecoding
from protocol.process.environment import child_environment

MEMORY_BYTES = 256 * 2**20  # for the compilation of one grammar
MAX_HELD_BYTES = 4 * 2**30  # of the grammars of all open requests

_QUICK_CPU_S = 0.1
_NUM_QUICK = 4
_NUM_SLOW = 1
_MAX_VERDICTS = 8192  # more than one request can have grammars
_MAX_WAIT_S = 10.0  # for a turn, and for a child to begin
# Requests in the trial queue, each of which keeps its schemas in memory.
MAX_WAITING_TRIALS = 1024
_START_TIMEOUT_S = 60.0  # the process takes a second to start for a large vocabulary


class GrammarChecker:
    """Tries the grammars of one server's requests, on one event loop.

    Args:
        tokenizer: the model's tokenizer.
        timeout_s: seconds that a request's grammars may take to compile.

    Attributes:
        num_waiting: requests in the trial queue.
    """

    def __init__(self, tokenizer: Tokenizer, timeout_s: float) -> None:
        self._folder = tokenizer.folder
        self._timeout_s = timeout_s
        # Each lane: the trials that run at once, and the CPU seconds of each.
        self._lanes = (
            (asyncio.Semaphore(_NUM_QUICK), _QUICK_CPU_S),
            (asyncio.Semaphore(_NUM_SLOW), timeout_s),
        )
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        # By grammar: the open requests that use it, and its bytes.
        self._held: dict[bytes, tuple[int, int]] = {}
        self.num_waiting = 0
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The id of the trial process; None before it was started."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            InternalError: the process cannot be started.
        """
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process, self._control = await asyncio.to_thread(
                    _spawn, self._folder
                )

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None and self._control is not None:
            self._process.kill()
            self._process.wait()
            self._control.close()
        self._process = None
        self._control = None

    def nbytes(self, grammar: Grammar | None) -> int:
        """Return the memory of an accepted grammar, compiled; 0 where it is unknown."""
        if grammar is None:
            return 0
        verdict = self._verdicts.get(_key(grammar))
        return verdict.nbytes if verdict else 0

    def hold(self, grammar: Grammar | None) -> Callable[[], None]:
        """Count the memory of an open request's grammar, until the result is called.

        Raises:
            Overloaded: the grammars of all open requests take too much memory.
        """
        if grammar is None:
            return lambda: None
        key = _key(grammar)
        count, nbytes = self._held.get(key, (0, self.nbytes(grammar)))
        total = sum(size for _, size in self._held.values())
        if not count and total + nbytes > MAX_HELD_BYTES:
            raise Overloaded(
                "Open requests' schemas and grammars fill the memory; try again soon."
            )
        self._held[key] = (count + 1, nbytes)

        def release() -> None:
            count, nbytes = self._held.pop(key)
            if count > 1:
                self._held[key] = (count - 1, nbytes)

        return release

    async def check(self, all_guided: Sequence[GuidedDecoding]) -> None:
        """Return if all grammars can be used. Cancel it when the client disconnects.

        Raises:
            InvalidRequest: names the first field that cannot be used, and why.
            GrammarQueueFull: too many other requests wait to be tried.
        """
        untried = self._without_verdict(all_guided)
        for turns, cpu_s in self._lanes:
            if not untried:
                return
            await self._take_turn(turns)
            try:
                # Another request may have had the same grammars tried.
                untried = self._without_verdict(untried)
                if untried:
                    await self._try(untried, cpu_s)
            finally:
                turns.release()
            untried = self._without_verdict(untried)
        if untried:
            refuse(
                untried[0].field,
                f"takes more than {self._timeout_s:g} s or {MEMORY_BYTES >> 20} MB of "
                "memory to compile; send a simpler one (the server's limit of time is "
                "--grammar-timeout-s)",
            )

    async def _take_turn(self, turns: asyncio.Semaphore) -> None:
        """Wait in the trial queue.

        Raises:
            GrammarQueueFull: the queue is full, or the wait was too long.
        """
        if turns.locked() and self.num_waiting >= MAX_WAITING_TRIALS:
            raise _trial_queue_full(self.num_waiting)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await turns.acquire()
        except TimeoutError:
            raise _trial_queue_full(self.num_waiting) from None
        finally:
            self.num_waiting -= 1

    def _without_verdict(
        self, all_guided: Sequence[GuidedDecoding]
    ) -> list[GuidedDecoding]:
        """Return the grammars that have no verdict yet.

        Raises:
            InvalidRequest: names the first grammar whose verdict is bad.
        """
        verdicts = [self._verdicts.get(_key(guided.grammar)) for guided in all_guided]
        untried: list[GuidedDecoding] = []
        for guided, verdict in zip(all_guided, verdicts, strict=True):
            if verdict is None:
                untried.append(guided)
                continue
            # New schemas push only unused verdicts out.
            self._verdicts.move_to_end(_key(guided.grammar))
            if verdict.mistake is not None:
                refuse(guided.field, f"cannot be used: {verdict.mistake}")
        return untried

    async def _try(self, all_guided: Sequence[GuidedDecoding], cpu_s: float) -> None:
        """Store the verdicts that come in time, until a grammar exhausts the child."""
        trial = Try(
            [guided.grammar for guided in all_guided],
            MEMORY_BYTES,
            cpu_s,
            self._timeout_s,
        )
        reader, writer = await self._start_child(trial)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    for guided in all_guided:
                        line = await _read_line(reader)
                        if not line:
                            return
                        verdict = msgspec.json.decode(line, type=Verdict)
                        self._verdicts[_key(guided.grammar)] = verdict
                        # A mistake refuses the request before the next grammar is
                        # tried.
                        self._without_verdict([guided])
            while len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        finally:
            writer.transport.abort()

    async def _start_child(
        self, trial: Try
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection to a new child that has begun.

        The process is started again where it was killed or hangs.
        """
        for _ in range(2):
            await self.start()
            process = self._process
            control = self._control
            assert control is not None
            ours, theirs = socket.socketpair()
            # If no process receives it, `ours` reads as closed.
            with theirs, contextlib.suppress(OSError):
                socket.send_fds(control, [b"!"], [theirs.fileno()])
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            first_line = b""
            try:
                writer.write(line_of(trial))
                with contextlib.suppress(TimeoutError):
                    first_line = await asyncio.wait_for(_read_line(reader), _MAX_WAIT_S)
            finally:
                if not first_line:
                    writer.transport.abort()
            if first_line:
                return reader, writer
            if self._process is process:
                self.close()
        raise Overloaded("The process that tries grammars was ended; try again.")


def _trial_queue_full(num_waiting: int) -> GrammarQueueFull:
    return GrammarQueueFull(
        f"{num_waiting} requests with new schemas or grammars wait in the trial queue, "
        f"the limits are {MAX_WAITING_TRIALS} requests and {_MAX_WAIT_S:g} s; try "
        "again later, or send schemas that were accepted before",
        _MAX_WAIT_S / 2,
    )


def _spawn(folder: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Return the process, once it can try grammars, and the socket to it."""
    control, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "engine.text.grammar_compile",
                f"{theirs.fileno()}",
                folder,
            ],
            env={**child_environment(), "MALLOC_ARENA_MAX": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    control.settimeout(_START_TIMEOUT_S)
    ready_byte = b""
    with contextlib.suppress(OSError):
        ready_byte = control.recv(1)
    if not ready_byte:
        process.kill()
        process.wait()
        control.close()
        raise InternalError("The process that tries grammars cannot be started.")
    control.setblocking(False)
    return process, control


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line; empty where the connection is closed."""
    try:
        return await reader.readline()
    except OSError:
        return b""


def _key(grammar: Grammar) -> bytes:
    encoded = msgspec.msgpack.encode((grammar.kind, grammar.text))
    return hashlib.blake2b(encoded, digest_size=16).digest()

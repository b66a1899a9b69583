"""What a request demands of its output is tried before the request is taken on.

Every grammar is tried by a child of a process for that (grammar_compile.py): first among many, for
a moment that suffices nearly all; what takes longer is tried anew, one at a time and up to the
server's limit, so that it holds up its own kind alone.

Requests that wait for a trial are no part of the queue of prompts: they form the trial queue.
Requests that find it full, or wait too long in it, are refused with a 429 of their own. Requests
without a schema, or with schemas that were tried before, do not pass through it.
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
_MAX_KNOWN = 8192  # more than a request can have
_MAX_WAIT_S = 10.0  # for a turn, and for a child to begin
MAX_WAITING_TRIALS = (
    1024  # requests in the trial queue, each of which keeps its schemas in memory
)
_START_TIMEOUT_S = 60.0  # of the process; it takes a second for a large vocabulary


class GrammarChecker:
    """Tries the grammars of one server's requests. For one event loop.

    Args:
        tokenizer: the model's.
        timeout_s: that a request's grammars may take to compile.

    Attributes:
        num_waiting: requests in the trial queue.
    """

    def __init__(self, tokenizer: Tokenizer, timeout_s: float) -> None:
        self._folder = tokenizer.folder
        self._timeout_s = timeout_s
        # So many tries at once, each for so long.
        self._lanes = (
            (asyncio.Semaphore(_NUM_QUICK), _QUICK_CPU_S),
            (asyncio.Semaphore(_NUM_SLOW), timeout_s),
        )
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._held: dict[
            bytes, tuple[int, int]
        ] = {}  # by grammar: open requests, bytes
        self.num_waiting = 0
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, once it was needed or started."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the process, unless it runs.

        Raises:
            InternalError: it cannot be started.
        """
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process, self._control = await asyncio.to_thread(
                    _spawn, self._folder
                )

    def close(self) -> None:
        """Ends the process. Idempotent."""
        if self._process is not None and self._control is not None:
            self._process.kill()
            self._process.wait()
            self._control.close()
        self._process = self._control = None

    def nbytes(self, grammar: Grammar | None) -> int:
        """The memory that a grammar which was found good takes, compiled."""
        known = None if grammar is None else self._known.get(_key(grammar))
        return known.nbytes if known else 0

    def hold(self, grammar: Grammar | None) -> Callable[[], None]:
        """Counts the memory of an open request's grammar, until the result is called.

        Raises:
            Overloaded: together with those of other requests it takes too much.
        """
        if grammar is None:
            return lambda: None
        key = _key(grammar)
        count, nbytes = self._held.get(key, (0, self.nbytes(grammar)))
        if (
            not count
            and sum(held for _, held in self._held.values()) + nbytes > MAX_HELD_BYTES
        ):
            raise Overloaded(
                "Open requests' schemas and grammars fill the memory; try again soon."
            )
        self._held[key] = count + 1, nbytes

        def let_go() -> None:
            count, nbytes = self._held.pop(key)
            if count > 1:
                self._held[key] = count - 1, nbytes

        return let_go

    async def check(self, all_guided: Sequence[GuidedDecoding]) -> None:
        """Returns if all can be used. To be cancelled when nobody wants to know any more.

        Raises:
            InvalidRequest: names the first field that cannot, and says why.
            GrammarQueueFull: too many others wait to be tried.
        """
        left = self._unknown(all_guided)
        for turns, cpu_s in self._lanes:
            if not left:
                return
            await self._take_turn(turns)
            try:
                left = self._unknown(
                    left
                )  # another request may have had the same ones tried
                if left:
                    await self._try(left, cpu_s)
            finally:
                turns.release()
            left = self._unknown(left)
        if left:
            told = f"takes more than {self._timeout_s:g} s or {MEMORY_BYTES >> 20} MB of memory to"
            told += " compile; send a simpler one (the server's limit of time is"
            refuse(left[0].field, f"{told} --grammar-timeout-s)")

    async def _take_turn(self, turns: asyncio.Semaphore) -> None:
        """Waits in the trial queue. Raises GrammarQueueFull if it is full or the wait too long."""
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

    def _unknown(self, all_guided: Sequence[GuidedDecoding]) -> list[GuidedDecoding]:
        """Those not known to be good. Raises InvalidRequest of the first known to be bad."""
        verdicts = [self._known.get(_key(guided.grammar)) for guided in all_guided]
        for guided, known in zip(all_guided, verdicts, strict=True):
            if known is None:
                continue
            self._known.move_to_end(
                _key(guided.grammar)
            )  # new schemas push out unused ones only
            if known.mistake is not None:
                refuse(guided.field, f"cannot be used: {known.mistake}")
        return [
            g for g, known in zip(all_guided, verdicts, strict=True) if known is None
        ]

    async def _try(self, all_guided: Sequence[GuidedDecoding], cpu_s: float) -> None:
        """Remembers the verdicts that come in time, until a grammar is too much for the child."""
        asked = Try(
            [guided.grammar for guided in all_guided],
            MEMORY_BYTES,
            cpu_s,
            self._timeout_s,
        )
        reader, writer = await self._child(asked)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    for guided in all_guided:
                        if not (line := await _line(reader)):
                            return
                        self._known[_key(guided.grammar)] = msgspec.json.decode(
                            line, type=Verdict
                        )
                        self._unknown(
                            [guided]
                        )  # a mistake is told before the next one is tried
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        finally:
            writer.transport.abort()

    async def _child(
        self, asked: Try
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new child that has begun; of a new process where the old one was killed or hangs."""
        for _ in range(2):
            await self.start()
            process, control = self._process, self._control
            assert control is not None
            ours, theirs = socket.socketpair()
            with (
                theirs,
                contextlib.suppress(OSError),
            ):  # nobody is there: ours reads as ended
                socket.send_fds(control, [b"!"], [theirs.fileno()])
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            has_begun = b""
            try:
                writer.write(line_of(asked))
                with contextlib.suppress(TimeoutError):
                    has_begun = await asyncio.wait_for(_line(reader), _MAX_WAIT_S)
            finally:
                if not has_begun:
                    writer.transport.abort()
            if has_begun:
                return reader, writer
            if self._process is process:
                self.close()
        raise Overloaded("The process that tries grammars was ended; try again.")


def _trial_queue_full(num_waiting: int) -> GrammarQueueFull:
    return GrammarQueueFull(
        f"{num_waiting} requests with new schemas or grammars wait in the trial queue, the "
        f"limits are {MAX_WAITING_TRIALS} requests and {_MAX_WAIT_S:g} s; try again later, or send "
        "schemas that were accepted before",
        _MAX_WAIT_S / 2,
    )


def _spawn(folder: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, once it can try grammars, and the socket to it."""
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
    started = b""
    with contextlib.suppress(OSError):
        started = control.recv(1)
    if not started:
        process.kill()
        process.wait()
        control.close()
        raise InternalError("The process that tries grammars cannot be started.")
    control.setblocking(False)
    return process, control


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Empty where there is none."""
    try:
        return await reader.readline()
    except OSError:
        return b""


def _key(grammar: Grammar) -> bytes:
    told = msgspec.msgpack.encode((grammar.kind, grammar.text))
    return hashlib.blake2b(told, digest_size=16).digest()

"""Tries to compile the grammars of a request before the request is accepted.

Each trial runs in a child of the trial process, which is separate from the server
(grammar_compile.py). The child sends a verdict for each grammar. Several first trials
run concurrently, with a short time limit that suffices for nearly all grammars. A
grammar that takes longer gets a second trial, with the limit --grammar-timeout-s.
Second trials run one at a time, so a slow grammar delays only other slow grammars.

Requests that wait for a trial form the trial queue, which is separate from the queue of
prompts. A request is refused with status 429 and the error GrammarQueueFull if the
trial queue is full or the wait is too long. A request does not wait in the trial queue
if it has no grammar, or if the verdicts of all its grammars are cached.
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

from engine.text.grammar_compile import Trial, Verdict, encode_line
from engine.text.tokenizer import Tokenizer
from protocol.errors import GrammarQueueFull, InternalError, Overloaded
from protocol.messages import Grammar
from protocol.openai.requests import refuse
from protocol.openai.structured import GuidedDecoding
from protocol.process.environment import child_environment

MEMORY_BYTES = 256 * 2**20  # limit for a child that compiles a request's grammars
MAX_HELD_BYTES = 4 * 2**30  # limit for the compiled grammars of all open requests

_FIRST_TRIAL_CPU_S = 0.1  # second trials may take --grammar-timeout-s
_MAX_FIRST_TRIALS = 4  # concurrent first trials
_MAX_SECOND_TRIALS = 1  # concurrent second trials
_MAX_VERDICTS = 8192  # cached verdicts; a request has fewer grammars than this
_MAX_WAIT_S = 10.0  # the longest wait in the trial queue, or for a child to begin
# Maximum number of requests in the trial queue. Each keeps its schemas in memory.
MAX_WAITING_TRIALS = 1024
# The trial process must be ready within this time. Building a large vocabulary takes a
# second.
_START_TIMEOUT_S = 60.0


class GrammarChecker:
    """Tries the grammars of one server's requests, on one event loop.

    Args:
        tokenizer: the model's tokenizer.
        timeout_s: the time limit for compiling all grammars of a request, in seconds.

    Attributes:
        num_waiting: the number of requests in the trial queue.
    """

    def __init__(self, tokenizer: Tokenizer, timeout_s: float) -> None:
        self._folder = tokenizer.folder
        self._timeout_s = timeout_s
        # Two entries, for first and for second trials. Each entry has a semaphore that
        # limits the number of concurrent trials, and the CPU seconds that a trial may
        # take.
        self._lanes = (
            (asyncio.Semaphore(_MAX_FIRST_TRIALS), _FIRST_TRIAL_CPU_S),
            (asyncio.Semaphore(_MAX_SECOND_TRIALS), timeout_s),
        )
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        # For each grammar, by `_grammar_key`: the number of open requests that use the
        # grammar, and the grammar's memory in bytes.
        self._held_grammars: dict[bytes, tuple[int, int]] = {}
        self.num_waiting = 0
        self._start_lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control_socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The id of the trial process; None while there is no process."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the trial process if it is not running.

        Raises:
            InternalError: the process cannot be started.
        """
        async with self._start_lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process, self._control_socket = await asyncio.to_thread(
                    _spawn_trial_process, self._folder
                )

    def close(self) -> None:
        """Kill the trial process. Idempotent."""
        if self._process is not None and self._control_socket is not None:
            self._process.kill()
            self._process.wait()
            self._control_socket.close()
        self._process = None
        self._control_socket = None

    def nbytes(self, grammar: Grammar | None) -> int:
        """Return the memory of a compiled grammar in bytes; 0 if it is unknown."""
        if grammar is None:
            return 0
        verdict = self._verdicts.get(_grammar_key(grammar))
        return verdict.nbytes if verdict else 0

    def reserve_memory(self, grammar: Grammar | None) -> Callable[[], None]:
        """Reserve the memory of an open request's grammar.

        Requests with the same grammar share its memory.

        Returns:
            A callback that frees the reservation, to be called when the request ends.

        Raises:
            Overloaded: the grammars of all open requests would exceed MAX_HELD_BYTES.
        """
        if grammar is None:
            return lambda: None
        key = _grammar_key(grammar)
        count, nbytes = self._held_grammars.get(key, (0, self.nbytes(grammar)))
        total = sum(size for _, size in self._held_grammars.values())
        if not count and total + nbytes > MAX_HELD_BYTES:
            raise Overloaded(
                f"The schemas and grammars of open requests take {total} bytes, and "
                f"this request needs {nbytes} more; the limit is {MAX_HELD_BYTES}. Try "
                "again soon."
            )
        self._held_grammars[key] = (count + 1, nbytes)

        def release() -> None:
            count, nbytes = self._held_grammars.pop(key)
            if count > 1:
                self._held_grammars[key] = (count - 1, nbytes)

        return release

    async def check(self, all_guided: Sequence[GuidedDecoding]) -> None:
        """Check that all grammars of a request can be used.

        The caller cancels this coroutine when the client disconnects.

        Raises:
            InvalidRequest: a grammar cannot be used. The error names the field with the
                grammar and the reason.
            GrammarQueueFull: the trial queue is full, or the wait was too long.
            InternalError, Overloaded: the grammars cannot be tried now.
        """
        untried = self._without_verdict(all_guided)
        for slots, cpu_s in self._lanes:
            if not untried:
                return
            await self._acquire_slot(slots)
            try:
                # While this request waited, a trial for another request may have
                # included the same grammars.
                untried = self._without_verdict(untried)
                if untried:
                    await self._try(untried, cpu_s)
            finally:
                slots.release()
            untried = self._without_verdict(untried)
        if untried:
            refuse(
                untried[0].field,
                f"takes more than {self._timeout_s:g} s or {MEMORY_BYTES >> 20} MB of "
                "memory to compile; send a simpler one (the server's time limit is "
                "--grammar-timeout-s)",
            )

    async def _acquire_slot(self, slots: asyncio.Semaphore) -> None:
        """Wait in the trial queue until one of `slots` is free, and acquire it.

        Raises:
            GrammarQueueFull: the trial queue is full, or the wait was too long.
        """
        if slots.locked() and self.num_waiting >= MAX_WAITING_TRIALS:
            raise _trial_queue_full(self.num_waiting)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await slots.acquire()
        except TimeoutError:
            raise _trial_queue_full(self.num_waiting) from None
        finally:
            self.num_waiting -= 1

    def _without_verdict(
        self, all_guided: Sequence[GuidedDecoding]
    ) -> list[GuidedDecoding]:
        """Return the grammars that have no verdict yet.

        Raises:
            InvalidRequest: the verdict of a grammar is that it cannot be used. The
                error names the field of the first such grammar.
        """
        verdicts = [
            self._verdicts.get(_grammar_key(guided.grammar)) for guided in all_guided
        ]
        untried: list[GuidedDecoding] = []
        for guided, verdict in zip(all_guided, verdicts, strict=True):
            if verdict is None:
                untried.append(guided)
                continue
            # Mark the verdict as used: the cache drops the least recently used ones.
            self._verdicts.move_to_end(_grammar_key(guided.grammar))
            if verdict.mistake is not None:
                refuse(guided.field, f"cannot be used: {verdict.mistake}")
        return untried

    def _store_verdict(self, grammar: Grammar, verdict: Verdict) -> None:
        self._verdicts[_grammar_key(grammar)] = verdict
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _try(self, all_guided: Sequence[GuidedDecoding], cpu_s: float) -> None:
        """Try grammars in a child, and store the verdicts that arrive in time.

        A grammar that exhausts the child's time or memory, and all grammars after it,
        get no verdict.

        Raises:
            InvalidRequest: a grammar cannot be used.
            InternalError, Overloaded: no child could be started.
        """
        trial = Trial(
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
                        self._store_verdict(guided.grammar, verdict)
                        # Raises InvalidRequest if the grammar has a mistake, so that
                        # the remaining grammars are not tried.
                        self._without_verdict([guided])
        finally:
            writer.transport.abort()

    async def _start_child(
        self, trial: Trial
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Make the trial process fork a child. Return the connection to the child.

        Returns once the child has begun to try grammars. If the trial process was
        killed or hangs, it is restarted once.

        Raises:
            InternalError: the trial process cannot be started.
            Overloaded: the child did not begin in two attempts.
        """
        for _ in range(2):
            await self.start()
            process = self._process
            control = self._control_socket
            assert control is not None
            ours, theirs = socket.socketpair()
            # If the trial process does not receive `theirs`, reading `ours` returns
            # b"".
            with theirs, contextlib.suppress(OSError):
                socket.send_fds(control, [b"!"], [theirs.fileno()])
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            first_line = b""
            try:
                writer.write(encode_line(trial))
                with contextlib.suppress(TimeoutError):
                    first_line = await asyncio.wait_for(_read_line(reader), _MAX_WAIT_S)
            finally:
                if not first_line:
                    writer.transport.abort()
            if first_line:
                return reader, writer
            if self._process is process:
                self.close()
        raise Overloaded(
            "The process that tries schemas and grammars does not respond; try again."
        )


def _trial_queue_full(num_waiting: int) -> GrammarQueueFull:
    return GrammarQueueFull(
        f"{num_waiting} requests with new schemas or grammars wait in the trial queue; "
        f"the limits are {MAX_WAITING_TRIALS} requests and a wait of "
        f"{_MAX_WAIT_S:g} s; try again later, or send schemas that were accepted "
        "before",
        _MAX_WAIT_S / 2,
    )


def _spawn_trial_process(
    folder: Path,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a trial process, and wait until it can try grammars.

    Args:
        folder: the directory of the model.

    Returns:
        The trial process, and the socket connected to this process.

    Raises:
        InternalError: the process did not start within _START_TIMEOUT_S.
    """
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
        raise InternalError(
            "The process that tries schemas and grammars did not start within "
            f"{_START_TIMEOUT_S:g} s; see the server's log."
        )
    control.setblocking(False)
    return process, control


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line; b"" if the connection is closed."""
    try:
        return await reader.readline()
    except OSError:
        return b""


def _grammar_key(grammar: Grammar) -> bytes:
    encoded = msgspec.msgpack.encode((grammar.kind, grammar.text))
    return hashlib.blake2b(encoded, digest_size=16).digest()

"""The process that a server tries grammars in before it takes a request on. No torch here.

    HTTP process --a socket pair per try--> this process --fork--> child: compiles, tells, ends

The kernel bounds a child's memory and time, and a child ends when the other end of its socket is
closed. A grammar that exhausts the memory, overflows the stack or never ends compiling does so
here, where nobody else is served.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import sys
import threading
from typing import NoReturn

import msgspec
from llguidance import LLTokenizer

from engine.text.grammar_text import STACK_BYTES, GrammarError, check_matcher, make_matcher
from protocol.messages import Grammar

_PAGE_BYTES = resource.getpagesize()
_LENGTH = struct.Struct("<Q")


class Vocabulary(msgspec.Struct, frozen=True):
    """The first message: what grammars are tried with."""

    tokenizer: str  # the text of a tokenizer.json, or a name that llguidance knows
    eos_ids: list[int] = []
    num_tokens: int | None = None


class Try(msgspec.Struct, frozen=True):
    """The one message to a child, which says that it begins, and then of each grammar a
    Verdict; all are lines, of JSON."""

    grammars: list[Grammar]
    memory_bytes: int  # that a child may take beyond what it is born with
    cpu_s: float  # after which the kernel ends a child
    limit_s: float


class Verdict(msgspec.Struct, frozen=True):
    mistake: str | None  # why the grammar cannot be used
    nbytes: int = 0  # of memory that it takes, compiled


def packed(message: Vocabulary | Try) -> bytes:
    """A message with its length in front."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def _receive(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        return stream.read(length)


def main() -> None:
    """Serves the socket whose number is the only argument, until its other end is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    told = msgspec.msgpack.decode(_receive(control), type=Vocabulary)
    tokenizer = LLTokenizer(told.tokenizer, n_vocab=told.num_tokens, eos_token=told.eos_ids or None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    judge(tokenizer, Grammar("json_object"))  # what all grammars need is there from now on
    gc.freeze()
    control.send(b"!")
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with contextlib.suppress(OSError):  # no child for now: its socket is closed, and that tells
            if os.fork() == 0:
                control.close()
                _try(socket.socket(fileno=descriptors[0]), tokenizer)
        os.close(descriptors[0])


def _try(connection: socket.socket, tokenizer: LLTokenizer) -> NoReturn:
    try:
        asked = msgspec.msgpack.decode(_receive(connection), type=Try)
        signal.setitimer(signal.ITIMER_PROF, asked.cpu_s)
        signal.setitimer(signal.ITIMER_REAL, asked.limit_s)
        _silence()
        most = _memory_bytes(0) + STACK_BYTES + asked.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        threading.stack_size(STACK_BYTES)
        threading.Thread(target=_judge_all, args=(connection, tokenizer, asked.grammars)).start()
        connection.recv(1)  # nothing, once the answer is there, or nobody wants it any more
    finally:
        os._exit(0)


def _silence() -> None:
    """What Rust says of a panic or of memory that ran out is no news for the server's log."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())


def _judge_all(connection: socket.socket, tokenizer: LLTokenizer, grammars: list[Grammar]) -> None:
    try:
        connection.sendall(b"{}\n")
        for grammar in grammars:
            connection.sendall(msgspec.json.encode(judge(tokenizer, grammar)) + b"\n")
    except BaseException:  # Rust's panics are none of Python's exceptions
        os._exit(1)


def judge(tokenizer: LLTokenizer, grammar: Grammar) -> Verdict:
    """Compiles a grammar and finds the first mask."""
    before = _memory_bytes(1)
    try:
        matcher = make_matcher(tokenizer, grammar)
        check_matcher(matcher, tokenizer)
    except GrammarError as error:
        return Verdict(str(error))
    return Verdict(None, max(0, _memory_bytes(1) - before))


def _memory_bytes(column: int) -> int:
    """Of this process: 0, its address space; 1, what of it is resident."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * _PAGE_BYTES


if __name__ == "__main__":
    main()

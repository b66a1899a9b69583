"""Compiles a grammar's text to a matcher, and tries grammars in a separate process.

    HTTP process --one socket pair per trial--> trial process --fork--> child:
                                                compiles, sends verdicts, exits

The trial process runs `main` of this module, which does not import torch. The operating
system's kernel limits the memory and time of a child. A child exits when the other end
of its socket is closed. A grammar may exhaust the memory, overflow the stack or never
finish compiling. Such a grammar ends only the child that tries it, and affects no other
request.

Grammars for JSON limit the number of whitespace characters between JSON's tokens.
Otherwise, a model that begins to write spaces could continue until `max_tokens`.
"""

import contextlib
import gc
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.text.schema.compile import (
    calls_grammar,
    schema_grammar,
    with_checked_schemas,
)
from engine.text.schema.errors import TOO_COMPLEX, GrammarError, reworded
from engine.text.schema.locate import located_problem
from engine.text.tokenizer import NO_TEMPLATE, Tokenizer
from protocol.messages import Grammar

MAX_GRAMMAR_CHARS = 128 * 1024
# Converting GBNF to Lark syntax takes quadratic time: 0.7 s for this size.
MAX_GBNF_CHARS = 16 * 1024
MAX_MASK_S = 0.5  # limit of CPU seconds for the first mask of a grammar

# max_lexer_states: a state takes 1 to 2 kB and is created when an output reaches it.
# step_max_items: the time of a mask grows with the square of the parser's items for the
# mask. A choice of 1,024 texts stays below this limit. verbose_errors: clients receive
# the error messages, so the messages are short.
_PARSER_LIMITS = LLParserLimits(
    max_lexer_states=50_000, step_max_items=10_000, verbose_errors=False
)

# Matches the texts that llguidance treats as Lark syntax. llguidance's own pattern
# takes minutes for a text of 100,000 empty lines.
_LARK_START = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)

# llguidance, which is written in Rust, follows chains of rules by recursion. A stack
# overflow in Rust kills the process. The longest chain that fits in MAX_GRAMMAR_CHARS
# takes a third of this stack.
STACK_BYTES = 64 * 2**20

_PAGE_BYTES = resource.getpagesize()


def compiling_threads(name: str, count: int) -> ThreadPoolExecutor:
    """Return a pool of threads with stacks that are large enough for `make_matcher`."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    default_size = threading.stack_size(STACK_BYTES)
    # The barrier makes the pool start all threads before the default size is restored.
    all_started = threading.Barrier(count)
    for future in [pool.submit(all_started.wait) for _ in range(count)]:
        future.result()
    threading.stack_size(default_size)
    return pool


def build_vocabulary(
    tokenizer: Tokenizer, num_tokens: int | None = None
) -> LLTokenizer:
    """Return the vocabulary that matchers need. A large one takes a second to build.

    Args:
        num_tokens: the size of the vocabulary, at least the tokenizer's `vocab_size`;
            None: the tokenizer's `vocab_size`.
    """
    # Leave out end tokens with ids beyond the tokenizer's ids, in the padding of the
    # model's vocabulary.
    end_ids = [end_id for end_id in tokenizer.eos_ids if end_id < tokenizer.vocab_size]
    num_tokens = num_tokens or tokenizer.vocab_size
    return LLTokenizer(
        tokenizer.to_json(), n_vocab=num_tokens, eos_token=end_ids or None
    )


def make_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Return a matcher at the beginning of `grammar`.

    The calling thread needs a stack of STACK_BYTES. llguidance releases the GIL, so
    other threads can run.

    Raises:
        GrammarError: the grammar has a mistake or is too large.
    """
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(
            f"it has {len(grammar.text)} characters; the limit is {MAX_GRAMMAR_CHARS}"
        )
    try:
        source = _with_reasoning_and_calls(_to_llguidance(grammar), grammar)
    except RecursionError:
        raise GrammarError("it is nested too deeply; send a flatter one") from None
    except GrammarError:
        raise
    # The converters raise exceptions of several types. All are caused by the text.
    except Exception as error:
        raise GrammarError(_one_line(reworded(str(error)))) from None
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_PARSER_LIMITS)
    if matcher.is_error():
        problem = reworded(matcher.get_error())
        if grammar.kind == "json_schema":
            problem = located_problem(grammar.text, problem)
        raise GrammarError(_one_line(problem))
    return matcher


def _to_llguidance(grammar: Grammar) -> str:
    """Return a request's grammar in the syntax of llguidance.

    Raises:
        GrammarError: a schema cannot be enforced, or the text is too long.
    """
    match grammar.kind:
        case "any":
            return LLMatcher.grammar_from_regex(r"(.|\n)*")
        case "json_object":
            return schema_grammar('{"type": "object"}')
        case "json_schema":
            return schema_grammar(grammar.text)
        case "calls":
            return calls_grammar(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            texts = (
                json.dumps(choice, ensure_ascii=False)
                for choice in json.loads(grammar.text)
            )
            # Lark accepts JSON's spelling of every character except DEL.
            quoted = " | ".join(text.replace("\x7f", r"\u007f") for text in texts)
            return LLMatcher.grammar_from_lark(f"start: {quoted}")
        case "grammar" if _LARK_START.search(grammar.text):
            return LLMatcher.grammar_from_lark(with_checked_schemas(grammar.text))
        case "grammar" if len(grammar.text) > MAX_GBNF_CHARS:
            raise GrammarError(
                "it has no rule `start:`, so it is read as GBNF; it has "
                f"{len(grammar.text)} characters, and the limit for GBNF is "
                f"{MAX_GBNF_CHARS}"
            )
        case "grammar":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))


_BLANKS = r"/[ \n\r\t]{0,4}/"
# The part of the start rule that allows reasoning, by `Grammar.reasoning`.
_THOUGHTS = {
    "": "",
    "open": "thoughts ",
    "perhaps": f'{_BLANKS} ("<think>" thoughts)? ',
}
# The harmony format of gpt-oss. Tags are tokens. The recipient of a call may precede or
# follow the channel. If calls are allowed, %s is replaced by " | call" and
# `_HARMONY_CALL`.
_HARMONY = r"""start: (<|start|> "assistant")? thought* said
thought: <|channel|> "analysis" <|message|> /(.|\n)*/ <|end|> <|start|> "assistant"
said: <|channel|> "final" type <|message|> @answer%s
type: (" "? <|constrain|> /[a-z]+/)?
"""
_HARMONY_CALL = r"""
call: (to channel | channel to) /( [a-z]+)?/ type <|message|> /(.|\n)*/
channel: <|channel|> /analysis|commentary/
to: """


def _with_reasoning_and_calls(source: str, grammar: Grammar) -> str:
    """Return a grammar that also allows reasoning before the answer, or calls instead.

    Args:
        source: the grammar of only the answer, in the syntax of llguidance.
        grammar: the request's grammar. Its `reasoning` and `calls` specify what else
            the output may contain.
    """
    if not (grammar.reasoning or grammar.calls):
        return source
    tags = [
        json.dumps(tag) if isinstance(tag, str) else f"<[{tag}]>"
        for tag in grammar.calls
    ]
    is_lark = not source.lstrip().startswith("{")
    first, *others = (
        [{"lark_grammar": source}] if is_lark else json.loads(source)["grammars"]
    )
    if grammar.reasoning == "harmony":
        lark = _HARMONY % (" | call" + _HARMONY_CALL + " | ".join(tags) if tags else "")
    else:
        calls = f" | {_BLANKS} ({' | '.join(tags)}) /(.|\\n)*/" if tags else ""
        lark = (
            f"start: {_THOUGHTS[grammar.reasoning]}said\nsaid: @answer{calls}\n"
            "thoughts: until_end /[ \\n\\r\\t]{0,8}/\n"
            'until_end[suffix="</think>"]: /(.|\\n)*/'
        )
    return json.dumps(
        {"grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *others]}
    )


def _check(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Check the first mask of a matcher.

    Raises:
        GrammarError: no token can be sampled, the mask takes more than MAX_MASK_S, or
            only the empty text matches.
    """
    start_s = time.thread_time()
    first_mask = int.from_bytes(matcher.compute_bitmask(), "little")
    seconds = time.thread_time() - start_s
    if matcher.is_error():
        reason = matcher.get_error().lower()
        is_too_complex = "too many" in reason or "too complex" in reason
        raise GrammarError(
            TOO_COMPLEX if is_too_complex else "no text matches it; correct it"
        )
    if seconds > MAX_MASK_S:
        raise GrammarError(
            f"it is too ambiguous: finding its possible first tokens takes "
            f"{seconds:.2f} s, and the limit is {MAX_MASK_S:g} s; send a simpler one"
        )
    if first_mask == 1 << tokenizer.eos_token:
        raise GrammarError("only the empty text matches it; correct it")


def _one_line(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


# -- The process that tries grammars -------------------------------------------------


class Trial(msgspec.Struct, frozen=True):
    """The only message from the HTTP process to a child. Each message is a JSON line.

    The child sends an empty object when it begins, then one Verdict for each grammar.

    Attributes:
        memory_bytes: the memory that the child may allocate after its start.
        cpu_s: CPU seconds after which the kernel kills the child.
        wall_clock_s: seconds after which the kernel kills the child.
    """

    grammars: list[Grammar]
    memory_bytes: int
    cpu_s: float
    wall_clock_s: float


class Verdict(msgspec.Struct, frozen=True):
    """The result of trying one grammar.

    Attributes:
        mistake: why the grammar cannot be used; None if it can be used.
        nbytes: the memory of the compiled grammar, in bytes.
    """

    mistake: str | None
    nbytes: int = 0


def encode_line(message: Trial | Verdict) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def main() -> None:
    """Run the trial process until the HTTP process closes its socket.

    The arguments of the command line are the socket's file descriptor and the directory
    of the model, which has the vocabulary for the trials.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    tokenizer = build_vocabulary(Tokenizer(sys.argv[2], NO_TEMPLATE))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # This trial initializes data that every trial needs. Children inherit the data.
    try_grammar(tokenizer, Grammar("json_object"))
    gc.freeze()
    control.send(b"!")
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        # If the fork fails, the HTTP process notices that the socket is closed.
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                control.close()
                _run_trial(socket.socket(fileno=descriptors[0]), tokenizer)
        os.close(descriptors[0])


def _run_trial(connection: socket.socket, tokenizer: LLTokenizer) -> NoReturn:
    """Run the trial of this child process, then exit."""
    try:
        trial = msgspec.json.decode(connection.makefile("rb").readline(), type=Trial)
        signal.setitimer(signal.ITIMER_PROF, trial.cpu_s)
        signal.setitimer(signal.ITIMER_REAL, trial.wall_clock_s)
        # Discard stderr. Rust's messages about panics and exhausted memory would
        # confuse readers of the log.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        max_bytes = _memory_bytes(0) + STACK_BYTES + trial.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        threading.stack_size(STACK_BYTES)
        threading.Thread(
            target=_try_all, args=(connection, tokenizer, trial.grammars)
        ).start()
        # The HTTP process closes the socket when it needs no more verdicts.
        connection.recv(1)
    finally:
        os._exit(0)


def _try_all(
    connection: socket.socket, tokenizer: LLTokenizer, grammars: list[Grammar]
) -> None:
    """Try all grammars, and send a verdict for each. Exit the process on any error."""
    try:
        connection.sendall(b"{}\n")
        for grammar in grammars:
            connection.sendall(encode_line(try_grammar(tokenizer, grammar)))
    except BaseException:  # Rust's panics do not derive from Exception
        os._exit(1)


def try_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> Verdict:
    """Compile a grammar, check its first mask, and return the verdict."""
    bytes_before = _memory_bytes(1)
    try:
        _check(make_matcher(tokenizer, grammar), tokenizer)
    except GrammarError as error:
        return Verdict(str(error))
    return Verdict(None, max(_PAGE_BYTES, _memory_bytes(1) - bytes_before))


def _memory_bytes(column: int) -> int:
    """Return a memory size of this process in bytes.

    Args:
        column: 0 for the address space, 1 for the resident set size.
    """
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * _PAGE_BYTES


if __name__ == "__main__":
    main()

"""A request on a decode engine waits until its grammar is compiled.

The lease on the request's KV may expire during this wait.
"""

import json
import threading
from collections.abc import Iterator

import pytest

from engine.text.grammar import _NUM_COMPILING_THREADS, GrammarCompiler
from engine.text.tokenizer import Tokenizer
from protocol.messages import AbortRequest, Grammar, SamplingParams
from tests.engine.conftest import compiling
from tests.make_models import ensure_model
from tests.rigs.engine_pair import Pair
from tests.rigs.shadow import expected_output


class BlockedPair:
    """A pair with a decode engine that compiles no grammar before `unblock` is set."""

    def __init__(self, pair: Pair, compiler: GrammarCompiler) -> None:
        self.pair = pair
        self.unblock = threading.Event()
        for _ in range(_NUM_COMPILING_THREADS):
            compiler._compiling.submit(self.unblock.wait)
        pair.d.core.grammars.compiler = compiler

    def submit(self, prompt: list[int], grammar: Grammar) -> str:
        sampling = SamplingParams(temperature=0.0, grammar=grammar)
        name = self.pair.submit(prompt, self.pair.prefill(prompt), sampling=sampling)
        for _ in range(5):
            self.pair.d.core.round([])
        assert not self.pair.d.out.deltas
        return name

    def end(self, name: str) -> tuple[list[int], str | None, str | None]:
        """Returns the tokens of a request, its finish reason and its error code."""
        end = self.pair.terminal_delta(name)
        return (
            self.pair.d.out.tokens(name),
            end.finish_reason,
            end.error and end.error.code,
        )


@pytest.fixture
def blocked(pair: Pair) -> Iterator[BlockedPair]:
    with compiling() as compiler:
        blocked = BlockedPair(pair, compiler)
        yield blocked
        blocked.unblock.set()


@pytest.fixture(scope="module")
def prompt_and_first_token() -> tuple[list[int], int, str]:
    """A prompt, the first token that the prefill server draws, and the token's text,
    which is alphanumeric."""
    tokenizer = Tokenizer(ensure_model("gqa"))
    for first in range(100):
        prompt = [first, 1, 2, 3, 4]
        token = expected_output(prompt, 1)[0]
        text = tokenizer.decode([token])
        if text.isascii() and text.isalnum():
            return prompt, token, text
    raise AssertionError("no prompt has an alphanumeric first token")


@pytest.mark.parametrize("lease_expires", [False, True])
def test_request_with_a_grammar_that_the_first_token_completes_pulls_nothing(
    blocked, prompt_and_first_token, lease_expires
):
    prompt, token, text = prompt_and_first_token
    name = blocked.submit(prompt, Grammar("choice", json.dumps([text])))
    if lease_expires:
        blocked.pair.now_s += 1e6
        blocked.pair.until(blocked.pair.p.has_all_blocks_free)
    blocked.unblock.set()
    assert blocked.end(name) == ([token], "stop", None)
    assert lease_expires or blocked.pair.d.kv(name) == (0, 0, 0)


@pytest.mark.parametrize(
    ("regex", "end"),
    [("a+", ([], "abort", None)), ("[!", ([], None, "grammar_failed"))],
)
def test_lease_ends_after_an_abort_or_an_invalid_grammar(
    blocked, prompt_and_first_token, regex, end
):
    prompt, _, _ = prompt_and_first_token
    name = blocked.submit(prompt, Grammar("regex", regex))
    if end[1] == "abort":
        blocked.pair.d.core.round([AbortRequest(name)])
    else:
        blocked.unblock.set()
    assert blocked.end(name) == end
    blocked.pair.settle()

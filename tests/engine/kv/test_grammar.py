"""A decode engine whose request waits for its grammar while the lease runs on."""

import json
import threading
from collections.abc import Iterator

import pytest

from engine.text.grammar import _NUM_COMPILING, GrammarCompiler
from engine.text.tokenizer import Tokenizer
from protocol.messages import AbortRequest, Grammar, SamplingParams
from tests.engine.conftest import compiling
from tests.make_models import ensure_model
from tests.rigs.engine_pair import Pair
from tests.rigs.shadow import expected_output


class Waiting:
    """A pair whose decode engine compiles nothing before `go_on` is set."""

    def __init__(self, pair: Pair, compiler: GrammarCompiler) -> None:
        self.pair = pair
        self.go_on = threading.Event()
        for _ in range(_NUM_COMPILING):
            compiler._compiling.submit(self.go_on.wait)
        pair.d.core.grammars.compiler = compiler

    def submit(self, prompt: list[int], grammar: Grammar) -> str:
        sampling = SamplingParams(temperature=0.0, grammar=grammar)
        name = self.pair.submit(prompt, self.pair.prefill(prompt), sampling=sampling)
        for _ in range(5):
            self.pair.d.core.round([])
        assert not self.pair.d.out.deltas
        return name

    def end(self, name: str) -> tuple[list[int], str | None, str | None]:
        """Tokens, finish reason and error of the one end of a request."""
        end = self.pair.end(name)
        return (
            self.pair.d.out.tokens(name),
            end.finish_reason,
            end.error and end.error.code,
        )


@pytest.fixture
def waiting(pair: Pair) -> Iterator[Waiting]:
    with compiling() as compiler:
        waiting = Waiting(pair, compiler)
        yield waiting
        waiting.go_on.set()


@pytest.fixture(scope="module")
def told() -> tuple[list[int], int, str]:
    """A prompt whose first token, as the prefill server draws it, is a plain character."""
    tokenizer = Tokenizer(ensure_model("gqa"))
    prompts = ([n, 1, 2, 3, 4] for n in range(100))
    drawn = ((prompt, expected_output(prompt, 1)[0]) for prompt in prompts)
    texts = ((prompt, token, tokenizer.decode([token])) for prompt, token in drawn)
    return next(one for one in texts if one[2].isascii() and one[2].isalnum())


@pytest.mark.parametrize("lease_ends", [False, True])
def test_the_first_token_completes_a_grammar_and_nothing_is_pulled(
    waiting, told, lease_ends
):
    prompt, token, text = told
    name = waiting.submit(prompt, Grammar("choice", json.dumps([text])))
    if lease_ends:  # meanwhile
        waiting.pair.now_s += 1e6
        waiting.pair.until(waiting.pair.p.has_all_blocks_free)
    waiting.go_on.set()
    assert waiting.end(name) == ([token], "stop", None)
    assert lease_ends or waiting.pair.d.kv(name) == (0, 0, 0)


@pytest.mark.parametrize(
    ("regex", "ends"),
    [("a+", ([], "abort", None)), ("[!", ([], None, "grammar_failed"))],
)
def test_an_abort_meanwhile_or_a_mistake_gives_the_lease_back(
    waiting, told, regex, ends
):
    name = waiting.submit(told[0], Grammar("regex", regex))
    if ends[1] == "abort":
        waiting.pair.d.core.round([AbortRequest(name)])
    else:
        waiting.go_on.set()
    assert waiting.end(name) == ends
    waiting.pair.settle()

"""Token masks equal a search over the vocabulary. Complete grammars end sequences."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from msgspec.structs import replace

import engine.text.grammar as grammar_module
from engine.sampling.token_masks import Int32s
from engine.text.grammar import COMPLETE, GrammarCompiler, GrammarState
from engine.text.tokenizer import Tokenizer
from protocol.errors import GrammarFailed
from protocol.messages import AddRequest, Grammar, GrammarKind, SamplingParams
from tests.engine.conftest import compiling
from tests.make_models import ensure_model
from tests.rigs.shadow import masks_of

VOCAB = 512  # the model's logits, a few more than the tokenizer has tokens
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 4},
    "ok": {"type": "boolean"},
    "list": {"type": "array", "items": {"enum": [1, "two"]}, "maxItems": 2}},
    "required": ["name", "ok", "list"], "additionalProperties": False,
}  # fmt: skip
CHOICES = ["red", "reddish", "blue", "a longer one"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ensure_model("gqa"))


def request(
    kind: GrammarKind, text: str, *, stop: tuple[int, ...] = (2,), min_tokens: int = 0
) -> AddRequest:
    return AddRequest(
        request_id="a",
        token_ids=[5, 6],
        sampling=SamplingParams(grammar=Grammar(kind, text), min_tokens=min_tokens),
        max_tokens=100,
        stop_token_ids=list(stop),
    )


def allowed(compiler: GrammarCompiler, state: GrammarState) -> set[int]:
    bits = masks_of(compiler, [None, state])
    assert bits.shape == (2, VOCAB // 32) and bits.dtype == np.int32
    assert (bits[0] == -1).all()
    return set(
        np.unpackbits(bits[1].view(np.uint8), bitorder="little").nonzero()[0].tolist()
    )


@pytest.mark.parametrize(
    ("kind", "text", "may_continue"),
    [
        (
            "choice",
            json.dumps(CHOICES),
            lambda t: any(c.startswith(t) for c in CHOICES),
        ),
        (
            "regex",
            "[0-9]{1,3}x?",
            lambda t: t.removesuffix("x").isdigit() and len(t.removesuffix("x")) <= 3,
        ),
    ],
)
def test_masks_equal_a_search_over_the_vocabulary(
    compiler, tokenizer, kind, text, may_continue
):
    """On random walks, the allowed tokens are those after which a match is possible.

    If only one text is possible, only the canonical tokens of this text are allowed."""
    assert tokenizer.token_bytes is not None
    rng = random.Random(0)
    texts = {
        i: raw.decode()
        for i, raw in enumerate(tokenizer.token_bytes)
        if raw.isascii() and raw and i not in tokenizer.special_ids
    }
    for _ in range(10):
        state = compiler.new_state(request(kind, text))
        outputs = [5, 6]
        output = ""
        while state.consume(outputs, 2) is None:
            actual = allowed(compiler, state)
            expected = {i for i, more in texts.items() if may_continue(output + more)}
            if len({texts[i][0] for i in expected}) > 1:
                assert actual - {2} == expected
            else:
                assert actual <= expected | {2} and (actual or not expected)
            token = rng.choice(sorted(actual))
            if token == 2:
                break
            outputs.append(token)
            output += texts[token]
        if kind == "choice":
            assert output in CHOICES


def test_banned_words_depend_on_the_drawn_tokens(compiler, tokenizer):
    """A word of several tokens is banned at its last token, even if the state has
    undone earlier outputs."""
    a, b, c = (tokenizer.encode(char)[0] for char in "abc")
    words = ((c,), (a, b), (b, b, b))

    def after(grammar: Grammar, *outputs: int) -> set[int] | None:
        state = compiler.new_state(
            replace(request("any", ""), sampling=SamplingParams(grammar=grammar))
        )
        for drawn in (outputs, (), outputs):  # the second call undoes all outputs
            assert state.consume([5, 6, *drawn], 2) is None
            actual = allowed(compiler, state)
        return actual if state.ending is None else None

    limited = Grammar("any", allowed=(a, b, c), banned=words)
    allowed_after = [
        after(limited, *outputs) for outputs in ((a,), (b,), (b, b), (b, b, a))
    ]
    assert allowed_after == [{a}, {a, b}, {a}, {a}]
    assert after(Grammar("any", banned=words), b, b) == set(range(VOCAB)) - {b, c}
    assert after(Grammar("any", allowed=(b,), banned=words), b, b) is None, (
        "no token is left"
    )
    both = Grammar("choice", json.dumps(["ab", "bc", "bab"]), banned=words)
    assert after(both, b) == {a}


def test_number_of_blanks_is_limited(compiler, tokenizer):
    state = compiler.new_state(request("json_object", ""))
    (blank,) = tokenizer.encode(" ")
    outputs = tokenizer.encode("{")
    while (
        blank in allowed(compiler, state)
        if state.consume(outputs, 0) is None
        else False
    ):
        outputs.append(blank)
        assert len(outputs) < 100
    assert len(outputs) > 2 and allowed(compiler, state)


_END = 2


@pytest.mark.parametrize(
    ("kind", "text", "stop", "min_tokens", "output", "expected"),
    [
        # An end token is allowed only if the text is complete and the token ends the
        # request.
        ("choice", '["a", "ab"]', "", 0, "", "a"),
        ("choice", '["a", "ab"]', "", 0, "a", "b$"),
        # No end token is needed, because no text can follow.
        ("choice", '["a", "ab"]', "", 0, "ab", COMPLETE),
        ("regex", "a+", None, 0, "a", "a"),
        ("regex", "[ab]?", None, 0, "a", COMPLETE),
        # Before min_tokens, stop tokens are banned unless no other token could follow.
        ("regex", "ab?", "b", 2, "a", COMPLETE),
        ("regex", "a[bc]?", "b", 2, "a", "c"),
        ("choice", '["a"]', "", 0, "b", GrammarFailed),
        ("regex", "a?", "a", 1, "", GrammarFailed),  # the text is empty so far
    ],
)
def test_allowed_tokens_and_endings(
    compiler, tokenizer, kind, text, stop, min_tokens, output, expected
):
    """`expected` is the ending, or the tokens that may follow. $ is the end token."""
    stop_ids = () if stop is None else (_END, *tokenizer.encode(stop))
    state = compiler.new_state(
        request(kind, text, stop=stop_ids, min_tokens=min_tokens)
    )
    state.consume(tokenizer.encode(output), 0)
    actual = allowed(compiler, state)
    if isinstance(expected, str):
        assert state.ending is None
        shown = {"$" if i == _END else tokenizer.decode([i]) for i in actual}
        assert {one for one in shown if len(one) == 1} == set(expected)
        return
    assert len(actual) == VOCAB, "a sequence that has ended allows any token"
    assert state.ending is not None
    if expected is COMPLETE:
        assert state.ending is COMPLETE
    else:
        assert isinstance(state.ending.error, expected)


@pytest.mark.parametrize("first", ["{", "no beginning"])
def test_state_is_a_function_of_the_outputs(compiler, tokenizer, first):
    """The state is the same if outputs arrive one by one or all at once, and if other
    outputs were undone before."""
    json_request = request("json_schema", json.dumps(SCHEMA))
    outputs = [5, 6, *tokenizer.encode('{"name": "x')]
    steps, at_once, taken_back = (compiler.new_state(json_request) for _ in range(3))
    for end in range(2, len(outputs) + 1):
        steps.consume(outputs[:end], 2)
    at_once.consume(outputs, 2)
    taken_back.consume([5, 6, *tokenizer.encode(first)], 2)
    taken_back.consume([5, 6], 2)
    taken_back.consume(outputs, 2)
    masks = [allowed(compiler, state) for state in (steps, at_once, taken_back)]
    assert masks[0] == masks[1] == masks[2] != set()


def test_grammar_survives_a_full_lexer(monkeypatch, tokenizer):
    """Sequences of a cached grammar share a lexer with a limited number of states."""
    limited = LLParserLimits(max_lexer_states=1000)
    monkeypatch.setattr("engine.text.grammar_compile._PARSER_LIMITS", limited)
    a, b = (tokenizer.encode(char)[0] for char in "ab")
    rng = random.Random(1)
    with compiling() as compiler:
        states = [
            compiler.new_state(request("regex", "(a|b)*a(a|b){200}c")) for _ in range(4)
        ]
        outputs: list[list[int]] = [[] for _ in states]
        for _ in range(300):
            for state, drawn in zip(states, outputs, strict=True):
                assert {a, b} <= allowed(compiler, state), state.ending
                drawn.append(rng.choice((a, b)))
                assert state.consume([5, *drawn], 1) is None


def _rows_after(state: GrammarState, tokens: list[int], *proposals: int) -> list[bytes]:
    """The masks after proposals, computed in another thread."""
    with ThreadPoolExecutor(1) as threads:
        state.begin_mask(tokens, 2, threads, proposals)
    return [row.tobytes() for row in state.rows_after(proposals)]


def test_masks_after_proposals_are_those_of_states_that_consumed_them(
    compiler, tokenizer
):
    request_ = request("choice", json.dumps(CHOICES))
    tokens = tokenizer.encode("a longer one")
    prompt = [5, 6]
    state = compiler.new_state(request_)
    expected = []
    for count in range(1, len(tokens)):
        other = compiler.new_state(request_)
        other.consume([*prompt, *tokens[:count]], 2)
        other._advance([], fill=True)
        expected.append(other.row.tobytes())
    assert _rows_after(state, prompt, *tokens) == expected, "the last one ends the text"
    first_row = state.row.tobytes()
    assert _rows_after(state, prompt, *tokens[:2]) == expected[:2]
    assert state.row.tobytes() == first_row, "proposals leave no trace"
    (blue,) = tokenizer.encode("blue")[:1]
    assert _rows_after(state, prompt, tokens[0], blue, blue) == expected[:1]
    assert state.rows_after(tuple(tokens[:2])) == [], "computed for other proposals"
    assert _rows_after(state, [*prompt, tokens[0]], *tokens[1:]) == expected[1:]


def test_slow_masks_are_not_computed_for_proposals(compiler, tokenizer, monkeypatch):
    """Slow masks for proposals would count towards the time limit of the next mask. So
    a request that succeeds without proposals could fail."""
    num_masks = 0
    fill = grammar_module._fill

    def slow_fill(matcher: LLMatcher, row: Int32s) -> float:
        nonlocal num_masks
        num_masks += 1
        fill(matcher, row)
        return 2 * grammar_module._SLOW_MASK_S

    state = compiler.new_state(request("choice", json.dumps(["a slow choice", "b"])))
    first, *proposals = tokenizer.encode("a slow choice")
    assert len(proposals) > 2
    monkeypatch.setattr(grammar_module, "_fill", slow_fill)
    assert _rows_after(state, [5, 6, first], *proposals) == []
    assert num_masks == 1


def test_grammar_is_compiled_once_on_another_thread():
    called = threading.Event()
    compiler = GrammarCompiler(ensure_model("gqa"), VOCAB, called.set)
    grammar = Grammar("regex", "[ab]+")
    compiler.compile(grammar)
    assert called.wait(30)
    assert compiler.compile(grammar).done()
    first, second = (compiler.new_state(request("regex", "[ab]+")) for _ in range(2))
    first.consume([5], 0)
    assert first.ending is not None and second.consume([], 0) is None
    compiler.close()


def test_grammar_cache_is_bounded_in_bytes(compiler):
    large = Grammar("regex", "a+b")
    larger = Grammar("regex", "b+a")
    first = compiler.compile(large, nbytes=150 << 20)
    assert compiler.compile(large) is first
    compiler.compile(larger, nbytes=150 << 20)
    assert compiler.compile(large) is not first


def test_masks_of_grammars_without_text_count_in_the_cache(monkeypatch):
    monkeypatch.setattr("engine.text.grammar._MAX_CACHED_BYTES", 100_000)
    compiler = GrammarCompiler(ensure_model("gqa"), 128_000, lambda: None)
    first, *others = (
        compiler.compile(Grammar("any", allowed=(i,))) for i in range(1, 9)
    )
    for one in (first, *others):
        masks = one.result().first_mask, one.result().allowed
        assert sum(mask.nbytes for mask in masks) >= 32_000
    assert compiler.compile(Grammar("any", allowed=(8,))) is others[-1]
    assert compiler.compile(Grammar("any", allowed=(1,))) is not first
    compiler.close()


def test_model_without_a_tokenizer_has_no_grammars(tmp_path):
    compiler = GrammarCompiler(tmp_path, VOCAB, lambda: None)
    with pytest.raises(GrammarFailed, match=r"tokenizer\.json"):
        compiler.new_state(request("regex", "a"))
    compiler.close()


def test_masks_have_one_bit_per_logit_if_the_vocabulary_is_larger():
    """Ids beyond the logits cannot be sampled."""
    compiler = GrammarCompiler(ensure_model("gqa"), 300, lambda: None)
    state = compiler.new_state(request("regex", "[a-z]+"))
    assert masks_of(compiler, [state]).shape == (1, 10)
    compiler.close()


# Texts for each way in which reasoning starts. The value is True if the text is
# complete, False if it is incomplete, and None if it is not allowed.
_TEXTS_BY_START: dict[str, dict[str, bool | None]] = {
    "open": {
        'I am {"a</think>\n\nab': True, "ab": False, "I</think>b": None,
        "I</think>\n\n<call>{": False,
    },
    "perhaps": {
        "<think>hm</think>ab": True, "ab": True, "I</think>ab": None,
        "<think>hm</think> <call>": False, "\n<call>what": False,
    },
    "": {"<call>what": False, "<|im_start|>{": False, "ab": True, "I<call>": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("reasoning", "output"),
    [(start, output) for start, texts in _TEXTS_BY_START.items() for output in texts],
)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("choice", '["ab"]'),
        ("regex", "ab"),
        ("grammar", 'start: "ab"'),
        ("grammar", 'root ::= "ab"'),
    ],
)
def test_grammar_begins_after_the_reasoning_and_allows_calls(
    compiler, tokenizer, reasoning, output, kind, text
):
    """Reasoning before the answer, or a call instead of the answer, may be any text."""
    calls = ("<call>", tokenizer.id_of("<|im_start|>"))
    grammar = Grammar(kind, text, reasoning=reasoning, calls=calls)
    state = compiler.new_state(
        replace(request(kind, text), sampling=SamplingParams(grammar=grammar))
    )
    is_complete = _TEXTS_BY_START[reasoning][output]
    outputs = list[int]()
    for token_id in tokenizer.encode(output, add_special_tokens=False):
        if token_id not in allowed(compiler, state):
            assert is_complete is None
            return
        outputs.append(token_id)
        ending = state.consume(outputs, 0)
    assert (ending is COMPLETE) == is_complete and is_complete is not None

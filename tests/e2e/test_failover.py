"""A decode server is lost during an answer, and the client does not notice.

The servers and the faults are real. (tests/engine/test_resume.py cuts streams after
each frame, without real servers.) A slow test has every fault at every position of
every kind of answer. `test_answer_survives_a_fault`, which always runs, has some of
these combinations.
"""

import itertools
import json
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import CACHED_TOKENS, FAULTS, Fleet, by_choice, kill, start_fleet
from tests.rigs.client import MODEL, fresh_prompt
from tests.rigs.cluster import wait_until
from tests.rigs.cutter import AT_ANSWER, AT_REQUEST, Hold

_NUMBER = re.compile(r"-?\d+\.\d+(e-?\d+)?")
_NUM_DECODES = 4


@pytest.fixture(scope="module")
def fleet(tiny_model: Path) -> Iterator[Fleet]:
    with start_fleet(tiny_model, _NUM_DECODES) as servers:
        yield servers


# -- answers

_SAMPLED = {
    "temperature": 1.0,
    "seed": 7,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
}
_REGEX = {"structured_outputs": {"regex": "[a-z]{4,9}( [0-9]{3}){4}"}}
_LONG_REGEX = {"structured_outputs": {"regex": "[a-z]{4,9}( [0-9]{3}){150}"}}
_MULTIBYTE_REGEX = {"structured_outputs": {"regex": "[ä-üЖ-я€]{9}"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "string", "maxLength": 8},
            },
            "required": ["a", "b"],
        },
    },
}
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": _SAMPLED,
    "n = 3": {**_SAMPLED, "n": 3},
    "structured": {**_SAMPLED, **_REGEX},
}
_POSITIONS = (
    "before token 1",
    "at token 1",
    "mid-stream",
    "in a character",
    "in a call",
    "in a grammar",
    "before a stop string",
    "at the last token",
)
_MOMENTS = ("requested", "computing", "answered")
_PROMPT = fresh_prompt(70)


def _vocabulary(model: Path) -> dict[str, int]:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    return vocabulary


def _request(kind: str, position: str, model: Path) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a request whose answer has this position. A fault
    will happen there.
    """
    body = {"model": MODEL, "max_tokens": 30, "return_token_ids": True, **_KINDS[kind]}
    is_free = kind != "structured" and position not in ("in a grammar", "in a call")
    if position in _MOMENTS:
        body["max_tokens"] = 600
        if kind == "structured":
            body |= _LONG_REGEX
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if position == "in a call":
        body.pop("structured_outputs", None)
        content = " ".join(map(str, _PROMPT[:20]))
        body |= {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 60,
            "tools": [_TOOL],
            "tool_choice": "required",
            "logprobs": True,
            "top_logprobs": 2,
        }
        return "/v1/chat/completions", body
    if position == "in a character" and is_free:  # a character with two bytes
        ids = _vocabulary(model)
        body["logit_bias"] = {str(ids[char]): 60 for char in "Ã©"}
    elif position == "in a character":
        body |= _MULTIBYTE_REGEX
    elif position == "in a grammar":
        body |= _REGEX
    return "/v1/completions", {
        **body,
        "prompt": _PROMPT,
        "logprobs": 2,
        "ignore_eos": is_free,
    }


@dataclass
class Case:
    """A request and its expected answer.

    Attributes:
        after: the number of tokens before the fault, or AT_REQUEST or AT_ANSWER, which
            are negative.
        is_running: whether the request keeps running until the fault. The fault then
            happens at an arbitrary token.
    """

    name: str
    path: str
    body: dict[str, Any]
    expected: str
    after: int
    is_running: bool


def _parse_event(line: str) -> Any:
    # Where a varying field was removed, an object may end with a comma.
    return json.loads(line.removeprefix("data: ").replace(",}", "}"))


def _tokens(stream: str) -> list[tuple[int, list[int], str]]:
    """Return the choice, the token ids and the text of each event of a stream."""
    events = []
    for line in stream.split("\n"):
        if not line.startswith("data: {"):
            continue
        for choice in _parse_event(line).get("choices", [])[:1]:
            token_ids = choice.get("token_ids") or []
            events.append((choice["index"], token_ids, choice.get("text") or ""))
    return events


def _make_case(fleet: Fleet, kind: str, position: str, model: Path) -> Case:
    path, body = _request(kind, position, model)
    fleet.request(path, body)  # puts the prompt into the prefix cache
    expected = fleet.request(path, body)
    if position == "before a stop string":
        text = "".join(text for index, _, text in _tokens(expected) if not index)
        body["stop"] = text[len(text) // 2 :][:9]
        expected = fleet.request(path, body)
    events = _tokens(expected)
    sizes = [len(ids) for _, ids, _ in events]
    after = sum(sizes) // 2
    match position:
        case "before token 1" | "requested" | "computing":
            after = AT_REQUEST
        case "answered":
            after = AT_ANSWER
        case "at token 1":
            after = 1
        case "in a character":  # after the first of its two bytes
            ids = _vocabulary(model)
            halves = [
                index
                for index, (_, token_ids, text) in enumerate(events)
                if token_ids == [ids["Ã"]] and not text
            ]
            after = sum(sizes[: halves[len(halves) // 2] + 1])
        case "before a stop string":
            firsts = [
                index
                for index, (choice, token_ids, _) in enumerate(events)
                if token_ids and not choice
            ]
            after = sum(sizes[: firsts[-1]])
        case "at the last token":
            after = sum(sizes) - 1
    return Case(
        f"{kind} {position} ({after})",
        path,
        body,
        expected,
        after,
        position == "computing",
    )


def _assert_same(answer: str, expected: str) -> None:
    """Assert that two answers are equal, except in the last bits of logprobs.

    The server that takes over computes all tokens so far in one step. Sums in matrix
    products of many rows have a different order than in those of a single row.
    """
    assert _NUMBER.sub("0.0", answer) == _NUMBER.sub("0.0", expected)
    numbers = zip(_NUMBER.finditer(answer), _NUMBER.finditer(expected), strict=True)
    assert all(abs(float(a[0]) - float(b[0])) < 1e-5 for a, b in numbers)


def _all_set(pairs: Sequence[tuple[Hold, Future[str]]], event: str) -> bool:
    """Whether for each pair, the named event of the hold is set or the answer has
    ended.
    """
    return all(getattr(hold, event).is_set() or answer.done() for hold, answer in pairs)


def _differences(fleet: Fleet, cases: Sequence[Case], fault: str) -> dict[str, str]:
    """Send the requests of all cases, cause the fault, and return the differences from
    the expected answers by case name.

    All requests go to one server. The fault happens when every request has reached its
    position.
    """
    fleet.until_ready(2)
    before = fleet.num_failovers()
    holds = [Hold(case.after, loses_bytes=fault != "SIGTERM") for case in cases]
    try:
        with fleet.single_decode_server() as cutter:
            answers = [
                fleet.pool.submit(fleet.request, case.path, case.body, hold)
                for case, hold in zip(cases, holds, strict=True)
            ]
            pairs = list(zip(holds, answers, strict=True))
            wait_until(lambda: _all_set(pairs, "requested"), 60)
        wait_until(lambda: _all_set(pairs, "reached"), 60)
        for hold, answer in pairs:
            assert hold.reached.is_set(), answer.result()
        if cases[0].is_running:
            fleet.release_holds()
            server = fleet.server_of(cutter)
            wait_until(lambda: server.metrics()["baton_requests_running"] >= len(holds))
        FAULTS[fault](fleet, cutter)
        fleet.release_holds()
        texts = [answer.result() for answer in answers]
    finally:
        fleet.resume()
    assert fault == "SIGTERM" or fleet.num_failovers() == before + len(cases)
    differences = {}
    for case, text in zip(cases, texts, strict=True):
        if case.after < 0:
            # The request starts again on another server. That server may compute cached
            # tokens again, if it cannot pull them in time.
            text = text.replace('"cached_tokens":0', '"cached_tokens":64')
        try:
            _assert_same(by_choice(text), by_choice(case.expected))
        except AssertionError as error:
            differences[case.name] = str(error)[:500]
    return differences


@pytest.mark.parametrize(
    ("fault", "kind", "position"),
    [
        ("cut", "greedy", "at token 1"),
        ("cut", "sampled", "in a call"),
        ("kill", "sampled", "in a character"),
        ("SIGSTOP", "structured", "mid-stream"),
        ("SIGTERM", "n = 3", "before a stop string"),
        ("kill", "sampled", "computing"),
        ("silence", "sampled", "mid-stream"),
    ],
)
def test_answer_survives_a_fault(fleet, tiny_model, fault, kind, position):
    assert not _differences(
        fleet, [_make_case(fleet, kind, position, tiny_model)], fault
    )


def test_message_survives_a_fault(fleet):
    content = " ".join(map(str, _PROMPT[:20]))
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 40,
        "stream": True,
        "ignore_eos": True,
        **{name: _SAMPLED[name] for name in ("temperature", "seed")},
    }
    path = "/v1/messages"
    fleet.request(path, body)  # puts the prompt into the prefix cache
    case = Case("message", path, body, fleet.request(path, body), 20, False)
    assert "event: message_stop" in case.expected
    assert not _differences(fleet, [case], "kill")


@pytest.fixture(scope="module")
def cases(fleet: Fleet, tiny_model: Path) -> dict[str, list[Case]]:
    """Return, for each position, the cases of all kinds of answers."""
    rows = list(itertools.product((*_POSITIONS, *_MOMENTS), _KINDS))
    row_cases = fleet.pool.map(
        lambda row: _make_case(fleet, row[1], row[0], tiny_model), rows
    )
    by_position: dict[str, list[Case]] = {position: [] for position, _ in rows}
    for (position, _), case in zip(rows, row_cases, strict=True):
        by_position[position].append(case)
    return by_position


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("position", (*_POSITIONS, *_MOMENTS))
def test_every_answer_survives_every_fault_at_every_position(
    fleet, cases, fault, position
):
    assert not _differences(fleet, cases[position], fault)


_KILLING_SECONDS = 300.0
_NUM_STREAMS = 24


@pytest.mark.slow
def test_streams_survive_servers_killed_at_random_times(tiny_model):
    rng = random.Random(5)
    is_over = threading.Event()
    with start_fleet(tiny_model, 3) as fleet, ThreadPoolExecutor(_NUM_STREAMS) as pool:
        barrier = threading.Barrier(_NUM_STREAMS + 1)

        def stream(index: int) -> int:
            """Repeat a request until the test is over. Return the number of right
            answers.
            """
            path, body = _stream_request(index, rng)
            fleet.request(path, body)
            expected = fleet.request(path, body)
            barrier.wait()
            num_right = 0
            while not is_over.is_set():
                # A replacement has an empty cache, so the number of cached tokens may
                # differ.
                answer = CACHED_TOKENS.sub("", fleet.request(path, body))
                undisturbed = CACHED_TOKENS.sub("", expected)
                _assert_same(by_choice(answer), by_choice(undisturbed))
                num_right += 1
            return num_right

        streams = [pool.submit(stream, index) for index in range(_NUM_STREAMS)]
        barrier.wait()
        until_s = time.monotonic() + _KILLING_SECONDS
        while time.monotonic() < until_s and not any(one.done() for one in streams):
            kill(fleet, rng.choice(fleet.cutters))
            fleet.restarts.pop().result()
            fleet.until_ready(3)
        is_over.set()
        assert min(one.result() for one in streams) >= 1
        assert fleet.num_failovers() > 10


def _stream_request(index: int, rng: random.Random) -> tuple[str, dict[str, Any]]:
    prompt = fresh_prompt(40 + 9 * index)
    body: dict[str, Any] = {"model": MODEL, "stream": True}
    num_choices = rng.choice([1, 3])
    if index % 3 == 0:
        text = " ".join(map(str, prompt[:20]))
        body |= {"max_output_tokens": 200, "temperature": 0, "input": text}
        return "/v1/responses", body
    body |= {"max_tokens": 200, **_SAMPLED, "prompt": prompt, "n": num_choices}
    return "/v1/completions", body

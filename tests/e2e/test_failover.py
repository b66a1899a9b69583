"""A decode server is lost in the middle of an answer, and the client does not notice.

tests/engine/test_resume.py cuts streams behind each frame; here are real servers and real faults.
The matrix is of every fault at every position of every kind of answer; a few of its rows are run
each time.
"""

import contextlib
import itertools
import json
import random
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import stopping
from tests.rigs.client import MODEL, TIMEOUT_S, fresh_prompt
from tests.rigs.cluster import (
    Server,
    assert_idle,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
    wait_until,
)
from tests.rigs.cutter import AT_ANSWER, AT_REQUEST, Cutter, Hold
from tests.rigs.plain_http import http

_QUICK = ("--health-interval-s", "0.1", "--health-timeout-s", "0.5")
_OWN = re.compile(
    r'"(id|item_id|created|created_at|baton_kv)":("[^"]*"|\d+|\{[^}]*\}),?'
)
_CACHED = re.compile(r'"cached_tokens":\d+')
_INDEX = re.compile(r'"choices":\[\{"index":(\d)')
_NUMBER = re.compile(r"-?\d+\.\d+(e-?\d+)?")
_NUM_DECODES = 4


@dataclass
class Fleet:
    """One prefill server, some decode servers behind relays, and the proxy."""

    prefill: Server
    decodes: list[Server]
    cutters: list[Cutter]
    proxy: Server
    restart: Callable[[], Server]
    later: contextlib.ExitStack
    holds: dict[bytes, Hold]
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))
    restarts: list[Future[None]] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)  # processes

    def server_of(self, cutter: Cutter) -> Server:
        return self.decodes[self.cutters.index(cutter)]

    def ask(self, path: str, body: dict[str, Any], hold: Hold | None = None) -> str:
        """The answer, without its ids and times."""
        name = uuid.uuid4().hex
        if hold is not None:
            self.holds[name.encode()] = hold
        answer = http.post(
            f"{self.proxy.url}{path}",
            json=body,
            timeout=TIMEOUT_S,
            headers={"x-request-id": name},
        )
        assert answer.status_code == 200, answer.text
        return _OWN.sub("", answer.text)

    @contextlib.contextmanager
    def all_at_one(self) -> Iterator[Cutter]:
        """Requests of this block all go to the same decode server."""
        told = http.get(f"{self.proxy.url}/ready", timeout=10).json()["servers"]
        names = [f"decode-{at}" for at in range(len(self.decodes))]
        chosen = next(
            name for at, name in enumerate(names) if told[name] and self._is_up(at)
        )
        self._tell_others(chosen, "drain")
        try:
            yield self.cutters[names.index(chosen)]
        finally:
            self._tell_others(chosen, "undrain")

    def _is_up(self, at: int) -> bool:
        """Asks the server itself: the proxy may not have noticed yet that it was lost."""
        with contextlib.suppress(httpx.TransportError):
            return (
                http.get(f"{self.cutters[at].url}/ready", timeout=5).status_code == 200
            )
        return False

    def _tell_others(self, chosen: str, action: str) -> None:
        for at in range(len(self.decodes)):
            if (name := f"decode-{at}") != chosen:
                url = f"{self.proxy.url}/admin/members/{action}"
                assert http.post(url, json={"server": name}).status_code == 200

    def taken_over(self) -> float:
        """How often a server took over from another one, in mid-stream or before it."""
        metrics = self.proxy.metrics()
        resumes = (n for name, n in metrics.items() if 'outcome="resumed"' in name)
        return sum(resumes) + metrics['baton_proxy_retries_total{leg="decode"}']

    def until_ready(self, least: int) -> None:
        def is_ready() -> bool:
            told = http.get(f"{self.proxy.url}/ready", timeout=10).json()
            return bool(told["decode"]["ready"] >= least)

        wait_until(is_ready, 60)

    def replace(self, cutter: Cutter) -> None:
        """Puts a new server in the place of one that ends, as soon as the new one is up."""
        at = self.cutters.index(cutter)

        def begin() -> None:
            successor = self.restart()
            self.later.enter_context(running(successor))
            assert self.decodes[at].child.exited.wait(30)
            self.decodes[at], cutter.target = successor, successor.port

        self.restarts.append(self.pool.submit(begin))

    def let_go(self) -> None:
        for hold in self.holds.values():
            hold.go.set()

    def resume(self) -> None:
        self.let_go()
        self.holds.clear()
        for cutter in self.cutters:
            cutter.mend()
        for pid in self.stopped:
            stopping.send(pid, signal.SIGCONT)
        self.stopped.clear()

    def assert_idle(self) -> None:
        """Every server is up, and holds no block of an ended request."""
        for restart in self.restarts:
            restart.result()
        self.restarts.clear()
        assert_idle(*self.decodes, self.prefill)


@contextlib.contextmanager
def _fleet(model: Path, num: int) -> Iterator[Fleet]:
    decode = partial(start_decode, model, "--shutdown-grace-s", "0.1")
    with started(partial(start_prefill, model), *[decode] * num) as (prefill, *decodes):
        holds: dict[bytes, Hold] = {}
        cutters = [Cutter(server.port, holds) for server in decodes]
        told = [arg for cutter in cutters for arg in ("--decode", cutter.url)]
        proxy = start_proxy([prefill], [], *told, *_QUICK)
        with running(proxy), contextlib.ExitStack() as later:
            fleet = Fleet(prefill, decodes, cutters, proxy, decode, later, holds)
            later.callback(fleet.pool.shutdown)
            yield fleet
            fleet.assert_idle()
            for cutter in cutters:
                cutter.close()


@pytest.fixture(scope="module")
def fleet(tiny_model: Path) -> Iterator[Fleet]:
    with _fleet(tiny_model, _NUM_DECODES) as made:
        yield made


# -- faults


def _cut(fleet: Fleet, cutter: Cutter) -> None:
    cutter.cut()
    cutter.mend()


def _stop(fleet: Fleet, cutter: Cutter) -> None:
    server = fleet.server_of(cutter)
    pids = (*server.engine_pids(), server.child.pid)
    fleet.stopped.extend(pids)
    for pid in pids:
        stopping.send(pid, signal.SIGSTOP)


def _kill(fleet: Fleet, cutter: Cutter) -> None:
    fleet.server_of(cutter).kill()
    fleet.replace(cutter)


def _end(fleet: Fleet, cutter: Cutter) -> None:
    fleet.server_of(cutter).child.signal(signal.SIGTERM)
    fleet.replace(cutter)


def _swallow(fleet: Fleet, cutter: Cutter) -> None:
    cutter.swallow()


_FAULTS = {
    "kill": _kill,
    "cut": _cut,
    "SIGTERM": _end,
    "SIGSTOP": _stop,
    "silence": _swallow,
}

# -- answers

_DRAWN = {
    "temperature": 1.0,
    "seed": 7,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
}
_REGEX = {"structured_outputs": {"regex": "[a-z]{4,9}( [0-9]{3}){4}"}}
_LONG = {"structured_outputs": {"regex": "[a-z]{4,9}( [0-9]{3}){150}"}}
_WIDE = {"structured_outputs": {"regex": "[ä-üЖ-я€]{9}"}}
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
    "sampled": _DRAWN,
    "n = 3": {**_DRAWN, "n": 3},
    "structured": {**_DRAWN, **_REGEX},
}
_POSITIONS = (
    "before token 1", "at token 1", "mid-stream", "in a character", "in a call", "in a grammar",
    "before a stop string", "at the last token",
)  # fmt: skip
_MOMENTS = ("asked for", "computed", "told")
_PROMPT = fresh_prompt(70)


def _vocabulary(model: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    return found


def _asked(kind: str, position: str, model: Path) -> tuple[str, dict[str, Any]]:
    """Endpoint and body of a request whose answer has such a position."""
    body = {"model": MODEL, "max_tokens": 30, "return_token_ids": True, **_KINDS[kind]}
    is_free = kind != "structured" and position not in ("in a grammar", "in a call")
    if position in _MOMENTS:
        body |= {"max_tokens": 600, **(_LONG if kind == "structured" else {})}
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if position == "in a call":
        body.pop("structured_outputs", None)
        said = [{"role": "user", "content": " ".join(map(str, _PROMPT[:20]))}]
        body |= {
            "messages": said,
            "max_tokens": 60,
            "tools": [_TOOL],
            "tool_choice": "required",
        }
        return "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2}
    if position == "in a character" and is_free:  # two bytes make a character
        ids = _vocabulary(model)
        body["logit_bias"] = {str(ids[each]): 60 for each in "Ã©"}
    elif position == "in a character":
        body |= _WIDE
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
    """A request, its expected answer, and the number of tokens before the row's position."""

    told: str
    path: str
    body: dict[str, Any]
    expected: str
    after: int
    is_running: bool  # then, and where it is does not count


def _read(line: str) -> Any:
    return json.loads(
        line.removeprefix("data: ").replace(",}", "}")
    )  # without what was last


def _tokens(stream: str) -> list[tuple[int, list[int], str]]:
    """Of each event: the choice, its tokens and its text."""
    found = []
    for line in stream.split("\n"):
        if line.startswith("data: {") and (choices := _read(line).get("choices")):
            one = choices[0]
            found.append(
                (one["index"], one.get("token_ids") or [], one.get("text") or "")
            )
    return found


def _case(fleet: Fleet, kind: str, position: str, model: Path) -> Case:
    path, body = _asked(kind, position, model)
    fleet.ask(path, body)  # from here on the prompt is cached
    expected = fleet.ask(path, body)
    if position == "before a stop string":
        text = "".join(text for index, _, text in _tokens(expected) if not index)
        body["stop"] = text[len(text) // 2 :][:9]
        expected = fleet.ask(path, body)
    events = _tokens(expected)
    sizes = [len(ids) for _, ids, _ in events]
    after = sum(sizes) // 2
    match position:
        case "before token 1" | "asked for" | "computed":
            after = AT_REQUEST
        case "told":
            after = AT_ANSWER
        case "at token 1":
            after = 1
        case "in a character":  # the first byte of two
            ids = _vocabulary(model)
            halves = [
                at for at, e in enumerate(events) if e[1] == [ids["Ã"]] and not e[2]
            ]
            after = sum(sizes[: halves[len(halves) // 2] + 1])
        case "before a stop string":
            firsts = [
                at for at, (index, ids, _) in enumerate(events) if ids and not index
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
        position == "computed",
    )


def _by_choice(stream: str) -> str:
    """Choices take turns as they come."""
    events = stream.split("\n\n")
    return "\n\n".join(
        sorted(events, key=lambda event: (_INDEX.findall(event) or ["9"])[0])
    )


def _assert_same(found: str, expected: str) -> None:
    """Byte for byte, but for the last bits of logprobs: whoever goes on computes the tokens so far
    in one step, and a product of many rows sums in another order than one of a single row."""
    assert _NUMBER.sub("0.0", found) == _NUMBER.sub("0.0", expected)
    pairs = zip(_NUMBER.finditer(found), _NUMBER.finditer(expected), strict=True)
    assert all(abs(float(a[0]) - float(b[0])) < 1e-5 for a, b in pairs)


def _wrong(fleet: Fleet, cases: Sequence[Case], fault: str) -> dict[str, str]:
    """Of answers all asked of one server, which is at fault when each is where it is to be."""
    fleet.until_ready(2)
    before = fleet.taken_over()
    holds = [Hold(case.after, loses=fault != "SIGTERM") for case in cases]
    try:
        with fleet.all_at_one() as cutter:
            asked = [
                fleet.pool.submit(fleet.ask, case.path, case.body, hold)
                for case, hold in zip(cases, holds, strict=True)
            ]
            ends = list(zip(holds, asked, strict=True))
            wait_until(
                lambda: all(hold.asked.is_set() or one.done() for hold, one in ends), 60
            )
        wait_until(
            lambda: all(hold.reached.is_set() or one.done() for hold, one in ends), 60
        )
        for hold, one in ends:
            assert hold.reached.is_set(), one.result()
        if cases[0].is_running:
            fleet.let_go()
            server = fleet.server_of(cutter)
            wait_until(lambda: server.metrics()["baton_requests_running"] >= len(holds))
        _FAULTS[fault](fleet, cutter)
        fleet.let_go()
        found = [one.result() for one in asked]
    finally:
        fleet.resume()
    assert fault == "SIGTERM" or fleet.taken_over() == before + len(cases)
    wrong = {}
    for case, answer in zip(cases, found, strict=True):
        if (
            case.after < 0
        ):  # it begins anew, and may have to compute what it cannot read in time
            answer = answer.replace('"cached_tokens":0', '"cached_tokens":64')
        try:
            _assert_same(_by_choice(answer), _by_choice(case.expected))
        except AssertionError as error:
            wrong[case.told] = str(error)[:500]
    return wrong


@pytest.mark.parametrize(
    ("fault", "kind", "position"),
    [
        ("cut", "greedy", "at token 1"),
        ("cut", "sampled", "in a call"),
        ("kill", "sampled", "in a character"),
        ("SIGSTOP", "structured", "mid-stream"),
        ("SIGTERM", "n = 3", "before a stop string"),
        ("kill", "sampled", "computed"),
        ("silence", "sampled", "mid-stream"),
    ],
)
def test_an_answer_survives(fleet, tiny_model, fault, kind, position):
    assert not _wrong(fleet, [_case(fleet, kind, position, tiny_model)], fault)


@pytest.fixture(scope="module")
def cases(fleet: Fleet, tiny_model: Path) -> dict[str, list[Case]]:
    """Of each position one for every kind."""
    rows = list(itertools.product((*_POSITIONS, *_MOMENTS), _KINDS))
    made = fleet.pool.map(lambda row: _case(fleet, row[1], row[0], tiny_model), rows)
    found: dict[str, list[Case]] = {position: [] for position, _ in rows}
    for (position, _), case in zip(rows, made, strict=True):
        found[position].append(case)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("position", (*_POSITIONS, *_MOMENTS))
def test_every_answer_survives_every_fault_anywhere(fleet, cases, fault, position):
    assert not _wrong(fleet, cases[position], fault)


_KILLS_S, _NUM_STREAMS = 300.0, 24


@pytest.mark.slow
def test_streams_outlive_servers_that_are_killed_at_any_time(tiny_model):
    rng, over = random.Random(5), threading.Event()
    drawn = {"model": MODEL, "stream": True, "max_tokens": 200, **_DRAWN}
    items = {"model": MODEL, "stream": True, "max_output_tokens": 200, "temperature": 0}
    with _fleet(tiny_model, 3) as fleet, ThreadPoolExecutor(_NUM_STREAMS) as pool:
        barrier = threading.Barrier(_NUM_STREAMS + 1)

        def ask(at: int) -> int:
            """How often the answer was right."""
            prompt, num = fresh_prompt(40 + 9 * at), 0
            path, body = (
                "/v1/completions",
                {**drawn, "prompt": prompt, "n": rng.choice([1, 3])},
            )
            if at % 3 == 0:
                path, body = (
                    "/v1/responses",
                    {**items, "input": " ".join(map(str, prompt[:20]))},
                )
            _, expected = fleet.ask(path, body), fleet.ask(path, body)
            barrier.wait()
            while not over.is_set():
                # A server that was started again has cached nothing.
                both = (
                    _CACHED.sub("", text) for text in (fleet.ask(path, body), expected)
                )
                _assert_same(*map(_by_choice, both))
                num += 1
            return num

        answers = [pool.submit(ask, at) for at in range(_NUM_STREAMS)]
        barrier.wait()
        until_s = time.monotonic() + _KILLS_S
        while time.monotonic() < until_s and not any(one.done() for one in answers):
            _kill(fleet, rng.choice(fleet.cutters))
            fleet.restarts.pop().result()
            fleet.until_ready(3)
        over.set()
        assert min(one.result() for one in answers) >= 1
        assert fleet.taken_over() > 10

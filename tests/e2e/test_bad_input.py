"""Bad input end to end: at the proxy and straight at both servers.

Each is a clear 4xx in OpenAI's shape, the same with and without the proxy between; afterwards both
servers are unharmed, every block is home, and a good request still gets the right tokens.
"""

import json
from typing import Any

import pytest

from tests.e2e.reference import Reference
from tests.rigs.client import MODEL, complete
from tests.rigs.cluster import Cluster, wait_until
from tests.rigs.plain_http import http

_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_GOOD = [5, 9, 300, 41, 17, 8, 222, 64]
_LEASE_S = 30.0  # the default; a prefill whose decode leg is refused is given back after it

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_USER = {"role": "user", "content": "Tell a story about Anna and the red ball."}


def _assert_unharmed(cluster: Cluster, reference: Reference, timeout_s: float = 10.0) -> None:
    expected = reference.generate(_GOOD, 6)
    for server in cluster.servers():
        assert complete(server.url, _GOOD, 6).token_ids == expected
    for server in (cluster.prefill[0], cluster.decode[0]):
        wait_until(server.all_blocks_home, timeout_s)


def _body(path: str, **changes: Any) -> dict[str, Any]:
    asked = {"messages": [_USER]} if path == _CHAT else {"prompt": "Anna found"}
    body = {"model": MODEL, "max_tokens": 4, **asked, **changes}
    return {name: value for name, value in body.items() if value is not ...}  # ... takes one out


def _completion(**changes: Any) -> tuple[str, dict[str, Any]]:
    return _COMPLETIONS, _body(_COMPLETIONS, **changes)


def _chat(**changes: Any) -> tuple[str, dict[str, Any]]:
    return _CHAT, _body(_CHAT, **changes)


# Each with the words that its refusal must have.
#
# Prefilled before the decode server refuses them, so their leases have to run out: first, so that
# nothing waits for that in the end.
_REFUSED_BY_DECODE_ALONE = {
    "limit beyond the context": (
        _completion(prompt=[7] * 4000, max_tokens=97),
        ["max_tokens", "4000", "97", "4096"],
    ),
    "absurd limit": (_chat(max_tokens=2**31 - 1), ["max_tokens", str(2**31 - 1), "4096"]),
    "stream options as text": (_completion(stream_options="all"), ["stream_options"]),
    "ranked candidates in a stream": (
        _completion(n=2, best_of=3, stream=True),
        ["best_of", "stream"],
    ),
    "prompt logprobs in a stream": (
        _completion(prompt_logprobs=1, stream=True),
        ["prompt_logprobs", "stream"],
    ),
}
_REFUSED_BY_BOTH = {
    "ids longer than the context": (_completion(prompt=[7] * 5000), ["prompt", "5000", "4096"]),
    "one of two too long": (_completion(prompt=[[7], [7] * 4096]), ["prompt", "4096", "4095"]),
    "text longer than the context": (_completion(prompt="Anna found " * 9000), ["4096"]),
    "chat longer than the context": (
        _chat(messages=[{"role": "user", "content": "ball " * 9000}]),
        ["tokens", "4096"],
    ),
    # A few of each kind; tests/protocol/test_openai_mistakes.py has the rest.
    "no prompt": (_completion(prompt=...), ["prompt", "missing"]),
    "negative id": (_completion(prompt=[3, -1]), ["prompt", "-1", "511"]),
    "id beyond 64 bits": (_completion(prompt=[2**70]), ["prompt"]),
    "image": (
        _chat(messages=[_USER, {**_USER, "content": [{"type": "image_url", "image_url": {}}]}]),
        ["messages[1].content[0]", "text"],
    ),
    "more candidates than run": (_completion(best_of=65), ["best_of", "--max-num-seqs", "64"]),
    "messages in a completion": (_completion(messages=[_USER]), ["messages"]),
    "a grammar that is none": (_chat(guided_regex="(?=a)b"), ["guided_regex"]),
}


def _refuse(cluster: Cluster, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The error objects of all three servers, in OpenAI's shape."""
    errors = []
    for server in cluster.servers():
        response = http.post(f"{server.url}{path}", json=body, timeout=60)
        assert response.status_code == 400, (server.name, response.status_code, response.text)
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        assert error["type"] == "invalid_request_error"
        assert error["message"] and len(error["message"]) < 1000
        errors.append(error)
    return errors


_NAMED = {**_REFUSED_BY_DECODE_ALONE, **_REFUSED_BY_BOTH}


@pytest.mark.parametrize("name", _NAMED)
def test_a_bad_body_is_refused_alike_by_all_servers(tiny_cluster, name):
    (path, body), words = _NAMED[name]
    through, *straight = _refuse(tiny_cluster, path, body)
    assert straight[0] == straight[1] == through
    for error in (through, *straight):
        assert error["param"] is None or error["param"] in json.dumps([*body, *words])
        for word in words:
            assert word in error["message"], error


def test_odd_input_that_is_no_error_is_served(tiny_cluster):
    for prompt in ("\0", "🦆", "<|im_end|>", " ", "\u202e\ufeff", "é" * 500):
        through = complete(tiny_cluster.url, prompt, 4)
        alone = complete(tiny_cluster.decode[0].url, prompt, 4)
        assert through.token_ids == alone.token_ids
        assert through.text == alone.text
    nulls = {"stop": None, "seed": None, "n": None, "tools": None, "anything": None}
    assert complete(tiny_cluster.url, _GOOD, 4, **nulls).finish_reason == "length"


def test_good_requests_among_bad_ones_get_the_right_tokens(tiny_cluster, tiny_reference):
    expected = tiny_reference.generate(_GOOD, 6)
    for number, ((path, body), _) in enumerate(_REFUSED_BY_BOTH.values()):
        refused = http.post(f"{tiny_cluster.url}{path}", json={**body, "stream": True}, timeout=60)
        assert refused.status_code == 400
        if number % 5 == 0:
            assert complete(tiny_cluster.url, _GOOD, 6).token_ids == expected
    _assert_unharmed(tiny_cluster, tiny_reference, _LEASE_S + 15)

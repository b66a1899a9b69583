"""Bad requests to the proxy, and directly to both servers.

All three must refuse them with the same 4xx error in OpenAI's format. Afterwards no
server may hold a block, and a good request must get the right tokens.
"""

import json
from typing import Any

import pytest

from tests.rigs.client import complete, post
from tests.rigs.cluster import Cluster

_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_GOOD = [5, 9, 300, 41, 17, 8, 222, 64]

pytestmark = pytest.mark.usefixtures("all_blocks_return")

_USER = {"role": "user", "content": "Tell a story about Anna and the red ball."}
_IMAGE = {**_USER, "content": [{"type": "image_url", "image_url": {}}]}


def _completion(**changes: Any) -> tuple[str, dict[str, Any]]:
    return _COMPLETIONS, {"max_tokens": 4, "prompt": "Anna found", **changes}


def _chat(**changes: Any) -> tuple[str, dict[str, Any]]:
    return _CHAT, {"max_tokens": 4, "messages": [_USER], **changes}


# A few requests of each kind, with words that the error message must contain. More bad
# requests are in tests/protocol/test_openai_mistakes.py and
# tests/engine/test_http_refusals.py.
_REFUSED = {
    "limit beyond the context": (
        _completion(prompt=[7] * 4000, max_tokens=97),
        ["max_tokens", "4000", "97", "4096"],
    ),
    "ids longer than the context": (
        _completion(prompt=[7] * 5000),
        ["prompt", "5000", "4096"],
    ),
    "one of two too long": (
        _completion(prompt=[[7], [7] * 4096]),
        ["prompt", "4096", "4095"],
    ),
    "text longer than the context": (
        _completion(prompt="Anna found " * 9000),
        ["4096"],
    ),
    "no prompt": ((_COMPLETIONS, {"max_tokens": 4}), ["prompt", "missing"]),
    "negative id": (_completion(prompt=[3, -1]), ["prompt", "-1", "511"]),
    "id beyond 64 bits": (_completion(prompt=[2**70]), ["prompt"]),
    "image": (_chat(messages=[_USER, _IMAGE]), ["messages[1].content[0]", "text"]),
    "more choices than sequences": (_completion(n=65), ["`n`", "--max-num-seqs", "64"]),
    "invalid grammar": (_chat(guided_regex="(?=a)b"), ["guided_regex"]),
}


def _refuse(cluster: Cluster, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Send a request to the proxy and both servers, which must refuse it. Return their
    error objects.
    """
    errors = []
    for server in cluster.servers():
        response = post(server.url, path, **body)
        assert response.status_code == 400, (
            server.name,
            response.status_code,
            response.text,
        )
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        assert error["type"] == "invalid_request_error"
        assert error["message"] and len(error["message"]) < 1000
        errors.append(error)
    return errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", _REFUSED)
def test_all_servers_refuse_a_bad_body_with_the_same_error(tiny_cluster, name, stream):
    (path, body), words = _REFUSED[name]
    proxied, *direct = _refuse(tiny_cluster, path, {**body, "stream": stream})
    assert direct[0] == direct[1] == proxied
    for error in (proxied, *direct):
        assert error["param"] is None or error["param"] in json.dumps([*body, *words])
        for word in words:
            assert word in error["message"], error


def test_unusual_input_is_served(tiny_cluster, tiny_reference):
    for prompt in ("\0", "🦆", "<|im_end|>", " ", "\u202e\ufeff", "é" * 500):
        proxied = complete(tiny_cluster.url, prompt, 4)
        direct_answer = complete(tiny_cluster.decode[0].url, prompt, 4)
        assert proxied.token_ids == direct_answer.token_ids
        assert proxied.text == direct_answer.text
    nulls = {"stop": None, "seed": None, "n": None, "tools": None, "anything": None}
    expected = tiny_reference.generate(_GOOD, 6)
    for server in tiny_cluster.servers():
        assert complete(server.url, _GOOD, 6, **nulls).token_ids == expected

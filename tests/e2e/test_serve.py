"""`baton serve`: complete servers behind one endpoint."""

import sys

from tests.rigs.plain_http import http
from tests.rigs.programs import TIMEOUT_S, launched


def test_complete_servers_answer_behind_one_endpoint_with_a_page(tiny_model):
    argv = [sys.executable, "-m", "baton_pd", "serve", str(tiny_model), "--count=2"]
    argv += ["--port=0", "--served-model-name=m", "--device=cpu"]
    argv += ["--kv-cache-tokens=4096", "--routing=round_robin"]
    with launched(argv) as program:
        url = program.read_until("ready http").split()[1]
        body = {"model": "m", "prompt": "Emma painted", "max_tokens": 4}
        for _ in range(4):
            answer = http.post(f"{url}v1/completions", json=body, timeout=TIMEOUT_S)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert "transferred=0" in answer.headers["x-baton-kv"]
        assert "<title>" in http.get(url, timeout=TIMEOUT_S).text
        program.stop()
    text = "\n".join(program.lines)
    assert "server-0 | " in text and "server-1 | " in text

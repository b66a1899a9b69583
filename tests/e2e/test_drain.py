"""A decode server that is to end hands its streams over, and ends long before they do."""

import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_failover import _OWN
from tests.rigs.client import MODEL, TIMEOUT_S, fresh_prompt
from tests.rigs.cluster import running, start_decode, start_prefill, start_proxy, started
from tests.rigs.plain_http import http

_NUM_STREAMS, _NUM_TOKENS = 4, 200
_CACHED = re.compile(r'"cached_tokens":\d+')
_GRACE = ("--shutdown-grace-s", "120")  # streams would have the time to end


def _body(prompt: list[int], at: int) -> dict[str, Any]:
    sampled = {"temperature": 1.0, "seed": at, "frequency_penalty": 0.4}
    sampled = sampled if at % 2 else {"temperature": 0}
    how = {"stream_options": {"include_usage": True}, "ignore_eos": True, **sampled}
    return {"model": MODEL, "prompt": prompt, "max_tokens": _NUM_TOKENS, "stream": True, **how}


@pytest.mark.slow
def test_streams_of_a_server_that_drains_go_on_elsewhere(tiny_model: Path) -> None:
    decode = partial(start_decode, tiny_model, *_GRACE)
    with (
        started(partial(start_prefill, tiny_model), decode, decode) as (prefill, *decodes),
        running(proxy := start_proxy([prefill], decodes)),
        ThreadPoolExecutor(_NUM_STREAMS) as pool,
    ):
        bodies = [_body(fresh_prompt(70), at) for at in range(_NUM_STREAMS)]
        begun = threading.Semaphore(0)

        def ask(body: dict[str, Any]) -> str:
            text = []
            url = f"{proxy.url}/v1/completions"
            with http.stream("POST", url, json=body, timeout=TIMEOUT_S) as answer:
                for at, line in enumerate(answer.iter_lines()):
                    text.append(line)
                    if at == 20:
                        begun.release()
            return _CACHED.sub("", _OWN.sub("", "\n".join(text)))

        def begin() -> list[Any]:
            asked = [pool.submit(ask, body) for body in bodies]
            for _ in bodies:
                assert begun.acquire(timeout=60)
            return asked

        expected = [one.result() for one in begin()]
        leaving, staying = decodes
        before, recomputed = staying.metrics(), 'baton_kv_tokens_total{source="recomputed"}'
        asked = begin()
        num = leaving.metrics()["baton_requests_in_progress"]
        assert http.post(f"{leaving.url}/drain").json() == {"draining": True}
        assert leaving.child.exited.wait(60)
        assert [answer.result() for answer in asked] == expected
        moved = proxy.metrics()['baton_proxy_resumes_total{outcome="resumed",reason="moved"}']
        assert 0 < moved <= num
        assert staying.metrics()[recomputed] == before[recomputed]
        staying.assert_home()
        asked = begin()
        staying.child.signal(signal.SIGTERM)  # there is no other one: they come back, and end here
        assert [answer.result() for answer in asked] == expected
        assert staying.child.exited.wait(60)
        prefill.assert_home()

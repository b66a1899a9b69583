"""schemathesis sends requests that the OpenAPI document allows, and ones that it
forbids.

No answer may be a 5xx, every answer must arrive in time, and afterwards every block
must be free.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.client import MODEL, complete
from tests.rigs.cluster import Cluster, assert_idle, cluster
from tests.rigs.plain_http import http

_SHORT = ("--max-model-len", "128", "--max-num-seqs", "8")  # keeps answers short
# One request may have a thousand prompts, which take many seconds on a busy machine.
_TIMEOUT_S = "120"


@pytest.fixture(scope="module")
def short_cluster(tiny_model: Path) -> Iterator[Cluster]:
    with cluster(tiny_model, prefill_argv=_SHORT, decode_argv=_SHORT) as running:
        yield running


def _document(url: str, path: Path) -> Path:
    """Store the served OpenAPI document, changed to allow only the model name that
    exists.

    With random names, most requests would get a 404.
    """
    document = http.get(f"{url}/openapi.json", timeout=30).json()
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": MODEL}
    path.write_text(json.dumps(document))
    return path


def _fuzz(url: str, scratch: Path, *options: str) -> None:
    document = _document(url, scratch / "openapi.json")
    argv = ["run", str(document), "--url", url, "--checks", "not_a_server_error"]
    argv += [
        "--request-timeout",
        _TIMEOUT_S,
        "--no-shrink",
        "--continue-on-failure",
        *options,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *argv],
        cwd=scratch,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def _assert_unharmed(cluster: Cluster) -> None:
    assert_idle(cluster.prefill[0], cluster.decode[0], timeout_s=60)
    answer = complete(cluster.url, [5, 9, 300], 4)
    assert answer.kv == {"transferred": 3, "recomputed": 0, "skipped": 0}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("index", range(3), ids=["proxy", "prefill", "decode"])
def test_fuzzing_finds_no_server_error(short_cluster, tmp_path, index):
    server = short_cluster.servers()[index]
    phases = ["--phases", "coverage,fuzzing", "--max-examples", "100", "--seed", "2"]
    _fuzz(server.url, tmp_path, *phases)
    _assert_unharmed(short_cluster)


def test_request_with_more_prompts_than_the_pool_holds_is_served(tiny_cluster):
    """No prompt may wait for blocks that other prompts of the request hold.

    That would be a deadlock, because on the prefill server, each prompt holds its
    blocks until all prompts of the request are answered.
    """
    body = {
        "model": MODEL,
        "prompt": [[5, 9]] * 150,
        "max_tokens": 3,
        "ignore_eos": True,
    }
    answer = http.post(f"{tiny_cluster.url}/v1/completions", json=body, timeout=25)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 150
    metrics = tiny_cluster.proxy.metrics()
    assert metrics['baton_proxy_requests_total{path="decode_only",reason="busy"}'] >= 1
    _assert_unharmed(tiny_cluster)

"""One pair of servers for each kind of difference between prefill and decode server.

test_matrix.py has all pairs. test_either_leg.py has a pair with different tensor
parallelism.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.matrix import (
    LOGPROB_TOLERANCE,
    NUM_TOKENS,
    Farm,
    Geometry,
    Key,
    assert_same,
    check_cell,
    farm,
    generate,
    model_dir,
    post,
)
from tests.e2e.reference import Reference
from tests.rigs import client
from tests.rigs.client import make_prompt, prefill
from tests.rigs.cluster import (
    Cluster,
    Server,
    assert_idle,
    running,
    start_proxy,
    wait_until,
)

_PLAIN = Geometry()
# Between servers of one host, `auto` uses mapped memory.
_SMALL = Geometry(block_size=16, options=("--transfer", "auto"))
_NHD = Geometry(block_size=16, layout="LBCNHD")
_SHARED = Geometry(2, dcp=2)


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tiny_cluster: Cluster) -> Iterator[Farm]:
    lent = {
        Key("prefill", tiny_model, _PLAIN): tiny_cluster.prefill[0],
        Key("decode", tiny_model, _PLAIN): tiny_cluster.decode[0],
    }
    with farm(max_ranks=7, lent=lent) as servers:
        yield servers


# The order of the cells matters: in this order, no engine is started twice.
_CELLS = {
    "blocks of 64 to 16": (_PLAIN, _SMALL),
    "NHD blocks of 16 to head-major 64": (_NHD, _PLAIN),
    "NHD blocks of 16 to ranks that share tokens, in blocks of 64": (_NHD, _SHARED),
}


@pytest.mark.parametrize("name", _CELLS)
def test_pair_of_geometries_equals_one_server(engines, tiny_model, tiny_cluster, name):
    p, d = _CELLS[name]
    prefiller, decoder = engines.pair(tiny_model, p, d)
    check_cell(prefiller, decoder, p, d, tiny_cluster.prefill[0].url, name)
    if d is _SMALL:
        done = 'baton_kv_transfers_total{outcome="done"'
        pulls = {
            name
            for name, num in decoder.metrics().items()
            if num and name.startswith(done)
        }
        assert pulls == {done + ',path="mapped"}'}


# -- differences that are not converted

_BFLOAT16 = Geometry(options=("--dtype", "bfloat16"))
_CONVERTING = Geometry(block_size=16, options=("--kv-convert", "--transfer", "nixl"))


def test_incompatible_kv_is_refused_or_recomputed_by_policy(
    engines, tiny_model, tiny_cluster
):
    prefiller, failing = engines.pair(tiny_model, _BFLOAT16, _SMALL)
    prompt = make_prompt(8, 150)
    proxy = start_proxy([prefiller], [failing])
    with running(proxy):
        # The proxy does not pair these two servers.
        assert post(proxy.url, prompt, 6).status_code == 200
        name = 'baton_proxy_requests_total{path="decode_only",reason="incompatible"}'
        assert proxy.metrics()[name] == 1
    refused = post(failing.url, prompt, 6, prefill(prefiller.url, prompt, logprobs=1))
    assert refused.status_code == 502, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["phase"]) == ("peer_incompatible", "handshake")
    assert 'kv_dtype differs: "float32" here, "bfloat16"' in error["message"]
    _wait_until_mismatch_is_counted(failing)
    # With the policy `recompute`, D uses neither P's KV nor P's first token.
    recomputing = tiny_cluster.decode[0]
    reply = generate(
        recomputing.url, prompt, 6, prefill(prefiller.url, prompt, logprobs=1)
    )
    assert reply.kv == {"transferred": 0, "recomputed": len(prompt), "skipped": 0}
    assert_same(reply, generate(tiny_cluster.prefill[0].url, prompt, 6))
    _wait_until_mismatch_is_counted(recomputing)
    assert_idle(prefiller, failing, recomputing)


def _wait_until_mismatch_is_counted(decoder: Server) -> None:
    """Wait until /metrics counts the failed pull and handshake. A server updates its
    metrics with a short delay.
    """
    names = ("kv_transfer_failures_total{code", "handshakes_total{outcome")
    counters = [f'baton_{name}="peer_incompatible"}}' for name in names]
    wait_until(lambda: all(decoder.metrics().get(name, 0) >= 1 for name in counters))


def test_decode_server_with_kv_convert_converts_dtypes_and_block_sizes(
    engines, tiny_model, tiny_cluster
):
    prefiller, decoder = engines.pair(tiny_model, _BFLOAT16, _CONVERTING)
    for length in (5, 64, 333):
        prompt = make_prompt(length, length)
        pulled = generate(
            decoder.url, prompt, NUM_TOKENS, prefill(prefiller.url, prompt, logprobs=1)
        )
        assert pulled.kv == {"transferred": length, "recomputed": 0, "skipped": 0}
        # Repeat the prompt, now mostly from D's cache. As conversion is deterministic,
        # D's logprobs agree with those of the first run. The first token is P's. P has
        # computed the last block again, in bfloat16 and with different tensor shapes,
        # so its logprob may differ more.
        again = generate(
            decoder.url, prompt, NUM_TOKENS, prefill(prefiller.url, prompt, logprobs=1)
        )
        assert again.kv["skipped"] == length // 16 * 16
        # Rounding KV to bfloat16 changes logprobs a little. Wrong bytes would change
        # them a lot.
        assert again.token_ids == pulled.token_ids
        assert again.logprobs[0] == pytest.approx(pulled.logprobs[0], abs=0.25)
        assert again.logprobs[1:] == pytest.approx(
            pulled.logprobs[1:], abs=LOGPROB_TOLERANCE
        )
        exact = generate(tiny_cluster.prefill[0].url, prompt, 1)
        assert pulled.logprobs[0] == pytest.approx(exact.logprobs[0], abs=0.25)
    assert_idle(prefiller, decoder)
    staged = 'baton_kv_transfers_total{outcome="done",path="staged"}'
    wait_until(lambda: decoder.metrics().get(staged, 0) >= 5)
    # The repeated prompt of four full blocks was completely cached and needed no pull.
    assert decoder.metrics()[staged] == 5


@pytest.mark.parametrize("length", [5, 64, 333], ids="{} tokens".format)
def test_all_choices_use_the_same_converted_kv(engines, tiny_model, length):
    """All choices share the full blocks of the prompt, with KV from the prefill server.

    The second choice computes the rest of the prompt in the decode server's dtype. So
    the first choice must compute the rest, too, instead of using its converted KV.
    """
    prefiller, decoder = engines.pair(tiny_model, _BFLOAT16, _CONVERTING)
    prompt = make_prompt(1000 + length, length)
    params = prefill(prefiller.url, prompt, logprobs=1, n=2)
    fields = client.greedy(
        prompt, NUM_TOKENS, n=2, logprobs=1, kv_transfer_params=params
    )
    response = client.post(decoder.url, **fields)
    assert response.status_code == 200, response.text
    first, second = response.json()["choices"]
    assert first["token_ids"] == second["token_ids"]
    # The prefill server computed the first token of both choices.
    first_logprobs = first["logprobs"]["token_logprobs"]
    assert first_logprobs == pytest.approx(
        second["logprobs"]["token_logprobs"], abs=1e-5
    )
    tail = length % 16
    kv = client.parse_kv(response.headers["x-baton-kv"])
    assert kv == {"transferred": length - tail, "recomputed": tail, "skipped": 0}
    assert_idle(prefiller, decoder)


# -- another model; these tests are last, because their engines replace those above


@pytest.mark.slow
def test_mixture_of_experts_equals_one_server_and_transformers(engines):
    model = model_dir("moe")
    halves = Geometry(tp=2, options=("--ep", "2"))
    prefiller, decoder = engines.pair(model, _PLAIN, halves)
    check_cell(prefiller, decoder, _PLAIN, halves, prefiller.url, "experts")
    transformers = Reference(model)
    for length in (3, 200):
        prompt = make_prompt(1000 + length, length)
        uncached = prompt[::-1]
        decode_only = generate(decoder.url, uncached, NUM_TOKENS)
        assert decode_only.token_ids == transformers.generate(uncached, NUM_TOKENS)
        paired = generate(
            decoder.url, prompt, NUM_TOKENS, prefill(prefiller.url, prompt, logprobs=1)
        )
        assert paired.token_ids == transformers.generate(prompt, NUM_TOKENS)


# -- servers that cannot start


@pytest.mark.parametrize(
    ("module", "argv", "words"),
    [
        (
            "prefill_server",
            ["--tp", "3"],
            ["--tp 3", "8 query heads", "1 or 2 or 4 or 8"],
        ),
        pytest.param(
            "decode_server",
            ["--device", "cuda", "--devices", "77"],
            ["GPU", "--device"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tp", "GPU"],
)
def test_server_that_cannot_work_ends_with_the_reason_as_last_line(
    tiny_model, module, argv, words
):
    command = [sys.executable, "-m", module, "--model", str(tiny_model), "--port", "0"]
    process = subprocess.run(
        [*command, "--device", "cpu", *argv], capture_output=True, text=True, timeout=60
    )
    assert process.returncode != 0
    last = process.stderr.strip().splitlines()[-1]
    assert "error: " in last
    assert "Traceback" not in process.stderr
    assert all(word in last for word in words), last

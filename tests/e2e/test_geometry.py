"""One cell of each kind of difference between a prefill and a decode server; test_matrix.py has
them all, and test_either_leg.py one of unlike tensor parallelism."""

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
    ask,
    assert_alike,
    check_cell,
    farm,
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
_SMALL = Geometry(
    block_size=16, options=("--transfer", "auto")
)  # servers of one host: mapped
_NHD = Geometry(block_size=16, layout="LBCNHD")
_SHARED = Geometry(2, dcp=2)


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tiny_cluster: Cluster) -> Iterator[Farm]:
    lent = {
        Key("prefill", tiny_model, _PLAIN): tiny_cluster.prefill[0],
        Key("decode", tiny_model, _PLAIN): tiny_cluster.decode[0],
    }
    with farm(max_ranks=7, lent=lent) as made:
        yield made


# In an order in which no engine is started twice.
_CELLS = {
    "blocks of 64 to 16": (_PLAIN, _SMALL),
    "NHD blocks of 16 to head-major 64": (_NHD, _PLAIN),
    "NHD blocks of 16 to ranks that share tokens, in blocks of 64": (_NHD, _SHARED),
}


@pytest.mark.parametrize("name", _CELLS)
def test_a_pair_of_geometries_equals_one_server(
    engines, tiny_model, tiny_cluster, name
):
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


# -- what is not bridged ---------------------------------------------------------------------------

_BFLOAT16 = Geometry(options=("--dtype", "bfloat16"))
_CONVERTING = Geometry(block_size=16, options=("--kv-convert", "--transfer", "nixl"))


def test_what_differs_is_named_or_computed_here_by_policy(
    engines, tiny_model, tiny_cluster
):
    prefiller, failing = engines.pair(tiny_model, _BFLOAT16, _SMALL)
    prompt = make_prompt(8, 150)
    with running(
        proxy := start_proxy([prefiller], [failing])
    ):  # which does not pair them
        assert post(proxy.url, prompt, 6).status_code == 200
        alone = 'baton_proxy_requests_total{path="decode_only",reason="incompatible"}'
        assert proxy.metrics()[alone] == 1
    refused = post(failing.url, prompt, 6, prefill(prefiller.url, prompt, logprobs=1))
    assert refused.status_code == 502, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["phase"]) == ("peer_incompatible", "handshake")
    assert 'kv_dtype differs: "float32" here, "bfloat16"' in error["message"]
    _assert_counted(failing)
    # The other policy: nothing of what P did is used, its first token neither.
    recomputing = tiny_cluster.decode[0]
    reply = ask(recomputing.url, prompt, 6, prefill(prefiller.url, prompt, logprobs=1))
    assert reply.kv == {"transferred": 0, "recomputed": len(prompt), "skipped": 0}
    assert_alike(reply, ask(tiny_cluster.prefill[0].url, prompt, 6))
    _assert_counted(recomputing)
    assert_idle(prefiller, failing, recomputing)


def _assert_counted(decoder: Server) -> None:
    """In /metrics, which tells what was a moment ago."""
    names = ("kv_transfer_failures_total{code", "handshakes_total{outcome")
    counters = [f'baton_{name}="peer_incompatible"}}' for name in names]
    wait_until(lambda: all(decoder.metrics().get(name, 0) >= 1 for name in counters))


def test_a_decode_server_told_to_converts_dtypes_and_block_sizes(
    engines, tiny_model, tiny_cluster
):
    prefiller, decoder = engines.pair(tiny_model, _BFLOAT16, _CONVERTING)
    for length in (5, 64, 333):
        prompt = make_prompt(length, length)
        pulled = ask(
            decoder.url, prompt, NUM_TOKENS, prefill(prefiller.url, prompt, logprobs=1)
        )
        assert pulled.kv == {"transferred": length, "recomputed": 0, "skipped": 0}
        # The same bytes, now mostly from D's cache: conversion is deterministic. Only the first
        # token is P's, which has computed its last block anew, in bfloat16 and in another shape.
        again = ask(
            decoder.url, prompt, NUM_TOKENS, prefill(prefiller.url, prompt, logprobs=1)
        )
        assert again.kv["skipped"] == length // 16 * 16
        # Rounding KV to bfloat16 moves the logits a little; the wrong bytes would move them a lot.
        assert again.token_ids == pulled.token_ids
        assert again.logprobs[0] == pytest.approx(pulled.logprobs[0], abs=0.25)
        assert again.logprobs[1:] == pytest.approx(
            pulled.logprobs[1:], abs=LOGPROB_TOLERANCE
        )
        exact = ask(tiny_cluster.prefill[0].url, prompt, 1)
        assert pulled.logprobs[0] == pytest.approx(exact.logprobs[0], abs=0.25)
    assert_idle(prefiller, decoder)
    staged = 'baton_kv_transfers_total{outcome="done",path="staged"}'
    wait_until(lambda: decoder.metrics().get(staged, 0) >= 5)
    assert (
        decoder.metrics()[staged] == 5
    )  # the prompt of four whole blocks was all there


@pytest.mark.parametrize("length", [5, 64, 333], ids="{} tokens".format)
def test_every_choice_reads_the_same_converted_kv(engines, tiny_model, length):
    """The choices behind the first one share its full blocks of the prompt and compute the rest in
    the decode server's dtype. So does the first one, instead of reading what was converted."""
    prefiller, decoder = engines.pair(tiny_model, _BFLOAT16, _CONVERTING)
    prompt = make_prompt(1000 + length, length)
    drawn = prefill(prefiller.url, prompt, logprobs=1, n=2)
    fields = client.greedy(
        prompt, NUM_TOKENS, n=2, logprobs=1, kv_transfer_params=drawn
    )
    response = client.post(decoder.url, **fields)
    assert response.status_code == 200, response.text
    first, second = response.json()["choices"]
    assert first["token_ids"] == second["token_ids"]
    # The first token of both is the prefill server's.
    first_logprobs = first["logprobs"]["token_logprobs"]
    assert first_logprobs == pytest.approx(
        second["logprobs"]["token_logprobs"], abs=1e-5
    )
    tail = length % 16
    kv = client.parse_kv(response.headers["x-baton-kv"])
    assert kv == {"transferred": length - tail, "recomputed": tail, "skipped": 0}
    assert_idle(prefiller, decoder)


# -- another model: last, for none of the servers above is used any more ---------------------------


@pytest.mark.slow
def test_a_mixture_of_experts_equals_one_server_and_transformers(engines):
    model = model_dir("moe")
    halves = Geometry(tp=2, options=("--ep", "2"))
    prefiller, decoder = engines.pair(model, _PLAIN, halves)
    check_cell(prefiller, decoder, _PLAIN, halves, prefiller.url, "experts")
    transformers = Reference(model)
    for length in (3, 200):
        prompt = make_prompt(1000 + length, length)
        alone = ask(
            decoder.url, prompt[::-1], NUM_TOKENS
        )  # of which nothing is cached yet
        assert alone.token_ids == transformers.generate(prompt[::-1], NUM_TOKENS)
        through = ask(
            decoder.url, prompt, NUM_TOKENS, prefill(prefiller.url, prompt, logprobs=1)
        )
        assert through.token_ids == transformers.generate(prompt, NUM_TOKENS)


# -- what cannot start -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "argv", "words"),
    [
        (
            "prefill_server",
            ["--tp", "3"],
            ["--tp 3", "8 query heads", "1 or 2 or 4 or 8"],
        ),
        pytest.param(
            *(
                "decode_server",
                ["--device", "cuda", "--devices", "77"],
                ["GPU", "--device"],
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tp", "GPU"],
)
def test_what_cannot_work_is_refused_at_start_with_the_reason_last(
    tiny_model, module, argv, words
):
    command = [sys.executable, "-m", module, "--model", str(tiny_model), "--port", "0"]
    ended = subprocess.run(
        [*command, "--device", "cpu", *argv], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert "error: " in last and "Traceback" not in ended.stderr
    assert all(word in last for word in words), last

"""KV of 8 bits from end to end: through prefill and decode as on one server, and converted."""

import zlib
from collections.abc import Iterator

import pytest

from tests.e2e.matrix import (
    NUM_TOKENS,
    Farm,
    Geometry,
    ask,
    assert_alike,
    check_cell,
    farm,
    model_dir,
)
from tests.rigs.client import make_prompt, prefill
from tests.rigs.cluster import assert_idle

_FP8 = ("--kv-cache-dtype", "float8_e4m3fn")
_OURS, _THEIRS = (*_FP8, "--kv-scales", "0.02"), (*_FP8, "--kv-scales", "0.03")
_PLAIN = Geometry(options=_OURS)
_OTHER = Geometry(2, 16, "LBCNHD", _OURS)
_SHARED = Geometry(2, options=_OURS, dcp=2)
_CONVERT = ("--kv-convert",)
# What eight bits cost on this model, in the logarithm of a token's probability.
_CLOSE = 0.3


@pytest.fixture(scope="module")
def engines() -> Iterator[Farm]:
    with farm(max_ranks=4) as made:
        yield made


@pytest.mark.parametrize(
    ("p", "d"),
    [
        pytest.param(_PLAIN, _PLAIN, id="one geometry"),
        pytest.param(
            _OTHER, _PLAIN, id="tp 2 of NHD blocks of 16", marks=pytest.mark.slow
        ),
        pytest.param(
            _OTHER, _SHARED, id="ranks that share tokens", marks=pytest.mark.slow
        ),
    ],
)
def test_a_pair_equals_one_server(engines, tiny_model, tiny_cluster, p, d):
    prefiller, decoder = engines.pair(tiny_model, p, d)
    check_cell(prefiller, decoder, p, d, decoder.url, f"fp8 {p} {d}")
    prompt = make_prompt(len(p.layout), 200)
    exact, stored = (
        ask(url, prompt, 1) for url in (tiny_cluster.prefill[0].url, decoder.url)
    )
    assert stored.logprobs[0] == pytest.approx(exact.logprobs[0], abs=_CLOSE)
    assert stored.logprobs[0] != pytest.approx(
        exact.logprobs[0], abs=1e-6
    )  # it is rounded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "d"),
    [(_OURS, ()), ((), _OURS), (_THEIRS, _OURS)],
    ids=["fp8 to float32", "float32 to fp8", "to other scales"],
)
@pytest.mark.parametrize("transfer", ["nixl", "mapped"])
def test_a_decode_server_told_to_requantises(
    engines, tiny_model, tiny_cluster, p, d, transfer
):
    options = (*d, *_CONVERT, "--transfer", transfer)
    prefiller, decoder = engines.pair(
        tiny_model,
        _PLAIN if p == _OURS else Geometry(block_size=16, options=p),
        Geometry(options=options),
    )
    for length in (7, 333):
        prompt = make_prompt(zlib.crc32(repr((p, options, length)).encode()), length)
        pulled = ask(
            decoder.url, prompt, NUM_TOKENS, prefill(prefiller.url, prompt, logprobs=1)
        )
        assert pulled.kv == {"transferred": length, "recomputed": 0, "skipped": 0}
        # The first token is P's; the second is computed from the KV that was converted.
        exact = ask(tiny_cluster.prefill[0].url, [*prompt, pulled.token_ids[0]], 1)
        assert pulled.logprobs[1] == pytest.approx(exact.logprobs[0], abs=_CLOSE)
    assert_idle(prefiller, decoder)


@pytest.mark.slow
@pytest.mark.parametrize("d", [Geometry(options=_OURS), _SHARED], ids=str)
def test_latents_of_eight_bits_too(engines, d):
    p = Geometry(2, 16, "LBCNHD", _OURS)
    prefiller, decoder = engines.pair(model_dir("mla"), p, d)
    check_cell(prefiller, decoder, p, d, decoder.url, f"latents of eight bits {d}")
    prompt = make_prompt(3, 100)
    again = [
        ask(decoder.url, prompt, NUM_TOKENS) for _ in range(2)
    ]  # the second from its cache
    assert_alike(*again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "d"), [((), _OURS), (_OURS, ())], ids=["to fp8", "from fp8"]
)
def test_latents_are_converted_on_their_way_to_ranks_that_share_them(engines, p, d):
    geometries = (
        Geometry(2, 16, "LBCNHD", p),
        Geometry(2, options=(*d, *_CONVERT), dcp=2),
    )
    prefiller, decoder = engines.pair(model_dir("mla"), *geometries)
    prompt = make_prompt(len(p) + 40, 333)
    pulled = ask(
        decoder.url, prompt, NUM_TOKENS, prefill(prefiller.url, prompt, logprobs=1)
    )
    assert pulled.kv == {"transferred": 333, "recomputed": 0, "skipped": 0}
    exact = ask(prefiller.url, [*prompt, pulled.token_ids[0]], 1)
    assert pulled.logprobs[1] == pytest.approx(exact.logprobs[0], abs=_CLOSE)

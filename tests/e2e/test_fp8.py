"""8-bit KV end to end: a cluster answers like a single server, and can convert KV."""

import zlib
from collections.abc import Iterator

import pytest

from tests.e2e.matrix import (
    NUM_TOKENS,
    Farm,
    Geometry,
    assert_same,
    check_cell,
    farm,
    generate,
    model_dir,
)
from tests.rigs.client import make_prompt, prefill
from tests.rigs.cluster import assert_idle

_FP8 = ("--kv-cache-dtype", "float8_e4m3fn")
_SCALED = (*_FP8, "--kv-scales", "0.02")
_OTHER_SCALES = (*_FP8, "--kv-scales", "0.03")
_PLAIN = Geometry(options=_SCALED)
_OTHER = Geometry(2, 16, "LBCNHD", _SCALED)
_SHARED = Geometry(2, options=_SCALED, dcp=2)
_CONVERT = ("--kv-convert",)
# Maximum difference in logprobs that 8-bit KV causes with this model.
_TOLERANCE = 0.3


@pytest.fixture(scope="module")
def engines() -> Iterator[Farm]:
    with farm(max_ranks=4) as servers:
        yield servers


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
def test_pair_equals_one_server(engines, tiny_model, tiny_cluster, p, d):
    prefiller, decoder = engines.pair(tiny_model, p, d)
    check_cell(prefiller, decoder, p, d, decoder.url, f"fp8 {p} {d}")
    prompt = make_prompt(len(p.layout), 200)
    exact, stored = (
        generate(url, prompt, 1) for url in (tiny_cluster.prefill[0].url, decoder.url)
    )
    assert stored.logprobs[0] == pytest.approx(exact.logprobs[0], abs=_TOLERANCE)
    # Logprobs differ, because 8-bit KV is rounded.
    assert stored.logprobs[0] != pytest.approx(exact.logprobs[0], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "d"),
    [(_SCALED, ()), ((), _SCALED), (_OTHER_SCALES, _SCALED)],
    ids=["fp8 to float32", "float32 to fp8", "to other scales"],
)
@pytest.mark.parametrize("transfer", ["nixl", "mapped"])
def test_decode_server_with_kv_convert_requantises(
    engines, tiny_model, tiny_cluster, p, d, transfer
):
    options = (*d, *_CONVERT, "--transfer", transfer)
    prefiller, decoder = engines.pair(
        tiny_model,
        _PLAIN if p == _SCALED else Geometry(block_size=16, options=p),
        Geometry(options=options),
    )
    for length in (7, 333):
        prompt = make_prompt(zlib.crc32(repr((p, options, length)).encode()), length)
        pulled = generate(
            decoder.url, prompt, NUM_TOKENS, prefill(prefiller.url, prompt, logprobs=1)
        )
        assert pulled.kv == {"transferred": length, "recomputed": 0, "skipped": 0}
        # P computed the first token. The second one was computed from the converted KV.
        exact = generate(tiny_cluster.prefill[0].url, [*prompt, pulled.token_ids[0]], 1)
        assert pulled.logprobs[1] == pytest.approx(exact.logprobs[0], abs=_TOLERANCE)
    assert_idle(prefiller, decoder)


@pytest.mark.slow
@pytest.mark.parametrize("d", [Geometry(options=_SCALED), _SHARED], ids=str)
def test_pair_with_8_bit_latents_equals_one_server(engines, d):
    p = Geometry(2, 16, "LBCNHD", _SCALED)
    prefiller, decoder = engines.pair(model_dir("mla"), p, d)
    check_cell(prefiller, decoder, p, d, decoder.url, f"latents of eight bits {d}")
    prompt = make_prompt(3, 100)
    uncached = generate(decoder.url, prompt, NUM_TOKENS)
    cached = generate(decoder.url, prompt, NUM_TOKENS)
    assert_same(uncached, cached)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "d"), [((), _SCALED), (_SCALED, ())], ids=["to fp8", "from fp8"]
)
def test_latents_are_converted_for_ranks_that_share_tokens(engines, p, d):
    prefiller, decoder = engines.pair(
        model_dir("mla"),
        Geometry(2, 16, "LBCNHD", p),
        Geometry(2, options=(*d, *_CONVERT), dcp=2),
    )
    prompt = make_prompt(len(p) + 40, 333)
    pulled = generate(
        decoder.url, prompt, NUM_TOKENS, prefill(prefiller.url, prompt, logprobs=1)
    )
    assert pulled.kv == {"transferred": 333, "recomputed": 0, "skipped": 0}
    exact = generate(prefiller.url, [*prompt, pulled.token_ids[0]], 1)
    assert pulled.logprobs[1] == pytest.approx(exact.logprobs[0], abs=_TOLERANCE)

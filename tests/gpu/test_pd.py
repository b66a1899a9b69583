"""Pairs of prefill and decode server on GPUs answer like the decode server alone.

In 16 bits, results depend on the order of sums. So if two tokens have equal logits,
either may be chosen. Up to the first such tie, tokens and log probabilities must agree.
"""

import zlib
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from tests.e2e.matrix import NUM_TOKENS, Farm, Geometry, Key, Reply, farm, generate
from tests.gpu.models import supported_model_dir
from tests.rigs.client import make_prompt, prefill
from tests.rigs.cluster import assert_idle

pytestmark = pytest.mark.gpu


def _gpus(count: int) -> tuple[pytest.MarkDecorator, pytest.MarkDecorator]:
    has_fewer = torch.cuda.device_count() < count
    return (
        pytest.mark.multi_gpu,
        pytest.mark.skipif(has_fewer, reason=f"needs {count} CUDA GPUs"),
    )


_FP8 = ("--kv-cache-dtype", "float8_e4m3fn", "--kv-scales", "0.03")
_NIXL = ("--transfer", "nixl")
_CONVERT = ("--kv-convert",)
_TOLERANCE = 0.2  # of log probabilities in bfloat16
_CONVERTED_TOLERANCE = 0.3  # of log probabilities if KV is converted
_ROLES: tuple[Literal["prefill"], Literal["decode"]] = ("prefill", "decode")
_LENGTHS = (5, 64, 300, 700)


def on_gpus(
    devices: str = "0",
    block_size: int = 64,
    layout: str = "BHLCND",
    options: tuple[str, ...] = (),
    dcp: int = 1,
    max_num_seqs: int = 8,
) -> Geometry:
    gpu = ("--device", "cuda", "--dtype", "bfloat16", "--devices", devices)
    lean = ("--max-num-seqs", str(max_num_seqs), "--no-enable-prefix-caching")
    tp = len(devices.split(","))
    return Geometry(tp, block_size, layout, (*gpu, *lean, *options), dcp)


_ONE = on_gpus()
_NHD = on_gpus("0", 16, "LBCNHD")
_TWO = on_gpus("0,1")
_SHARED = on_gpus("0,1", dcp=2)
_EXPERTS = on_gpus(max_num_seqs=256)
# With fewer than four GPUs, the prefill and decode servers share two GPUs.
_OTHER_TWO = "2,3" if torch.cuda.device_count() >= 4 else "1,0"
_CELLS = [
    pytest.param("gqa4", _ONE, _ONE, id="one geometry"),
    pytest.param("gqa4", _NHD, _ONE, id="NHD blocks of 16, mapped"),
    pytest.param("gqa4", _NHD, on_gpus(options=_NIXL), id="NHD blocks of 16, nixl"),
    pytest.param("gqa4", on_gpus(options=_FP8), on_gpus(options=_FP8), id="fp8"),
    pytest.param(
        "gqa4", on_gpus(options=_FP8), on_gpus(options=_CONVERT), id="fp8 to bfloat16"
    ),
    pytest.param("mla", _NHD, _ONE, id="latents, NHD blocks of 16"),
    pytest.param(
        "mla", on_gpus(options=_FP8), on_gpus("0", 16, options=_FP8), id="latents, fp8"
    ),
    pytest.param("moe", _NHD, _EXPERTS, id="experts, NHD blocks of 16"),
    pytest.param("moe", _EXPERTS, _TWO, id="experts, tp 1 to 2", marks=_gpus(2)),
    pytest.param("moe", _TWO, on_gpus("1"), id="experts, tp 2 to 1", marks=_gpus(2)),
    pytest.param("gqa4", _ONE, _TWO, id="tp 1 to 2", marks=_gpus(2)),
    pytest.param(
        "gqa4", _TWO, on_gpus("1", 16, "LBCNHD"), id="tp 2 to 1", marks=_gpus(2)
    ),
    pytest.param("mla", on_gpus("1"), _TWO, id="latents, tp 1 to 2", marks=_gpus(2)),
    pytest.param(
        "gqa4", _ONE, _SHARED, id="tp 1 to 2 that share tokens", marks=_gpus(2)
    ),
    pytest.param(
        "mla", _ONE, _SHARED, id="latents, tp 1 to 2 that share tokens", marks=_gpus(2)
    ),
    pytest.param(
        "gqa4",
        on_gpus("0,1", 16, "LBCNHD"),
        on_gpus("0,1,2,3", options=_NIXL, dcp=2),
        id="tp 2, NHD blocks of 16, to 4 that share tokens by twos, nixl",
        marks=_gpus(4),
    ),
    pytest.param(
        "gqa4", _ONE, on_gpus("1,2"), id="tp 1 to 2 on others", marks=_gpus(3)
    ),
    pytest.param("gqa4", _TWO, on_gpus(_OTHER_TWO), id="tp 2 to 2", marks=_gpus(2)),
    pytest.param(
        "gqa4",
        on_gpus("0,1", 16, "LBCNHD"),
        on_gpus("0,1,2,3"),
        id="tp 2 to 4",
        marks=_gpus(4),
    ),
    pytest.param(
        "gqa4",
        on_gpus("0,1,2,3"),
        on_gpus("2,3", options=_NIXL),
        id="tp 4 to 2, nixl",
        marks=_gpus(4),
    ),
    pytest.param(
        "mla", _TWO, on_gpus(_OTHER_TWO), id="latents, tp 2 to 2", marks=_gpus(2)
    ),
]


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[Farm]:
    """Starts the servers of all test cases concurrently, because starting takes most of
    the time.
    """
    cells = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    ]
    keys = {
        Key(role, supported_model_dir(c["model"]), c[role[0]])
        for c in cells
        for role in _ROLES
    }
    with farm(max_ranks=64) as engine_farm:
        engine_farm.get(*keys)
        yield engine_farm


@pytest.mark.parametrize(("model", "p", "d"), _CELLS)
def test_pair_gives_the_answers_of_a_decode_server(engines, model, p, d, request):
    prefiller, decoder = engines.pair(supported_model_dir(model), p, d)
    is_converted = _CONVERT[0] in d.options
    tolerance = _CONVERTED_TOLERANCE if is_converted else _TOLERANCE
    for length in _LENGTHS:
        seed = zlib.crc32(f"{request.node.name} {length}".encode())
        prompt = make_prompt(seed, length)
        params = prefill(prefiller.url, prompt, logprobs=1)
        pulled = generate(decoder.url, prompt, NUM_TOKENS, params)
        assert pulled.kv == {"transferred": length, "recomputed": 0, "skipped": 0}
        recomputed = generate(decoder.url, prompt, NUM_TOKENS)
        assert recomputed.kv["recomputed"] == length
        assert_same_up_to_a_tie(pulled, recomputed, tolerance)
    assert_idle(prefiller, decoder)


def assert_same_up_to_a_tie(actual: Reply, expected: Reply, tolerance: float) -> None:
    """Compares log probabilities up to and including the first token that differs.

    At that position, the tokens of both replies must have the same log probability.
    """
    pairs = zip(actual.token_ids, expected.token_ids, strict=True)
    num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), NUM_TOKENS)
    compared = slice(0, num_same + 1)
    assert actual.logprobs[compared] == pytest.approx(
        expected.logprobs[compared], abs=tolerance
    )

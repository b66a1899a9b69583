"""Servers of a model in which a layer has a window: prompts of several windows, through a pair of
unlike geometry and with hits at the window's edge, answered as by one server."""

from functools import partial
from pathlib import Path

import pytest

from tests.e2e.matrix import ask
from tests.rigs.client import make_prompt, prefill
from tests.rigs.cluster import assert_home, start_decode, start_prefill, started

WINDOW = 32
# The tiny Llama, read as one whose first layer sees a window only.
OVERRIDES = (
    '{"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": true, "sliding_window": 32, '
    '"layer_types": ["sliding_attention", "full_attention"]}'
)


@pytest.mark.slow  # tests/engine/test_real_pairs.py has them without processes
def test_a_pair_equals_one_server_and_moves_only_the_window(tiny_model: Path) -> None:
    model = "--hf-overrides", OVERRIDES, "--kv-verify", "all"
    p_argv = *model, "--block-size", "16", "--kv-layout", "LBCNHD", "--tp", "2"
    d_argv = *model, "--block-size", "8", "--kv-load-failure-policy", "fail"
    alone_argv = *model, "--no-enable-prefix-caching", "--block-size", "64"
    decodes = (partial(start_decode, tiny_model, *argv) for argv in (d_argv, alone_argv))
    with started(partial(start_prefill, tiny_model, *p_argv), *decodes) as (p, d, alone):
        text = make_prompt(8, 400)
        bytes_of = "baton_kv_transfer_bytes_total"
        # Whole, once more, from hits before, at and after a block's and the window's edge.
        for length in (400, 400, 64, 65, 96, 97, 127, 128, 240):
            prompt = [*text[:length], *text[:5]]
            before = d.metrics()[bytes_of]
            got = ask(d.url, prompt, 60, prefill(p.url, prompt, logprobs=1))
            assert got.token_ids == ask(alone.url, prompt, 60).token_ids
            pulled, hit = got.kv["transferred"], got.kv["skipped"]
            assert pulled + hit == length + 5 and got.kv["recomputed"] == 0
            # Keys and values of 4 heads of 16 elements of 4 bytes, in each of two layers.
            moved = (pulled + min(pulled, WINDOW)) * 2 * 4 * 16 * 4
            assert d.metrics()[bytes_of] - before == moved
        assert_home(p, d, alone)

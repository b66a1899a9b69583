"""Pairs of engines that serve models with windows, over real transfers: what moves of a prompt is
the end of it in layers with a window, and the tokens are transformers'."""

import msgspec
import pytest
import torch

from protocol.messages import SamplingParams
from protocol.metrics import stat_key
from tests.model.random_models import make
from tests.model.test_against_transformers import CASES
from tests.rigs.engine_pair import RealPair
from tests.rigs.shadow import MemoryTransport, add

WINDOW, NUM_TOKENS = 40, 10
PROMPT = [(37 * at * at + 11) % 131 for at in range(250)]
MODELS = ["gemma3", "gemma2", "mistral-window", "qwen3-window"]
GEOMETRIES = [
    {"p_block_size": 8, "d_block_size": 4, "p_order": "LBCNHD"},
    {"p_block_size": 4, "d_block_size": 16, "d_order": "BLCHND"},
    {"p_block_size": 16, "d_block_size": 16, "launch_bytes": 4096},
]


def wanted(reference, prompt: list[int]) -> list[int]:
    return reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()


def bytes_moved(pair: RealPair) -> float:
    return pair.d.core.connector.stats()["baton_kv_transfer_bytes"]


def answered(pair: RealPair, prompt: list[int], **members: object) -> MemoryTransport:
    request = add("r", prompt, NUM_TOKENS, SamplingParams(temperature=0.0), **members)
    return pair.prefill_and_decode(request)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_window_moves_and_the_tokens_are_those_of_who_keeps_all(name, geometry, tmp_path):
    """A prompt of several windows, one that goes on from its end, one from the window's edge."""
    architecture, options = CASES[name]
    reference = make(architecture, tmp_path, **options)
    pair = RealPair(tmp_path, verify="all", **geometry)
    groups = pair.groups
    size = geometry["d_block_size"]
    token_bytes = pair.make_pool(size, "BHLCND").layout.token_bytes
    moved = 0
    follow_up = [*PROMPT, *wanted(reference, PROMPT), 7, 8]
    edges = [[*PROMPT[:at], 3, 1] for at in (48, 96, 104)]
    for prompt in (PROMPT, follow_up, *edges):
        out = answered(pair, prompt)
        assert out.tokens("r") == wanted(reference, prompt)
        usage = out.terminals("r")[0].usage
        assert usage.recomputed == 0
        hit, stop = usage.skipped, len(prompt)
        whole = groups.windows.count(None) * (stop - hit)
        windows = (groups.count - groups.windows.count(None)) * min(WINDOW, stop - hit)
        moved += (whole + windows) * token_bytes
        assert bytes_moved(pair) == moved
    assert pair.d.core.connector.stats()["baton_kv_verified_tokens"] > 0
    pair.settle()
    pair.close()


@pytest.mark.parametrize("name", MODELS[:2])
def test_choices_go_on_from_a_pulled_window(name, tmp_path):
    """All but the first compute the prompt's last block anew, whose window begins earlier."""
    architecture, options = CASES[name]
    reference = make(architecture, tmp_path, **options)
    pair = RealPair(tmp_path, p_block_size=4, d_block_size=16)
    for length in (175, 176, 177):
        prompt = PROMPT[:length]
        out = answered(pair, prompt, num_choices=2)
        assert out.terminals("r")[0].usage.recomputed == 0
        for choice in range(2):
            assert out.tokens("r", choice) == wanted(reference, prompt)
    pair.settle()
    pair.close()


def test_a_peer_without_the_same_groups_is_refused(tmp_path):
    architecture, options = CASES["gemma3"]
    make(architecture, tmp_path, **options)
    other = RealPair(tmp_path, p_block_size=4, d_block_size=4)
    compat = msgspec.structs.replace(other.compat, kv_windows=())
    other.close()
    pair = RealPair(tmp_path, p_block_size=4, d_block_size=4, p_compat=compat)
    assert answered(pair, PROMPT).terminals("r")[0].usage.transferred == 0
    refused = stat_key("baton_handshakes", outcome="peer_incompatible")
    assert pair.d.core.connector.stats()[refused] == 1
    pair.settle()
    pair.close()

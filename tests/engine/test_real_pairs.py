"""Every architecture through a prefill and a decode engine of unlike geometry, over real transfers:
the tokens of transformers. Prompts are longer than a step, so they are computed in chunks over
paged KV. Of layers with a window the end of a prompt moves alone."""

import pytest

from model.architectures.table import ARCHITECTURES
from protocol import kv_params
from protocol.messages import Migrate, ResumedChoice, SamplingParams
from tests.model.random_models import continued, make
from tests.model.test_against_transformers import CASES
from tests.rigs.engine_pair import RealPair
from tests.rigs.shadow import MemoryTransport, add

WINDOW, NUM_TOKENS = 40, 10
PROMPT = [(37 * at * at + 11) % 131 for at in range(250)]
NEXT = [
    *PROMPT[:93],
    5,
    9,
]  # what both sides know of it ends within windows of 40 tokens
MODELS = ["gemma3", "gemma2", "mistral-window", "qwen3-window"]
GEOMETRIES = [
    {"p_block_size": 8, "block_size": 4, "p_order": "LBCNHD"},
    {"p_block_size": 4, "block_size": 16, "order": "BLCHND"},
    {"p_block_size": 16, "block_size": 16, "launch_bytes": 4096},
]


def answered(pair: RealPair, prompt: list[int], **members: object) -> MemoryTransport:
    request = add("r", prompt, NUM_TOKENS, SamplingParams(temperature=0.0), **members)
    return pair.prefill_and_decode(request)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_pair_of_engines_continues_as_transformers_does(name, tmp_path):
    architecture, options = CASES[ARCHITECTURES[name].test_case]
    reference = make(architecture, tmp_path, **options)
    with RealPair(tmp_path, p_block_size=8, block_size=4, p_order="LBCNHD") as pair:
        for prompt in (PROMPT[:170], NEXT):
            found = answered(pair, prompt).tokens("r")
            assert found == continued(reference, prompt, NUM_TOKENS)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_window_moves_and_the_tokens_are_those_of_who_keeps_all(
    name, geometry, tmp_path
):
    """A prompt of several windows, one that goes on from its end, one from the window's edge."""
    architecture, options = CASES[name]
    reference = make(architecture, tmp_path, **options)
    with RealPair(tmp_path, verify="all", **geometry) as pair:
        groups = pair.d.groups
        size = geometry["block_size"]
        token_bytes = pair.d.pools[0].layout.token_bytes
        moved = 0
        follow_up = [*PROMPT, *continued(reference, PROMPT, NUM_TOKENS), 7, 8]
        edges = [[*PROMPT[:at], 3, 1] for at in (48, 96, 104)]
        for prompt in (PROMPT, follow_up, *edges):
            # Choices but the first compute the prompt's last block anew: its window begins earlier.
            choices = 1 + (size == 16)
            out, stop = answered(pair, prompt, num_choices=choices), len(prompt)
            for choice in range(choices):
                assert out.tokens("r", choice) == continued(
                    reference, prompt, NUM_TOKENS
                )
            usage = out.terminals("r")[0].usage
            assert usage.recomputed == 0
            reach = (stop - 1) // size * size if choices > 1 else stop
            whole = groups.windows.count(None) * (stop - usage.skipped)
            windows = (groups.count - groups.windows.count(None)) * (
                stop - max(usage.skipped, reach - WINDOW)
            )
            moved += (whole + windows) * token_bytes
            told = pair.d.core.connector.stats()
            assert (
                told["baton_kv_transfer_bytes"] == moved
                and told["baton_kv_verified_tokens"] > 0
            )
        assert moved_on(pair, PROMPT[::-1]) == continued(
            reference, PROMPT[::-1], NUM_TOKENS
        )


def moved_on(pair: RealPair, prompt: list[int]) -> list[int]:
    """The tokens of a sequence that D has begun and P goes on with."""
    p, d = pair.engines
    out = d.out = d.core.transport = MemoryTransport()
    name = pair.begin(d, prompt, NUM_TOKENS)
    pair.until(lambda: len(out.tokens(name)) >= 3)
    d.core.round([Migrate(name)])
    remote = kv_params.to_remote_prefill(
        kv_params.parse(pair.end_of(d, name).kv_transfer_params)
    )
    known = out.tokens(name)
    theirs = pair.begin(
        p, prompt, NUM_TOKENS, remote=remote, resumed_choices=[ResumedChoice(known)]
    )
    tokens = pair.tokens_of(p, theirs)
    assert len(known) >= 3 and p.kv(theirs)[1] == 0
    return known + tokens

"""Every architecture in a prefill and a decode engine of different geometry.

Transfers are real, and the tokens equal those of transformers. Prompts are longer than
a step, so they are computed in chunks over paged KV. Layers with a window transfer only
the end of a prompt.
"""

import pytest

from model.architectures.table import ARCHITECTURES
from protocol import kv_params
from protocol.messages import Migrate, ResumedChoice, SamplingParams
from tests.model.random_models import continued, make
from tests.model.test_against_transformers import CASES
from tests.rigs.engine_pair import RealPair
from tests.rigs.shadow import MemoryTransport, add

WINDOW, NUM_TOKENS = 40, 10
PROMPT = [(37 * i * i + 11) % 131 for i in range(250)]
# The prefix that both sides have cached ends within windows of 40 tokens.
SECOND_PROMPT = [*PROMPT[:93], 5, 9]
MODELS = ["gemma3", "gemma2", "mistral-window", "qwen3-window"]
GEOMETRIES = [
    {"p_block_size": 8, "block_size": 4, "p_order": "LBCNHD"},
    {"p_block_size": 4, "block_size": 16, "order": "BLCHND"},
    {"p_block_size": 16, "block_size": 16, "launch_bytes": 4096},
]


def run_pair(pair: RealPair, prompt: list[int], **fields: object) -> MemoryTransport:
    request = add("r", prompt, NUM_TOKENS, SamplingParams(temperature=0.0), **fields)
    return pair.prefill_and_decode(request)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pair_of_engines_continues_prompts_as_transformers_does(name, tmp_path):
    architecture, options = CASES[ARCHITECTURES[name].test_case]
    reference = make(architecture, tmp_path, **options)
    with RealPair(tmp_path, p_block_size=8, block_size=4, p_order="LBCNHD") as pair:
        for prompt in (PROMPT[:170], SECOND_PROMPT):
            tokens = run_pair(pair, prompt).tokens("r")
            assert tokens == continued(reference, prompt, NUM_TOKENS)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", MODELS)
def test_transfer_of_windows_gives_the_tokens_of_a_model_with_all_kv(
    name, geometry, tmp_path
):
    """The first prompt is longer than several windows. The second prompt continues the
    first prompt and its answer. Each later prompt shares the beginning of the first
    prompt, up to near the edge of a window.
    """
    architecture, options = CASES[name]
    reference = make(architecture, tmp_path, **options)
    with RealPair(tmp_path, verify="all", **geometry) as pair:
        groups = pair.d.groups
        size = geometry["block_size"]
        token_bytes = pair.d.pools[0].layout.token_bytes
        moved_bytes = 0
        follow_up = [*PROMPT, *continued(reference, PROMPT, NUM_TOKENS), 7, 8]
        edges = [[*PROMPT[:i], 3, 1] for i in (48, 96, 104)]
        for prompt in (PROMPT, follow_up, *edges):
            # All choices except the first compute the prompt's last block again. So
            # they need the window before this block, which begins earlier.
            choices = 2 if size == 16 else 1
            out = run_pair(pair, prompt, num_choices=choices)
            stop = len(prompt)
            for choice in range(choices):
                assert out.tokens("r", choice) == continued(
                    reference, prompt, NUM_TOKENS
                )
            usage = out.terminals("r")[0].usage
            assert usage.recomputed == 0
            window_end = (stop - 1) // size * size if choices > 1 else stop
            full_tokens = groups.windows.count(None) * (stop - usage.skipped)
            window_tokens = (groups.count - groups.windows.count(None)) * (
                stop - max(usage.skipped, window_end - WINDOW)
            )
            moved_bytes += (full_tokens + window_tokens) * token_bytes
            stats = pair.d.core.connector.stats()
            assert stats["baton_kv_transfer_bytes"] == moved_bytes
            assert stats["baton_kv_verified_tokens"] > 0
        assert migrate(pair, PROMPT[::-1]) == continued(
            reference, PROMPT[::-1], NUM_TOKENS
        )


def migrate(pair: RealPair, prompt: list[int]) -> list[int]:
    """Begins a sequence on D and migrates it to P. Returns the sequence's tokens."""
    p, d = pair.engines
    out = d.out = d.core.transport = MemoryTransport()
    name = pair.begin(d, prompt, NUM_TOKENS)
    pair.until(lambda: len(out.tokens(name)) >= 3)
    d.core.round([Migrate(name)])
    remote = kv_params.to_remote_prefill(
        kv_params.parse(pair.end_of(d, name).kv_transfer_params)
    )
    sent_tokens = out.tokens(name)
    resumed = [ResumedChoice(sent_tokens)]
    p_name = pair.begin(p, prompt, NUM_TOKENS, remote=remote, resumed_choices=resumed)
    tokens = pair.tokens_of(p, p_name)
    assert len(sent_tokens) >= 3 and p.kv(p_name)[1] == 0
    return sent_tokens + tokens

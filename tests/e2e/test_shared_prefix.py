"""Four servers together compute a shared prefix only once, although prompts with this
prefix arrive at the same time.
"""

from functools import partial
from pathlib import Path

import pytest

from tests.rigs.client import complete_all, fresh_prompt, make_prompt
from tests.rigs.cluster import (
    Server,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
)

PREFIX_TOKENS = 512
SUFFIX_TOKENS = 48
NUM_CLIENTS = 12


def _computed(server: Server) -> float:
    """Return the number of prompt tokens in the server's steps so far."""
    return server.metrics()["baton_engine_step_prompt_tokens_total"]


def _computed_share(
    model: Path, num_prefills: int, num_prefixes: int, num_prompts: int
) -> float:
    """Return the number of computed tokens divided by the smallest possible number.

    Each of the prefixes is shared by `num_prompts` prompts. Prompts of different
    prefixes alternate, and many arrive at the same time. A warm-up first lets the
    servers measure their speed.
    """
    argv = ["--kv-cache-tokens", "32768", "--max-queue-s", "600"]
    starts = [partial(start_prefill, model, *argv)] * num_prefills
    starts += [partial(start_decode, model, *argv)] * (4 - num_prefills)
    with started(*starts) as servers:
        argv = ["--itl-target-s", "0.5", "--disaggregate", "auto"]
        argv += ["--max-queue-s", "600"]
        proxy = start_proxy(servers[:num_prefills], servers[num_prefills:], *argv)
        with running(proxy):
            for _ in range(2):
                warm_up = [fresh_prompt(PREFIX_TOKENS) for _ in range(NUM_CLIENTS)]
                complete_all(proxy.url, warm_up, 8)
            before = sum(map(_computed, servers))
            prefixes = [
                make_prompt(seed, PREFIX_TOKENS) for seed in range(num_prefixes)
            ]
            prompts = [
                prefixes[index % num_prefixes] + fresh_prompt(SUFFIX_TOKENS)
                for index in range(num_prefixes * num_prompts)
            ]
            for start in range(0, len(prompts), NUM_CLIENTS):
                complete_all(proxy.url, prompts[start : start + NUM_CLIENTS], 8)
            computed = sum(map(_computed, servers)) - before
    necessary = num_prefixes * (PREFIX_TOKENS + num_prompts * SUFFIX_TOKENS)
    return computed / necessary


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_prefills", [2, 0])
def test_four_servers_of_a_real_model_compute_shared_prefixes_once(
    default_model, num_prefills
):
    assert _computed_share(default_model, num_prefills, 4, 24) <= 1.15

"""Prompts that begin alike and come at once, to four servers: what they share is computed once."""

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

PREFIX, OWN = 512, 48  # tokens
CLIENTS = 12


def _computed(server: Server) -> float:
    """Tokens of prompts in the server's steps, so far."""
    return server.metrics()["baton_engine_step_prompt_tokens_total"]


def _share(model: Path, num_prefills: int, groups: int, each: int) -> float:
    """Tokens computed, of the fewest that are possible: `each` prompts of so many groups come in
    turn, many at once, to servers whose speed is known."""
    make = [start_prefill] * num_prefills + [start_decode] * (4 - num_prefills)
    patient = "--max-queue-s", "600"
    argv = "--kv-cache-tokens", "32768", *patient
    with started(*(partial(m, model, *argv) for m in make)) as servers:
        argv = "--itl-target-s", "0.5", "--disaggregate", "auto", *patient
        proxy = start_proxy(servers[:num_prefills], servers[num_prefills:], *argv)
        with running(proxy):
            for _ in range(2):
                complete_all(
                    proxy.url, [fresh_prompt(PREFIX) for _ in range(CLIENTS)], 8
                )
            before = sum(map(_computed, servers))
            beginnings = [make_prompt(group, PREFIX) for group in range(groups)]
            prompts = [
                beginnings[n % groups] + fresh_prompt(OWN) for n in range(groups * each)
            ]
            for at in range(0, len(prompts), CLIENTS):
                complete_all(proxy.url, prompts[at : at + CLIENTS], 8)
            computed = sum(map(_computed, servers)) - before
    return computed / (groups * (PREFIX + each * OWN))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_prefills", [2, 0])
def test_four_servers_of_a_real_model_compute_what_prompts_share_once(
    default_model, num_prefills
):
    assert _share(default_model, num_prefills, 4, 24) <= 1.15

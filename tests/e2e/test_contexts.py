"""Servers of unequal context lengths, and numbers of sequences, behind one proxy."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.reference import Reference
from tests.rigs.client import complete, fresh_prompt, make_prompt, post
from tests.rigs.cluster import (
    Cluster,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
    wait_until,
)

pytestmark = pytest.mark.slow

_P, _SMALL, _LARGE = 300, 200, 400


@pytest.fixture(scope="module")
def uneven(tiny_model: Path) -> Iterator[Cluster]:
    few = ("--max-num-seqs", "4")
    p = partial(start_prefill, tiny_model, "--max-model-len", str(_P), "--lease-s", "120", *few)
    small = partial(start_decode, tiny_model, "--max-model-len", str(_SMALL), *few)
    d = [small, partial(start_decode, tiny_model, "--max-model-len", str(_LARGE))]
    with started(p, *d) as (prefiller, *decode):
        with running(proxy := start_proxy([prefiller], decode)):
            yield Cluster([prefiller], decode, proxy, tiny_model)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "transferred"),
    [(100, 50, 100), (190, 10, 190), (190, 11, 190), (100, 290, 100), (250, 20, 250), (350, 20, 0)],
)
def test_a_request_is_served_wherever_it_fits(
    uneven: Cluster,
    tiny_reference: Reference,
    prompt_tokens: int,
    max_tokens: int,
    transferred: int,
) -> None:
    for _ in range(3):  # whoever's turn it is
        prompt = fresh_prompt(prompt_tokens)
        answer = complete(uneven.url, prompt, max_tokens)
        assert answer.token_ids == tiny_reference.generate(prompt, max_tokens)
        assert answer.kv["transferred"] == transferred
    for server in (*uneven.prefill, *uneven.decode):
        wait_until(server.all_blocks_home, 10)


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(100, 301), (250, 151), (401, 1)])
def test_a_request_that_fits_nowhere_is_refused_before_any_work(
    uneven: Cluster, prompt_tokens: int, max_tokens: int
) -> None:
    steps = "baton_engine_step_tokens_total"
    servers = (*uneven.prefill, *uneven.decode)
    before = [server.metrics()[steps] for server in servers]
    answer = post(uneven.url, prompt=make_prompt(1, prompt_tokens), max_tokens=max_tokens)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert [server.metrics()[steps] for server in servers] == before


def test_choices_are_drawn_wherever_they_may_be(uneven: Cluster, tiny_reference: Reference) -> None:
    for n, transferred in ((4, 100), (5, 0), (5, 0)):
        prompt = fresh_prompt(100)
        answer = complete(uneven.url, prompt, 6, n=n)
        assert answer.token_ids == tiny_reference.generate(prompt, 6)
        assert answer.kv["transferred"] == transferred

"""Servers with an MTP layer or an EAGLE-3 drafter give the answers of servers without
one."""

from functools import partial

import pytest

from tests.make_models import ensure_model
from tests.rigs.cluster import Server, assert_idle, cluster, start_decode, started
from tests.rigs.drafting_requests import REQUESTS, answers
from tests.rigs.state_drafts import engine_options

_MAX_TOKENS = 150


def _assert_equal_answers(drafting: Server, url: str, plain_url: str) -> None:
    """Assert that answers are equal, and that the counts of proposals in answers agree
    with the metrics of the drafting server."""
    counts = [0, 0]
    for options in REQUESTS:
        texts, *answer_counts = answers(url, options, _MAX_TOKENS)
        assert texts == answers(plain_url, options, _MAX_TOKENS)[0]
        counts = [a + b for a, b in zip(counts, answer_counts, strict=True)]
    num_accepted, num_rejected = counts
    metrics = drafting.metrics()
    (accepted,) = (
        value
        for name, value in metrics.items()
        if name.startswith("baton_speculative_accepted_tokens_total")
        and ('"mtp"' in name or '"eagle3"' in name)
    )
    assert accepted == num_accepted
    # The drafter is as slow as the target model, so proposals do not pay off. The
    # server still proposes a few tokens, to find out whether that has changed.
    assert num_accepted + num_rejected > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "argv"),
    [("mtp-gqa", ()), ("mtp-mla", ("--tp", "2")), ("eagle3-gqa", ())],
    ids=["mtp", "mtp on two ranks", "eagle3"],
)
def test_answers_are_those_without_a_drafter(kind, argv) -> None:
    folder, speculate = engine_options(kind, 2)
    start = partial(start_decode, folder)
    with started(start, partial(start, "--speculate", speculate, *argv)) as servers:
        plain, drafting = servers
        _assert_equal_answers(drafting, drafting.url, plain.url)
        assert_idle(*servers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "prefill_drafts", "prefill_argv"),
    [
        ("mtp-gqa", False, ()),
        ("mtp-gqa", True, ("--tp", "2", "--block-size", "16")),
        ("eagle3-gqa", True, ("--kv-layout", "LBCNHD")),
    ],
    ids=["no drafter", "two ranks", "another layout"],
)
def test_pulled_prompts_are_continued_with_proposals(
    kind, prefill_drafts, prefill_argv
) -> None:
    """If the prefill server has the drafter, too, the decode server also pulls the KV
    of the drafter.
    """
    folder, speculate = engine_options(kind, 2)
    argv = ("--speculate", speculate)
    if prefill_drafts:
        prefill_argv += argv
    with (
        started(partial(start_decode, folder)) as (plain,),
        cluster(folder, prefill_argv=prefill_argv, decode_argv=argv) as pair,
    ):
        _assert_equal_answers(pair.decode[0], pair.url, plain.url)
        assert_idle(plain, *pair.prefill, *pair.decode)


@pytest.mark.parametrize(
    ("speculate", "message"),
    [
        ("mtp", "--speculate mtp: this model has no MTP layer"),
        ("eagle3:no/such:4", "--speculate eagle3:no/such: .* is not a directory"),
    ],
)
def test_drafter_that_does_not_exist_is_refused_at_the_start(
    speculate, message
) -> None:
    with pytest.raises(AssertionError, match=message):
        start_decode(ensure_model("gqa"), "--speculate", speculate)

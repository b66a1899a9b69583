"""Several choices and prompt logprobs on a P/D pair: KV is pulled once, then forked."""

import pytest

from protocol.messages import AbortRequest
from tests.rigs.shadow import expected_output, expected_scores

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def _expected(
    prompt: list[int], num_choices: int, max_tokens: int = 6
) -> list[list[int]]:
    return [
        expected_output(prompt, max_tokens, choice=choice)
        for choice in range(num_choices)
    ]


@pytest.mark.parametrize("length", [1, 4, 5, 8, 14])
def test_choices_are_prefilled_once_pulled_once_and_forked(pair, length):
    prompt = PROMPT[:length]
    params = pair.prefill(prompt, num_choices=3)
    assert [token["id"] for token in params["first_tokens"]] == [
        tokens[0] for tokens in _expected(prompt, 3)
    ]
    name = pair.submit(prompt, params, num_choices=3)
    assert pair.answers(name, 3) == _expected(prompt, 3)
    usages = [end.usage for end in pair.d.out.terminals(name)]
    assert [
        usage and (usage.transferred, usage.recomputed, usage.skipped)
        for usage in usages
    ] == [(length, 0, 0)] * 3
    num_computed = 3 * 5 + 2 * (length % 4)
    assert pair.d.executor.num_tokens == num_computed, (
        "the outputs, and twice the prompt's last partial block, which is not shared"
    )


@pytest.mark.parametrize("num_choices", [1, 2])
def test_first_tokens_are_sent_before_any_byte_has_moved(pair, num_choices):
    choices = range(num_choices)
    pair.d.movers.stall()
    name = pair.submit(
        PROMPT, pair.prefill(PROMPT, num_choices=num_choices), num_choices=num_choices
    )
    first = [tokens[:1] for tokens in _expected(PROMPT, num_choices)]
    pair.until(lambda: [pair.d.out.tokens(name, choice) for choice in choices] == first)
    assert not pair.d.out.terminals(name)
    pair.d.movers.resume()
    assert pair.answers(name, num_choices) == _expected(PROMPT, num_choices)


def test_fully_cached_prompt_is_forked_without_a_pull(pair):
    full_blocks = PROMPT[:12]
    pair.answer(pair.submit(full_blocks))
    pair.d.movers.stall()
    params = pair.prefill(full_blocks, num_choices=3)
    name = pair.submit(full_blocks, params, num_choices=3)
    assert pair.answers(name, 3) == _expected(full_blocks, 3)


@pytest.mark.parametrize("max_tokens", [1, 6])
@pytest.mark.parametrize("survivor", [None, 0, 1, 2])
def test_choices_that_end_with_their_first_token_need_no_step_on_d(
    pair, survivor, max_tokens
):
    stop = [
        tokens[0]
        for choice, tokens in enumerate(_expected(PROMPT, 3))
        if choice != survivor
    ]
    params = pair.prefill(PROMPT, num_choices=3, stop_token_ids=stop)
    name = pair.submit(PROMPT, params, max_tokens, num_choices=3, stop_token_ids=stop)
    expected = [
        expected_output(PROMPT, max_tokens, stop, choice=choice) for choice in range(3)
    ]
    assert pair.answers(name, 3) == expected
    if survivor is None or max_tokens == 1:
        assert pair.d.executor.num_steps == 0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    ("num_choices", "redrawn"), [(1, False), (1, True), (3, False)]
)
def test_policy_decides_whether_a_failed_pull_fails_the_request(
    make_pair, num_choices, redrawn, policy
):
    pair = make_pair(policy=policy)
    params = pair.prefill(PROMPT, num_choices=num_choices)
    pair.d.movers.fail(1)
    name = pair.submit(PROMPT, params, num_choices=num_choices, redrawn=redrawn)
    if policy == "recompute":
        assert pair.answers(name, num_choices) == _expected(PROMPT, num_choices)
        assert pair.d.kv(name) == (0, 14, 0)
    else:
        pair.wait_for_failure(name, "transfer_failed")


@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs_come_with_the_reference(pair, num_top):
    params = pair.prefill(PROMPT, num_prompt_logprobs=num_top)
    num_before = pair.d.executor.num_tokens
    name = pair.submit(PROMPT, params, num_prompt_logprobs=num_top)
    assert pair.answer(name) == expected_output(PROMPT, 6)
    assert pair.d.out.prompt_logprobs(name) == expected_scores(PROMPT, num_top)
    assert pair.d.out.deltas[0].prompt_logprobs, "sent before the first token"
    assert pair.d.executor.num_tokens == num_before + 5, "D computes no prompt token"


@pytest.mark.parametrize("num_top", [None, 1])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 14])
def test_first_tokens_are_drawn_from_kv_that_was_pulled(
    pair, length, num_choices, num_top
):
    prompt = PROMPT[:length]
    for skipped in (0, (length - 1) // 4 * 4):
        params = pair.prefill(prompt, num_choices=2, num_prompt_logprobs=num_top)
        num_before = pair.d.executor.num_tokens
        name = pair.submit(
            prompt,
            params,
            redrawn=True,
            num_choices=num_choices,
            num_prompt_logprobs=num_top,
        )
        assert pair.answers(name, num_choices) == _expected(prompt, num_choices)
        assert pair.d.kv(name) == (length - 1 - skipped, 1, skipped)
        num_computed = 1 + num_choices * 5 + (num_choices - 1) * (length % 4)
        assert pair.d.executor.num_tokens == num_before + num_computed, (
            "the prompt's last token, the outputs, and blocks that are not shared"
        )
        if num_top is not None:
            assert pair.d.out.prompt_logprobs(name) == expected_scores(prompt, num_top)
        pair.settle()
    assert pair.d.core.stats()["baton_kv_first_tokens_redrawn"] == 2


def test_request_that_only_scores_receives_no_first_token(pair):
    params = pair.prefill(PROMPT, num_prompt_logprobs=1)
    name = pair.submit(PROMPT, params, 0, redrawn=True, num_prompt_logprobs=1)
    assert pair.answer(name) == []
    assert pair.d.out.prompt_logprobs(name) == expected_scores(PROMPT, 1)
    assert pair.d.kv(name) == (13, 1, 0)


@pytest.mark.parametrize("length", [3, 6, 7, 11])
def test_first_choice_may_be_aborted_while_its_prompt_is_recomputed(pair, length):
    """The step that recomputes the prompt may also compute the first token, if this
    token fills a block."""
    prompt = PROMPT[:length]
    for num_rounds in range(4):
        prompt = [num_rounds, *prompt[1:]]
        params = pair.prefill(prompt, num_choices=2)
        pair.d.movers.fail(1)
        name = pair.submit(prompt, params, num_choices=2)
        pair.until(lambda: bool(pair.d.core.scheduler.running))
        for _ in range(num_rounds):
            pair.d.core.round([])
        pair.d.core.round([AbortRequest(name, 0)])
        assert pair.answers(name, 2)[1] == expected_output(prompt, 6, choice=1)
        pair.settle()

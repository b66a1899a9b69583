"""Requests with retention: the engine evicts their prompts later than other prompts."""

from hypothesis import given
from hypothesis import strategies as st

from kvcache.groups import ONE_GROUP, KVGroups
from protocol.messages import AddRequest, KVUsage, Retention
from tests.rigs.examples import examples
from tests.rigs.shadow import (
    MemoryTransport,
    add,
    assert_all_blocks_free,
    expected_output,
    make_core,
    run_until_idle,
    windowed_output,
)

PROMPT = list(range(20))  # five blocks of four tokens
WINDOWS = KVGroups((None, 8))


def usage_of(out: MemoryTransport, request_id: str) -> KVUsage:
    usage = out.terminals(request_id)[-1].usage
    assert usage is not None
    return usage


def flood(index: int) -> AddRequest:
    """Returns a request whose prompt shares no prefix with other prompts."""
    return add(f"flood-{index}", [20 + index % 30, *range(27)], 1)


def test_kept_prompt_is_found_after_other_prompts_have_filled_the_pool(depth):
    for retention, num_found in (([Retention(20, 60.0)], 16), ([], 0)):
        core, _, out = make_core(depth=depth, num_blocks=17)
        run_until_idle(core, add("a", PROMPT, 4, retention=retention))
        for index in range(9):
            run_until_idle(core, flood(index))
        run_until_idle(core, add("b", PROMPT, 4))
        assert usage_of(out, "b").skipped == num_found
        assert out.tokens("b") == expected_output(PROMPT, 4)
        assert_all_blocks_free(core)


def test_only_the_part_before_the_mark_is_kept(depth):
    core, _, out = make_core(depth=depth, num_blocks=17)
    run_until_idle(core, add("a", PROMPT, 4, retention=[Retention(11, 60.0)]))
    assert core.stats()["baton_kv_blocks_pinned"] == 2
    for index in range(9):
        run_until_idle(core, flood(index))
    run_until_idle(core, add("b", PROMPT, 4))
    assert usage_of(out, "b").skipped == 8


def test_pin_begins_anew_with_each_request_that_asks_for_it():
    core, _, _ = make_core()
    pins = core.scheduler.allocator._pins
    run_until_idle(core, add("a", PROMPT, 4, retention=[Retention(20, 60.0)]))
    before = {block: pins.pin_of(block).expires_at_s for block in pins}
    run_until_idle(core, add("b", PROMPT, 4, retention=[Retention(20, 60.0)]))
    after = {block: pins.pin_of(block).expires_at_s for block in pins}
    assert before.keys() == after.keys() and len(after) == 5
    assert all(after[block] > before[block] for block in after)


def test_one_key_pins_at_most_its_share_of_the_pool():
    core, _, _ = make_core(num_blocks=17)
    for share, prompt in (("a", PROMPT), ("a", PROMPT[::-1]), ("b", [*range(30, 39)])):
        retention = [Retention(len(prompt), 60.0)]
        run_until_idle(
            core, add(f"{prompt}", prompt, 1, share=share, retention=retention)
        )
    stats = core.stats()
    assert stats["baton_kv_blocks_pinned"] == 8 + 2
    assert stats["baton_kv_pins_refused"] == 2


def test_pinned_blocks_are_evicted_if_nothing_else_is_left(depth):
    core, _, out = make_core(depth=depth, num_blocks=17)
    for share in ("a", "b"):
        prompt = [ord(share) % 50, *range(27)]
        retention = [Retention(28, 60.0)]
        run_until_idle(core, add(share, prompt, 1, share=share, retention=retention))
    prompt = list(range(49, 0, -1))
    run_until_idle(core, add("c", prompt, 8))
    assert out.tokens("c") == expected_output(prompt, 8)
    assert core.stats()["baton_kv_pinned_evicted"] > 0
    assert_all_blocks_free(core)


def test_windowed_prompt_is_kept_with_the_windows_that_a_hit_needs(depth):
    core, _, out = make_core(depth=depth, num_blocks=33, groups=WINDOWS)
    run_until_idle(core, add("a", PROMPT, 4, retention=[Retention(20, 60.0)]))
    for index in range(9):
        run_until_idle(core, flood(index))
    run_until_idle(core, add("b", [*PROMPT, 7], 4))
    assert usage_of(out, "b").skipped == 20
    assert out.tokens("b") == windowed_output([*PROMPT, 7], 4, WINDOWS)
    assert_all_blocks_free(core)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # the token that the prompt repeats
            st.integers(1, 30),  # the length of the prompt
            st.integers(0, 40),  # number of tokens to keep
            st.sampled_from(["a", "b"]),
            st.sampled_from([1, 3]),  # number of choices
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([ONE_GROUP, WINDOWS]),
)
@examples(60)
def test_random_requests_with_pins_get_the_same_tokens(requests, groups):
    """Requests run concurrently in a pool that is too small for all of them."""
    core, _, out = make_core(num_blocks=37, groups=groups)
    messages = [
        add(
            f"{index}",
            [first] * length,
            5,
            num_choices=num_choices,
            share=share,
            retention=[Retention(num_kept, 60.0), Retention(num_kept // 2, 90.0)],
        )
        for index, (first, length, num_kept, share, num_choices) in enumerate(requests)
    ]
    run_until_idle(core, *messages)
    for index, (first, length, _, _, num_choices) in enumerate(requests):
        for choice in range(num_choices):
            prompt = [first] * length
            if groups is ONE_GROUP:
                expected = expected_output(prompt, 5, choice=choice)
            else:
                expected = windowed_output(prompt, 5, groups, choice)
            assert out.tokens(f"{index}", choice) == expected
    assert_all_blocks_free(core)

"""Round robin as a function."""

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.routing import choose, round_robin

URLS = ["a", "b", "c"]


def test_it_starts_with_the_first_and_goes_round() -> None:
    last, seen = None, []
    for _ in range(4):
        last = round_robin(URLS, last, lambda _: True)
        seen.append(last)
    assert seen == ["a", "b", "c", "a"]


def test_servers_that_cannot_be_used_are_passed_over() -> None:
    assert round_robin(URLS, "a", {"a", "c"}.__contains__) == "c"
    assert round_robin(URLS, "a", {"a"}.__contains__) == "a"
    assert round_robin(URLS, "a", lambda _: False) is None
    assert round_robin([], None, lambda _: True) is None


def test_a_last_server_that_has_left_is_no_obstacle() -> None:
    assert round_robin(URLS, "gone", lambda _: True) == "a"


def test_an_open_circuit_moves_a_server_to_the_end_and_no_further() -> None:
    everyone = frozenset(URLS).__contains__
    assert choose(URLS, "a", ready=everyone, admits={"a"}.__contains__) == "a"
    assert choose(URLS, "a", ready=everyone, admits=lambda _: False) == "b"
    assert choose(URLS, "a", ready={"a"}.__contains__, admits={"b"}.__contains__) == "a"
    assert choose(URLS, "a", ready=lambda _: False, admits=everyone) is None


@settings(deadline=None)
@given(st.integers(1, 6), st.data())
def test_usable_servers_get_equal_shares(num_servers: int, data: st.DataObject) -> None:
    urls = [str(i) for i in range(num_servers)]
    usable = data.draw(st.sets(st.sampled_from(urls), min_size=1))
    last, counts = None, dict.fromkeys(usable, 0)
    for _ in range(3 * len(usable)):
        last = round_robin(urls, last, usable.__contains__)
        assert last is not None
        counts[last] += 1
    assert set(counts.values()) == {3}
